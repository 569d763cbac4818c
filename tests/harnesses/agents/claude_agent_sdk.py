# /// script
# dependencies = ["claude-agent-sdk==0.2.189"]
# [tool.harness]
# dialect = "messages"
# tool = "mcp__eyes__look"
# ///
import asyncio
import os
import sys

from claude_agent_sdk import ClaudeAgentOptions, ClaudeSDKClient, ResultMessage, create_sdk_mcp_server, tool


@tool("look", "Look somewhere.", {"where": str, "times": int})
async def look(given):
    return {"content": [{"type": "text", "text": f"{given['where']}: nothing, {given['times']} times"}]}


async def main():
    options = ClaudeAgentOptions(
        model=os.environ["MODEL"],
        system_prompt="You look.",
        mcp_servers={"eyes": create_sdk_mcp_server("eyes", tools=[look])},
        allowed_tools=["mcp__eyes__look"],
        env={"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "4000"},
    )
    async with ClaudeSDKClient(options) as client:
        for question in sys.argv[1:]:
            await client.query(question)
            async for message in client.receive_response():
                if isinstance(message, ResultMessage):
                    answer = message.result
    print(answer)


asyncio.run(main())
