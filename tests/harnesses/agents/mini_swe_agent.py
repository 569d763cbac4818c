# /// script
# dependencies = ["mini-swe-agent==2.4.6"]
# [tool.harness]
# dialect = "chat"
# tool = "bash"
# first = {command = "echo there 2"}
# second = {command = "echo here"}
# last = {name = "bash", arguments = {command = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo 'Nowhere,  it is gone.'"}}
# unknown = false
# resume = false
# ///
import os
import sys

os.environ |= {"MSWEA_SILENT_STARTUP": "1", "MSWEA_COST_TRACKING": "ignore_errors", "MSWEA_CONFIGURED": "true"}
from minisweagent.agents.default import DefaultAgent
from minisweagent.config import get_config_from_spec
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

config = get_config_from_spec("mini.yaml")
model = LitellmModel(
    model_name=f"openai/{os.environ['MODEL']}", **{k: v for k, v in config["model"].items() if k != "model_name"}
)
config["agent"].pop("mode", None)
config["agent"].pop("confirm_exit", None)
agent = DefaultAgent(model, LocalEnvironment(), **config["agent"])
print(agent.run(sys.argv[1]))
