# /// script
# dependencies = ["smolagents[openai]==1.26.0"]
# [tool.harness]
# dialect = "chat"
# resume = false
# last = {name = "final_answer", arguments = {answer = "Nowhere,  it is gone."}}
# trajectories = 6
# because = "calls come back as text"
# ///
import os
import sys

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def look(where: str, times: int = 1) -> str:
    """Look somewhere.

    Args:
        where: the place.
        times: how often.
    """
    return f"{where}: nothing, {times} times"


agent = ToolCallingAgent([look], OpenAIServerModel(os.environ["MODEL"]), verbosity_level=0)
print(agent.run(sys.argv[1]))
