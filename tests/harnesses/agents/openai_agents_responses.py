# /// script
# dependencies = ["openai-agents==0.24.0"]
# [tool.harness]
# dialect = "responses"
# unknown = false
# ///
import asyncio
import os
import sys

from agents import Agent, OpenAIResponsesModel, Runner, SQLiteSession, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)


@function_tool
def look(where: str, times: int = 1) -> str:
    """Look somewhere."""
    return f"{where}: nothing, {times} times"


async def main() -> None:
    model = OpenAIResponsesModel(os.environ["MODEL"], AsyncOpenAI())
    agent = Agent(name="one", instructions="You look.", model=model, tools=[look])
    session = SQLiteSession("one")
    for question in sys.argv[1:]:
        answer = (await Runner.run(agent, question, session=session)).final_output
    print(answer)


asyncio.run(main())
