# /// script
# dependencies = ["semantic-kernel==1.45.0"]
# [tool.harness]
# dialect = "chat"
# tool = "Tools-look"
# match = "calls"
# ///
import asyncio
import os
import sys

from openai import AsyncOpenAI
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function


class Tools:
    @kernel_function(description="Look somewhere.")
    def look(self, where: str, times: int = 1) -> str:
        return f"{where}: nothing, {times} times"


async def main() -> None:
    service = OpenAIChatCompletion(ai_model_id=os.environ["MODEL"], async_client=AsyncOpenAI())
    calls = FunctionChoiceBehavior.Auto(maximum_auto_invoke_attempts=20)
    agent = ChatCompletionAgent(
        service=service, name="one", instructions="You look.", plugins=[Tools()], function_choice_behavior=calls
    )
    thread = None
    for question in sys.argv[1:]:
        answer = await agent.get_response(question, thread=thread)
        thread = answer.thread
    print(answer)


asyncio.run(main())
