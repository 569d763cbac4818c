#!/usr/bin/env bash
# Guess: a past call's arguments as text (OpenAI's wire format) and as an object give the same prompt, or an error.
# Instead (the templates in TRL 1.16.0, rendered by transformers 5.24.0): Qwen 2.5, Llama 3.1, Llama 3.2 and gpt-oss
# encode the text a second time, as a quoted and escaped JSON string; Gemma 4 puts JSON inside a second pair of
# braces. No error, no warning. Qwen3 gives the same prompt for both; Qwen3.5 raises an error.
# Hurts: training of tool use. From the second turn on the model reads calls in a form that it never writes, learns to
# copy it, and no trajectory has the sampled call as its prefix.
# Here: the router tries out what form a template wants, and a call that was sampled here is spelled from its own ids.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check transformers==5.24.0 jinja2==3.1.6
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check --no-deps trl==1.16.0
"$tmp/venv/bin/python" - <<'PY'
import json
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template

FOLDER = Path(find_spec("trl").submodule_search_locations[0], "chat_templates")
PATH = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOL = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": PATH}}


def prompt(name, arguments):
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "name": "look", "content": "ok"},
    ]
    template = (FOLDER / f"{name}.jinja").read_text()
    return render_jinja_template([messages], tools=[TOOL], chat_template=template, bos_token="<s>", eos_token="</s>")[0][0]


def compare(name):
    value = {"path": "/a"}
    wanted = prompt(name, value)
    try:
        got = prompt(name, json.dumps(value))
    except Exception:
        return "error", ""
    start = next((i for i, (a, b) in enumerate(zip(wanted, got)) if a != b), None)
    return ("same", "") if start is None else ("differs", f"{wanted[start - 12 : start + 18]!r} and {got[start - 12 : start + 22]!r}")


seen = {name: compare(name) for name in "qwen2_5 llama3_1 llama3_2 gptoss gemma4 qwen3 qwen3_5_think".split()}
print("trl", version("trl"), "transformers", version("transformers"))
for name, (what, where) in seen.items():
    print(f"{name:14} {what:8} {where}")
sys.exit("changed" if [what for what, _ in seen.values()] != ["differs"] * 5 + ["same", "error"] else 0)
PY
