# /// script
# dependencies = ["dspy==3.4.1"]
# [tool.harness]
# dialect = "chat"
# resume = false
# trajectories = 3
# because = "each step is a prompt of its own"
# marks = "## completed ##"
# replies = [
#   """[[ ## next_thought ## ]]
#
# I look.
#
# [[ ## next_tool_name ## ]]
# look
#
# [[ ## next_tool_args ## ]]
# {"where":  "there"}
#
# [[ ## completed ## ]]""",
#   """[[ ## next_thought ## ]]
# Done.
#
# [[ ## next_tool_name ## ]]
# finish
#
# [[ ## next_tool_args ## ]]
# {}
#
# [[ ## completed ## ]]""",
#   """[[ ## reasoning ## ]]
# It is not there.
#
# [[ ## answer ## ]]
# Nowhere,  it is gone.
#
# [[ ## completed ## ]]""",
# ]
# ///
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import dspy


def look(where: str, times: int = 1) -> str:
    """Look somewhere."""
    return f"{where}: nothing, {times} times"


model = dspy.LM(f"openai/{os.environ['MODEL']}", api_base=os.environ["OPENAI_BASE_URL"], api_key="none", cache=False)
dspy.configure(lm=model)
print(dspy.ReAct("question -> answer", tools=[look])(question=sys.argv[1]).answer)
