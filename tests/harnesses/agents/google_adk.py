# /// script
# dependencies = ["google-adk==2.13.0", "litellm==1.110.2"]
# [tool.harness]
# dialect = "chat"
# unknown = false
# ///
import asyncio
import os
import sys

from google.adk.agents import LlmAgent
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner


def look(where: str, times: int = 1) -> str:
    """Look somewhere."""
    return f"{where}: nothing, {times} times"


async def main() -> None:
    agent = LlmAgent(name="one", model=LiteLlm(f"openai/{os.environ['MODEL']}"), instruction="You look.", tools=[look])
    runner = InMemoryRunner(agent, app_name="app")
    for question in sys.argv[1:]:
        events = await runner.run_debug(question, user_id="user", session_id="one", quiet=True)
    print("".join(part.text or "" for part in events[-1].content.parts if not part.thought))


asyncio.run(main())
