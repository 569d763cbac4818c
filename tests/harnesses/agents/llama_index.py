# /// script
# dependencies = ["llama-index-core==0.14.25", "llama-index-llms-openai-like==0.8.1"]
# [tool.harness]
# dialect = "chat"
# ///
import asyncio
import os
import sys

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.llms.openai_like import OpenAILike


def look(where: str, times: int = 1) -> str:
    """Look somewhere."""
    return f"{where}: nothing, {times} times"


async def main() -> None:
    model = OpenAILike(
        os.environ["MODEL"],
        api_base=os.environ["OPENAI_BASE_URL"],
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=30_000,
    )
    agent = FunctionAgent(tools=[look], llm=model, system_prompt="You look.")
    memory = ChatMemoryBuffer.from_defaults(token_limit=20_000)
    for question in sys.argv[1:]:
        answer = await agent.run(question, memory=memory)
    print(answer)


asyncio.run(main())
