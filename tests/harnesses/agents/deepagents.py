# /// script
# dependencies = ["deepagents==0.7.32", "langchain-openai==1.7.4"]
# [tool.harness]
# dialect = "chat"
# ///
import os
import sys

from deepagents import create_deep_agent
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver


def look(where: str, times: int = 1) -> str:
    """Look somewhere."""
    return f"{where}: nothing, {times} times"


model = ChatOpenAI(model=os.environ["MODEL"])
agent = create_deep_agent(model=model, tools=[look], system_prompt="You look.", checkpointer=InMemorySaver())
for question in sys.argv[1:]:
    messages = [{"role": "user", "content": question}]
    answer = agent.invoke({"messages": messages}, {"configurable": {"thread_id": "one"}})
print(answer["messages"][-1].text)
