# /// script
# dependencies = ["inspect-ai==0.3.285", "openai==3.57.0"]
# [tool.harness]
# dialect = "chat"
# resume = false
# ///
import os
import sys

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.solver import generate, system_message, use_tools
from inspect_ai.tool import tool


@tool
def look():
    async def execute(where: str, times: int = 1) -> str:
        """Look somewhere.

        Args:
            where: the place.
            times: how often.
        """
        return f"{where}: nothing, {times} times"

    return execute


task = Task(dataset=[Sample(input=sys.argv[1])], solver=[system_message("You look."), use_tools(look()), generate()])
(log,) = eval(task, model=f"openai/{os.environ['MODEL']}", display="none", log_dir="logs")
print(log.samples[0].output.completion)
