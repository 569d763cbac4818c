# /// script
# dependencies = ["camel-ai==0.2.90", "mcp<1.20"]
# [tool.harness]
# dialect = "chat"
# trajectories = 2
# because = "its memory gives the messages of an earlier step in another order: [memory-order](../findings/memory-order.sh)"
# ///
import os
import sys

from camel.agents import ChatAgent
from camel.models import ModelFactory
from camel.toolkits import FunctionTool
from camel.types import ModelPlatformType
from camel.utils import BaseTokenCounter


class Counter(BaseTokenCounter):
    """The default downloads a vocabulary of OpenAI's."""

    def count_tokens_from_messages(self, messages: list) -> int:
        return len(str(messages)) // 4

    def encode(self, text: str) -> list[int]:
        return list(range(len(text) // 4))

    def decode(self, token_ids: list[int]) -> str:
        return " " * 4 * len(token_ids)


def look(where: str, times: int = 1) -> str:
    """Look somewhere.

    Args:
        where: the place.
        times: how often.
    """
    return f"{where}: nothing, {times} times"


model = ModelFactory.create(
    ModelPlatformType.OPENAI_COMPATIBLE_MODEL,
    os.environ["MODEL"],
    url=os.environ["OPENAI_BASE_URL"],
    api_key="none",
    token_counter=Counter(),
)
agent = ChatAgent("You look.", model=model, tools=[FunctionTool(look)])
for question in sys.argv[1:]:
    answer = agent.step(question)
print(answer.msgs[-1].content)
