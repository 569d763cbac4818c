#!/usr/bin/env bash
# Guess: a turn that only calls, as OpenAI's format and engines give it (`"content": null`), is rendered like one with an empty text,
# and a turn with `"tool_calls": []` like one without that field.
# Instead (the templates in TRL 1.16.0, rendered by transformers 5.24.0): GLM 4 MoE's writes the word `None` in front of the call, and
# Command R7B's as the reply; LFM2's first ones write `null`. Those of Qwen 2.5 VL, Qwen 3 VL, gpt-oss and LFM2.5 raise an error.
# Qwen 2.5's, Qwen 3's, Gemma 4's and DeepSeek V3's do as one guesses. At an empty list of calls DeepSeek V3's leaves out what the
# model said and closes calls that there are not, LFM2.5's writes a call of nothing, and those of Llama 3.1 and 3.2 and of gpt-oss
# raise an error.
# Hurts: whoever sends a reply back as it came, or renders it for training: the policy reads a word in its own turn that it did not
# sample, or its words are gone, and no prompt begins with the last one and its reply.
# Here: messages go to a template without null and empty fields, and a sampled turn is continued from its ids.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check --no-compile transformers==5.24.0 jinja2==3.1.6
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check --no-compile --no-deps trl==1.16.0
"$tmp/venv/bin/python" - <<'PY'
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template

TEMPLATES = Path(find_spec("trl").submodule_search_locations[0], "chat_templates")
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": PARAMETERS}}]
USER, RESULT = {"role": "user", "content": "hi"}, {"role": "tool", "tool_call_id": "abcdefghi", "name": "look", "content": "ok"}
SEEN = {  # a null content beside a call, an empty list of calls beside a text
    "qwen2_5": "alike alike",
    "qwen2_5_vl": "refused alike",
    "qwen3": "alike alike",
    "qwen3_vl": "refused alike",
    "qwen3_8": "alike alike",
    "llama3_1": "alike refused",
    "llama3_2": "alike refused",
    "gemma4_v5": "alike alike",
    "gptoss": "refused refused",
    "glm4moe": "None alike",
    "deepseekv3": "alike lost",
    "nemotron_3_nano": "alike alike",
    "cohere2": "None alike",
    "lfm2": "null alike",
    "lfm2_2_5": "refused []",
}


def call_with(arguments):
    return {"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": arguments}}


def rendered(source, turn, *more):
    calls = bool(turn.get("tool_calls"))
    said = [[USER, {"role": "assistant", **turn}, *more]]
    return render_jinja_template(said, tools=TOOLS if calls else None, chat_template=source, bos_token="<s>", eos_token="</s>")[0][0]


def fate(source, given, plain, *more):
    expected = rendered(source, plain, *more)
    try:
        text = rendered(source, given, *more)
    except Exception:
        return "refused"
    if text == expected:
        return "alike"
    if "SAID" in expected and "SAID" not in text:
        return "lost"
    return next(word for word in ("None", "null", "[]") if text.count(word) > expected.count(word))


print("trl", version("trl"), "transformers", version("transformers"))
print(f"{'':18}{'content: null':16}tool_calls: []")
found = {}
for name in SEEN:
    source = (TEMPLATES / f"{name}.jinja").read_text()
    calls = [call_with('{"path": "/a"}' if name == "deepseekv3" else {"path": "/a"})]  # which takes arguments as text
    call = fate(source, {"content": None, "tool_calls": calls}, {"content": "", "tool_calls": calls}, RESULT)
    text = fate(source, {"content": "SAID", "tool_calls": []}, {"content": "SAID"}, USER)
    print(f"{name:18}{call:16}{text}")
    found[name] = f"{call} {text}"
sys.exit("changed" if found != SEEN else 0)
PY
