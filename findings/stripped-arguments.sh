#!/usr/bin/env bash
# Guess: a turn that a family's chat template wrote is read back by TRL's response template of that family, which its tool loop
# uses, as the same calls with the same arguments.
# Instead (trl 1.16.0, transformers 5.24.0): Qwen 3.5 to 3.8, Nemotron 3 and GLM 4 MoE lose the white space at both ends of a
# text: a file is written without its first line's indentation and without its last newline. LFM2.5 ends a text at an apostrophe,
# or at a comma with a bracket behind it, takes what follows for another argument or for the reply's text, and its older
# template's `\n` stays a backslash and an n. `</tool_call>` in a text costs Qwen 3 the call, and the formats with XML the
# argument. What Llama's, gpt-oss's and the newest Gemma 4 template write comes back whole here.
# Hurts: agents that write files, patches or Python: the tool does something else than the model wrote, in training only, and the
# policy is rewarded or punished for it. No error says so.
# Here: calls are read as the template writes them: one newline is taken from each side of a value of Qwen's, none of GLM's.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check --no-compile transformers==5.24.0 jinja2==3.1.6 datasets==5.2.0
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check --no-compile --no-deps trl==1.16.0 accelerate==1.14.0
HF_HOME=$tmp/hf HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$tmp/venv/bin/python" - <<'PY'
import json
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from transformers.utils.chat_parsing import parse_response
from transformers.utils.chat_template_utils import render_jinja_template
from trl import chat_template_utils

TEMPLATES = Path(find_spec("trl").submodule_search_locations[0], "chat_templates")
FAMILIES = {  # the chat template, and the response template that TRL gives it
    "qwen3": "qwen3",
    "qwen3_5_think": "qwen3_5",
    "qwen3_8": "qwen3_5",
    "nemotron_3_ultra": "nemotron_3",
    "glm4moe": "glm4moe",
    "lfm2_v2": "lfm2_2_5",
    "lfm2_2_5": "lfm2_2_5",
    "gemma4_v5": "gemma4",
    "llama3_1": "llama3",
    "gptoss": "gptoss",
}
TEXTS = {
    "plain": "hi",
    "indented": "    return 1",
    "last newline": "hi\n",
    "apostrophe": "it's",
    "comma and bracket": "a, b) c",
    "backslash": "a\\nb",
    "closing tag": "x </tool_call> y",
}
TOOL = {
    "name": "write",
    "description": "Write a file.",
    "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
}
TOOLS = [{"type": "function", "function": TOOL}]
USER = {"role": "user", "content": "hi"}
SAME = "same"


def come_back(family, answers, text):
    """What is read of a turn with a call that writes `text`."""
    source = (TEMPLATES / f"{family}.jinja").read_text()
    call = {"type": "function", "function": {"name": "write", "arguments": {"text": text}}}

    def rendered(messages, prompt):
        made = render_jinja_template([messages], tools=TOOLS, chat_template=source, add_generation_prompt=prompt, bos_token="")
        return made[0][0]

    prompt = rendered([USER], True)
    whole = rendered([USER, {"role": "assistant", "content": "", "tool_calls": [call]}], False)
    if not whole.startswith(prompt):  # the prompt opens the thoughts in another way than a turn without thoughts
        prompt = prompt[: next(at for at, (one, other) in enumerate(zip(prompt, whole, strict=False)) if one != other)]
    try:
        found = parse_response(whole[len(prompt) :], answers, prefix=prompt, tools=TOOLS)
    except ValueError:
        return "refused"  # then TRL takes the whole turn as text
    content, calls = found.get("content"), [one["function"] for one in found.get("tool_calls", [])]
    if not content and [(one["name"], one["arguments"]) for one in calls] == [("write", {"text": text})]:
        return SAME
    return " ".join([*([repr(content)] if content else []), *(json.dumps(one["arguments"]) for one in calls)])


STRIPPED = {"indented": '{"text": "return 1"}', "last newline": '{"text": "hi"}'}
XML = STRIPPED | {"closing tag": "'y\\n</parameter>\\n</function>\\n</tool_call>' {}"}
LFM = {"comma and bracket": "\"c')]<|tool_call_end|>\" {\"text\": \"'a\"}"}
SEEN = {
    "qwen3": {"closing tag": "refused"},
    "qwen3_5_think": XML,
    "qwen3_8": XML,
    "nemotron_3_ultra": XML,
    "glm4moe": STRIPPED | {"closing tag": "'y</arg_value>\\n</tool_call>' {}"},
    "lfm2_v2": LFM
    | {
        "last newline": r'{"text": "hi\\n"}',
        "apostrophe": r'{"text": "it\\"}',
        "backslash": r'{"text": "a\\\\nb"}',
    },
    "lfm2_2_5": LFM | {"apostrophe": '{"text": "it"}'},
    "gemma4_v5": {},
    "llama3_1": {},
    "gptoss": {},
}
print("trl", version("trl"), "transformers", version("transformers"))
found = {}
for family, name in FAMILIES.items():
    answers = getattr(chat_template_utils, f"{name}_template")
    fates = {kind: come_back(family, answers, text) for kind, text in TEXTS.items()}
    found[family] = {kind: fate for kind, fate in fates.items() if fate != SAME}
    print(family, "" if found[family] else "all come back")
    for kind, fate in found[family].items():
        print(f"  {kind:18} {TEXTS[kind]!r:18} {fate}")
sys.exit(f"changed: {found}" if found != SEEN else 0)
PY
