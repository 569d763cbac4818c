# /// script
# dependencies = ["agno==3.1.10", "openai==3.57.0", "sqlalchemy"]
# [tool.harness]
# dialect = "chat"
# ///
import os
import sys

from agno.agent import Agent
from agno.db.in_memory import InMemoryDb
from agno.models.openai.like import OpenAILike


def look(where: str, times: int = 1) -> str:
    """Look somewhere."""
    return f"{where}: nothing, {times} times"


model = OpenAILike(id=os.environ["MODEL"], base_url=os.environ["OPENAI_BASE_URL"], api_key="none")
agent = Agent(
    model=model, tools=[look], instructions="You look.", db=InMemoryDb(), add_history_to_context=True, telemetry=False
)
for question in sys.argv[1:]:
    answer = agent.run(question, session_id="one")
print(answer.content)
