# /// script
# [tool.harness]
# of = "deepagents"
# scene = "agents"
# then = {name = "task", arguments = {description = "Look there.", subagent_type = "finder"}}
# beside = "You find."
# ///
import os
import sys

from deepagents import create_deep_agent
from langchain_openai import ChatOpenAI


def look(where: str, times: int = 1) -> str:
    """Look somewhere."""
    return f"{where}: nothing, {times} times"


model = ChatOpenAI(model=os.environ["MODEL"])
finder = {"name": "finder", "description": "Finds.", "system_prompt": "You find.", "tools": [look]}
agent = create_deep_agent(model=model, tools=[look], system_prompt="You look.", subagents=[finder])
answer = agent.invoke({"messages": [{"role": "user", "content": sys.argv[1]}]})
print(answer["messages"][-1].text)
