# /// script
# [tool.harness]
# of = "openai_agents"
# scene = "agents"
# beside = "You look under tables."
# then = {name = "table", arguments = {input = "Look under the table."}}
# ///
import asyncio
import os
import sys

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)


@function_tool
def look(where: str, times: int = 1) -> str:
    """Look somewhere."""
    return f"{where}: nothing, {times} times"


async def main() -> None:
    model = OpenAIChatCompletionsModel(os.environ["MODEL"], AsyncOpenAI())
    other = Agent(name="other", instructions="You look under tables.", model=model, tools=[look])
    tools = [look, other.as_tool("table", "Looks under tables")]
    agent = Agent(name="one", instructions="You look.", model=model, tools=tools)
    print((await Runner.run(agent, sys.argv[1])).final_output)


asyncio.run(main())
