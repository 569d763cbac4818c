# /// script
# dependencies = ["agentscope==2.0.11"]
# [tool.harness]
# dialect = "chat"
# ///
import asyncio
import os
import sys

from agentscope.agent import Agent
from agentscope.credential import OpenAICredential
from agentscope.message import TextBlock, UserMsg
from agentscope.model import OpenAIChatModel
from agentscope.permission import PermissionBehavior, PermissionDecision
from agentscope.tool import FunctionTool, ToolChunk, Toolkit


async def look(where: str, times: int = 1) -> ToolChunk:
    """Look somewhere."""
    return ToolChunk(content=[TextBlock(text=f"{where}: nothing, {times} times")])


async def main() -> None:
    credential = OpenAICredential(api_key="none", base_url=os.environ["OPENAI_BASE_URL"])
    model = OpenAIChatModel(credential, os.environ["MODEL"])
    allowed = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="")
    agent = Agent("looker", "You look.", model, Toolkit([FunctionTool(look, permission=allowed)]))
    for question in sys.argv[1:]:
        answer = await agent.reply(UserMsg("user", question))
    print(answer.get_text_content())


asyncio.run(main())
