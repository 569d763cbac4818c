# /// script
# dependencies = ["autogen-agentchat==0.7.5", "autogen-ext[openai]==0.7.5"]
# [tool.harness]
# dialect = "chat"
# ///
import asyncio
import os
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient


async def look(where: str, times: int = 1) -> str:
    """Look somewhere."""
    return f"{where}: nothing, {times} times"


INFO = {"vision": False, "function_calling": True, "json_output": True, "family": "unknown", "structured_output": False}


async def main() -> None:
    client = OpenAIChatCompletionClient(
        model=os.environ["MODEL"], base_url=os.environ["OPENAI_BASE_URL"], model_info=INFO
    )
    agent = AssistantAgent("one", client, tools=[look], system_message="You look.", max_tool_iterations=20)
    for question in sys.argv[1:]:
        result = await agent.run(task=question)
    print(result.messages[-1].content)


asyncio.run(main())
