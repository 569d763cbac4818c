#!/usr/bin/env bash
# Guess: mini-swe-agent, whose loop many use for rollouts on code, runs the command of a turn as the model wrote it, or tells the
# model that it cannot read it.
# Instead (mini-swe-agent 2.4.6): where commands are text, as in its `default.yaml`, the command ends at the first line that
# begins with three backticks. A file of Markdown that a here-document writes, with a block of code in it, ends before that
# block, and the shell ends the document itself. The rest of the command never runs. The model reads that it returned 0; bash
# adds a warning about the document, Debian's `sh` nothing.
# Hurts: a policy that writes a README, a docstring or a prompt in Markdown has half a file, and the reward of one who wrote half
# a file. In the trajectory the turn looks right. Calls of tools, as in its `mini.yaml`, come whole.
# Here: the router passes a reply on as it was sampled, and reads no commands out of a text.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check --no-compile mini-swe-agent==2.4.6 litellm==1.110.2
export HOME="$tmp" MSWEA_SILENT_STARTUP=1 MSWEA_CONFIGURED=true MSWEA_COST_TRACKING=ignore_errors LITELLM_LOCAL_MODEL_COST_MAP=True
"$tmp/venv/bin/python" - "$tmp" <<'PY'
import sys
from importlib.metadata import version
from pathlib import Path

import litellm
from minisweagent.agents.default import DefaultAgent
from minisweagent.config import get_config_from_spec
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

litellm.suppress_debug_info = True
TEXT = """# Tool

{}

It has one command.
"""
TURN = """I write a page, and a note that I did.

```mswea_bash_command
cat > README.md <<'EOF'
{}EOF
echo yes > written.txt
```"""


def run(name, block):
    """Return what an agent of one step leaves in its folder."""
    folder = Path(sys.argv[1], name)
    folder.mkdir()
    config = get_config_from_spec("default.yaml")
    model = {**config["model"], "model_kwargs": {"mock_response": TURN.format(TEXT.format(block))}}
    agent = DefaultAgent(
        LitellmTextbasedModel(model_name="openai/policy", **model),
        LocalEnvironment(cwd=str(folder)),
        **{**config["agent"], "step_limit": 1},
    )
    agent.run("Write a README.md.")
    observation = agent.messages[3]["content"]
    print(f"{name}: README.md {(folder / 'README.md').read_text()!r}\n  the model reads {observation!r}")
    return (folder / "README.md").read_text(), (folder / "written.txt").exists(), "<returncode>0</returncode>" in observation


INDENTED, FENCED = "    pip install tool", "```bash\npip install tool\n```"
print("mini-swe-agent", version("mini-swe-agent"))
found = run("indented", INDENTED), run("fenced", FENCED)
sys.exit("changed" if found != ((TEXT.format(INDENTED), True, True), ("# Tool", False, True)) else 0)
PY
