# /// script
# dependencies = ["crewai==1.15.30"]
# [tool.harness]
# dialect = "chat"
# resume = false
# match = "calls"
# ///
import contextlib
import os
import sys

os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true", "CREWAI_TRACING_ENABLED": "false"}
from crewai import LLM, Agent
from crewai.tools import tool


@tool("look")
def look(where: str, times: int = 1) -> str:
    """Look somewhere."""
    return f"{where}: nothing, {times} times"


model = LLM(f"openai/{os.environ['MODEL']}", base_url=os.environ["OPENAI_BASE_URL"], api_key="none")
agent = Agent(role="one", goal="You look.", backstory="You look.", tools=[look], llm=model, verbose=False)
with contextlib.redirect_stdout(sys.stderr):  # it draws boxes
    answer = agent.kickoff(sys.argv[1]).raw
print(answer)
