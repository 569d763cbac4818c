# /// script
# dependencies = ["strands-agents[openai]==1.62.0"]
# [tool.harness]
# dialect = "chat"
# ///
import os
import sys

from strands import Agent, tool
from strands.models.openai import OpenAIModel


@tool
def look(where: str, times: int = 1) -> str:
    """Look somewhere."""
    return f"{where}: nothing, {times} times"


agent = Agent(OpenAIModel(model_id=os.environ["MODEL"]), tools=[look], system_prompt="You look.", callback_handler=None)
for question in sys.argv[1:]:
    answer = agent(question)
print(answer)
