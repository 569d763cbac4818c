# /// script
# [tool.harness]
# of = "langchain_chat"
# scene = "agents"
# beside = "You look under tables."
# then = {name = "table", arguments = {task = "Look under the table."}}
# ///
import os
import sys

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def look(where: str, times: int = 1) -> str:
    """Look somewhere."""
    return f"{where}: nothing, {times} times"


model = ChatOpenAI(model=os.environ["MODEL"])
other = create_agent(model, [look], system_prompt="You look under tables.")


@tool
def table(task: str) -> str:
    """Look under tables."""
    return other.invoke({"messages": [("user", task)]})["messages"][-1].text


agent = create_agent(model, [look, table], system_prompt="You look.")
print(agent.invoke({"messages": [("user", sys.argv[1])]})["messages"][-1].text)
