# /// script
# dependencies = ["langchain==1.5.2", "langchain-anthropic==1.7.10"]
# [tool.harness]
# dialect = "messages"
# ///
import os
import sys

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool


@tool
def look(where: str, times: int = 1) -> str:
    """Look somewhere."""
    return f"{where}: nothing, {times} times"


agent = create_agent(ChatAnthropic(model=os.environ["MODEL"], max_tokens=500), [look], system_prompt="You look.")
messages = []
for question in sys.argv[1:]:
    messages = agent.invoke({"messages": [*messages, ("user", question)]})["messages"]
print(messages[-1].text)
