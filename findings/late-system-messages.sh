#!/usr/bin/env bash
# Guess: a chat template writes a system message that is not the first where it stands, or raises an error.
# Instead (the templates in TRL 1.16.0, rendered by transformers 5.24.0): four drop it without a word (gpt-oss,
# Qwen3-VL, Idefics3, SmolVLM; the last two drop every system message), and two move it to the front, before turns
# that are over (DeepSeek V3, DeepSeek R1 distilled). Qwen3 writes it in place, Qwen3.5 to 3.8 raise: one family has
# three answers.
# Hurts: agents that add a system message in mid-run (a reminder, a budget, a mode). The policy never reads it and is
# rewarded as if it had; where it moves to the front, all ids behind the front change and no earlier turn is a prefix.
# Here: the router tries the template; one that does not write the message at its place gets it as a marked user's
# message there, and the reply says so (--late-system).
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check transformers==5.24.0 jinja2==3.1.6
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check --no-deps trl==1.16.0
"$tmp/venv/bin/python" - <<'PY'
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template

FOLDER = Path(find_spec("trl").submodule_search_locations[0], "chat_templates")
MESSAGES = [
    {"role": "system", "content": "FIRST"},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "system", "content": "LATE"},
    {"role": "user", "content": "three"},
]
NAMES = "gptoss qwen3_vl idefics3 smolvlm deepseekv3 deepseek_r1_distill qwen3 qwen3_5_think qwen3_8".split()


def fate(name):
    template = (FOLDER / f"{name}.jinja").read_text()
    try:
        text = render_jinja_template([MESSAGES], chat_template=template, bos_token="<s>", eos_token="</s>")[0][0]
    except Exception as error:
        return f"error: {error}"
    if "LATE" not in text:
        return "dropped"
    return "in place" if text.index("two") < text.index("LATE") < text.index("three") else "moved to the front"


seen = {name: fate(name) for name in NAMES}
print("trl", version("trl"), "transformers", version("transformers"))
for name, what in seen.items():
    print(f"{name:20} {what}")
error = "error: System message must be at the beginning."
expected = ["dropped"] * 4 + ["moved to the front"] * 2 + ["in place", error, error]
sys.exit("changed" if list(seen.values()) != expected else 0)
PY
