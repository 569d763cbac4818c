# /// script
# requires-python = ">=3.12"
# dependencies = ["verifiers==0.4.0", "uv==0.13.9"]
# [tool.harness]
# dialect = "chat"
# trajectories = 2
# because = "a second question has its system prompt twice: [doubled-system-prompt](../findings/doubled-system-prompt.sh)"
# tool = "bash"
# first = {command = "echo there 2"}
# second = {command = "echo here"}
# ///
import asyncio
import os
import sys

from verifiers.v1 import AgentConfig, Task, TaskData, make_agent

client = {"type": "eval", "base_url": os.environ["OPENAI_BASE_URL"], "api_key_var": "OPENAI_API_KEY"}
config = AgentConfig(harness={"id": "bash"}, runtime={"type": "subprocess"}, model=os.environ["MODEL"], client=client)


async def main() -> None:
    async with make_agent(config) as agent, agent.interaction(Task(TaskData())) as talk:
        for question in sys.argv[1:]:
            answer = await talk.turn(question)
    print(answer.messages[-1].content)


asyncio.run(main())
