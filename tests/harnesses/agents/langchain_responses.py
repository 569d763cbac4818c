# /// script
# dependencies = ["langchain==1.5.2", "langchain-openai==1.7.4"]
# [tool.harness]
# dialect = "responses"
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


agent = create_agent(ChatOpenAI(model=os.environ["MODEL"], use_responses_api=True), [look], system_prompt="You look.")
messages = []
for question in sys.argv[1:]:
    messages = agent.invoke({"messages": [*messages, ("user", question)]})["messages"]
print(messages[-1].text)
