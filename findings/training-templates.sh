#!/usr/bin/env bash
# Guess: TRL's `*_training` templates, made for training, write a turn the same way whatever comes after it.
# Instead (TRL 1.16.0, rendered by transformers 5.24.0): those of Qwen3, 3.5, 3.6 and 3.8 do. Those of GLM 4 MoE and
# Nemotron 3 remove the reasoning of all earlier turns as soon as another user's message follows; only their masks are
# new.
# Hurts: rollouts of several user turns (user simulators, corrections). The last prompt is not what the policy saw in
# the earlier turns: rendered at the end, the conversation lacks sampled reasoning, and the rest of it has ids behind
# another prefix.
# Here: a session goes on from the sampled ids, with the reasoning in them.
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
TURNS = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two", "reasoning_content": "THOUGHT"},
    {"role": "user", "content": "three"},
]
KEEP = "qwen3_training qwen3_5_think_training qwen3_6_training qwen3_8_training".split()
REMOVE = "glm4moe_training nemotron_3_nano_training nemotron_3_super_training nemotron_3_ultra_training".split()


def render(name, messages):
    template = (FOLDER / f"{name}.jinja").read_text()
    return render_jinja_template([messages], chat_template=template, bos_token="<s>", eos_token="</s>")[0][0]


print("trl", version("trl"), "transformers", version("transformers"))
seen = []
for name in KEEP + REMOVE:
    before, after = render(name, TURNS[:2]), render(name, TURNS)
    seen.append((after.startswith(before), "THOUGHT" in before, "THOUGHT" in after))
    print(f"{name:28} prefix kept: {seen[-1][0]!s:5} reasoning kept: {seen[-1][2]}")
sys.exit("changed" if seen != [(True, True, True)] * 4 + [(False, True, False)] * 4 else 0)
PY
