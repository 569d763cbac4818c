# /// script
# dependencies = ["pydantic-ai-slim[anthropic]==2.68.0"]
# [tool.harness]
# dialect = "messages"
# ///
import os
import sys

from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel as Model

agent = Agent(Model(os.environ["MODEL"]), instructions="You look.")


@agent.tool_plain
def look(where: str, times: int = 1) -> str:
    """Look somewhere."""
    return f"{where}: nothing, {times} times"


history = None
for question in sys.argv[1:]:
    result = agent.run_sync(question, message_history=history)
    history = result.all_messages()
print(result.output)
