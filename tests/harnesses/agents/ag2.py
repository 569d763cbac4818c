# /// script
# dependencies = ["ag2[openai]==1.2.1"]
# [tool.harness]
# dialect = "chat"
# ///
import asyncio
import os
import sys

from ag2 import Agent
from ag2.config import OpenAIConfig


def look(where: str, times: int = 1) -> str:
    """Look somewhere."""
    return f"{where}: nothing, {times} times"


async def main() -> None:
    config = OpenAIConfig(model=os.environ["MODEL"], streaming=True)
    said = Agent("looker", "You look.", config=config, tools=[look])
    for question in sys.argv[1:]:
        said = await said.ask(question)
    print(said.body)


asyncio.run(main())
