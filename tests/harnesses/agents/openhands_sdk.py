# /// script
# requires-python = ">=3.12"
# dependencies = ["openhands-sdk==1.58.2", "openhands-tools==1.58.2"]
# [tool.harness]
# dialect = "chat"
# tool = "terminal"
# first = {command = "echo there 2", timeout = 9.5}
# second = {command = "echo here"}
# ///
import contextlib
import os
import sys

from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.tools.terminal import TerminalTool

model = LLM(
    model=f"openai/{os.environ['MODEL']}", base_url=os.environ["OPENAI_BASE_URL"], api_key="none", usage_id="one"
)
agent = Agent(llm=model, tools=[Tool(name=TerminalTool.name, params={"terminal_type": "subprocess"})])
with contextlib.redirect_stdout(sys.stderr):  # it draws boxes
    conversation = Conversation(agent=agent, workspace=".")
    for question in sys.argv[1:]:
        conversation.send_message(question)
        conversation.run()
    answer = [event for event in conversation.state.events if getattr(event, "llm_message", None)][-1]
    conversation.close()
print("".join(part.text for part in answer.llm_message.content))
