# /// script
# requires-python = ">=3.12"
# dependencies = ["harbor==0.26.0"]
# [tool.harness]
# dialect = "chat"
# resume = false
# needs = "tmux"
# marks = "command-line tasks"
# replies = [
#   """  {"analysis":  "I look.", "plan": "\u0049 look.",
#  "commands": [{"keystrokes": "echo there\\n" ,"duration":0.1}]}""",
#   """Again:
# {"analysis": "Nothing.", "plan": "", "commands": [{"keystrokes": "echo here\\n", "duration": 0.10}]}
# """,
#   """{"analysis": "It is not there.", "plan": "Wait." """,
#   """{"analysis": "Nowhere,  it is gone.", "plan": "", "commands": [], "task_complete":true}""",
#   """{"analysis":"Nowhere,  it is gone.", "plan": "", "commands": [] , "task_complete": true}""",
# ]
# ///
import asyncio
import logging
import os
import sys
from pathlib import Path

os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "TMUX_TMPDIR": os.getcwd()}
from harbor.agents.terminus_2 import Terminus2
from harbor.environments.base import ExecResult
from harbor.models.agent.context import AgentContext


class Here:
    """This machine in place of a container."""

    session_id, default_user = "one", None

    async def exec(self, command: str, **_: object) -> ExecResult:
        pipe = asyncio.subprocess.PIPE
        running = await asyncio.create_subprocess_exec("bash", "-c", command, stdout=pipe, stderr=pipe)
        out, err = await running.communicate()
        return ExecResult(stdout=out.decode(), stderr=err.decode(), return_code=running.returncode)


async def main() -> None:
    name, url = f"openai/{os.environ['MODEL']}", os.environ["OPENAI_BASE_URL"]
    agent = Terminus2(logs_dir=Path("logs"), model_name=name, api_base=url, record_terminal_session=False)
    agent.logger.setLevel(logging.ERROR)
    here = Here()
    await agent.setup(here)
    try:
        await agent.run(sys.argv[1], here, AgentContext())
    finally:
        await here.exec("tmux kill-server")
    print(agent._chat.messages[-1]["content"])


asyncio.run(main())
