# /// script
# dependencies = ["haystack-ai==3.4.1"]
# [tool.harness]
# dialect = "chat"
# ///
import os
import sys
from typing import Annotated

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool


@tool
def look(where: Annotated[str, "the place"], times: Annotated[int, "how often"] = 1) -> str:
    """Look somewhere."""
    return f"{where}: nothing, {times} times"


generator = OpenAIChatGenerator(model=os.environ["MODEL"], api_base_url=os.environ["OPENAI_BASE_URL"])
agent = Agent(chat_generator=generator, tools=[look], system_prompt="You look.")
messages = []
for question in sys.argv[1:]:
    messages = agent.run(messages=[*messages, ChatMessage.from_user(question)])["messages"][
        1:
    ]  # the system prompt is the agent's
print(messages[-1].text)
