# /// script
# dependencies = ["agent-framework-core==1.23.0", "agent-framework-openai==1.17.0"]
# [tool.harness]
# dialect = "responses"
# ///
import asyncio
import os
import sys

from agent_framework import Agent
from agent_framework.openai import OpenAIChatClient


def look(where: str, times: int = 1) -> str:
    """Look somewhere."""
    return f"{where}: nothing, {times} times"


async def main() -> None:
    client = OpenAIChatClient(model=os.environ["MODEL"], base_url=os.environ["OPENAI_BASE_URL"], api_key="none")
    agent = Agent(client, "You look.", tools=[look])
    session = agent.create_session()
    for question in sys.argv[1:]:
        answer = await agent.run(question, session=session)
    print(answer.text)


asyncio.run(main())
