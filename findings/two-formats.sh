#!/usr/bin/env bash
# Guess: a set of tool calls that LLaMA-Factory writes for a family of models has the text of that family's chat template, so that
# what is tuned there can go on with RL, and be served, under the template.
# Instead (llamafactory 0.9.5, the templates in trl 1.16.0): GLM 4 MoE's calls end without `</tool_call>`, the tag that parsers
# wait for. Qwen 3.5's tools stand there without `{"type": "function", ...}` around them, LFM2's too. Gemma 4's tools lose their
# enums, the items of lists, nested properties and their order. LFM2's calls have double quotes instead of single ones; Llama's
# tools have another sentence before them, and another place. Qwen 2.5 and 3 alone have both as their templates do.
# Hurts: a policy that was tuned there and starts RL, or serves, with another prompt than it knows; and GLM's calls, which are
# unfinished for the parser, so that the first steps of RL have no tool calls.
# Here: prompts come from the template of the tokenizer that the router was given; a call of GLM's that has no end is text.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check --no-compile transformers==5.24.0 jinja2==3.1.6
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check --no-compile --no-deps llamafactory==0.9.5 trl==1.16.0
TRANSFORMERS_VERBOSITY=error "$tmp/venv/bin/python" - <<'PY'
import importlib.util
import json
import sys
from importlib.metadata import distribution, version
from importlib.util import find_spec
from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template

path = distribution("llamafactory").locate_file("llamafactory/data/tool_utils.py")  # the package itself imports torch
spec = importlib.util.spec_from_file_location("tool_utils", path)
tool_utils = sys.modules["tool_utils"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool_utils)

TEMPLATES = Path(find_spec("trl").submodule_search_locations[0], "chat_templates")
FAMILIES = {  # LLaMA-Factory's name, a chat template: how many calls a reply may have
    ("qwen", "qwen2_5"): 2,
    ("qwen", "qwen3"): 2,
    ("qwen3_5", "qwen3_5_think"): 2,
    ("glm4_moe", "glm4moe"): 2,
    ("gemma4", "gemma4_v5"): 2,
    ("lfm2", "lfm2_2_5"): 2,
    ("llama3", "llama3_2"): 1,
}
PROPERTIES = {
    "path": {"type": "string", "description": "Where to."},
    "mode": {"type": "string", "enum": ["add", "new"]},
    "lines": {"type": "array", "items": {"type": "string"}},
}
TOOL = {
    "name": "write",
    "description": "Write a file.",
    "parameters": {"type": "object", "properties": PROPERTIES, "required": ["path"]},
}
ARGUMENTS = [{"path": "a.txt", "mode": "new"}, {"path": "b.txt"}]


def tools_and_calls(name, template, number):
    """What LLaMA-Factory writes of a tool and of `number` calls, and whether each is in the rendered conversation."""
    utils, arguments = tool_utils.TOOLS[name], ARGUMENTS[:number]
    tools = [{"type": "function", "function": TOOL}]
    calls = [{"type": "function", "function": {"name": "write", "arguments": one}} for one in arguments]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    source = (TEMPLATES / f"{template}.jinja").read_text()
    rendered = render_jinja_template([messages], tools=tools, chat_template=source, bos_token="<s>")[0][0]
    of_factory = [tool_utils.FunctionCall("write", json.dumps(one)) for one in arguments]
    texts = utils.tool_formatter(tools), utils.function_formatter(of_factory)
    return texts, tuple(text.strip() in rendered for text in texts), rendered


SEEN = {  # the tools, the calls
    ("qwen", "qwen2_5"): (True, True),
    ("qwen", "qwen3"): (True, True),
    ("qwen3_5", "qwen3_5_think"): (False, True),
    ("glm4_moe", "glm4moe"): (True, False),
    ("gemma4", "gemma4_v5"): (False, True),
    ("lfm2", "lfm2_2_5"): (False, False),
    ("llama3", "llama3_2"): (False, True),
}
print("llamafactory", version("llamafactory"), "trl", version("trl"))
found, written = {}, {}
for (name, template), number in FAMILIES.items():
    (tools, calls), same, rendered = tools_and_calls(name, template, number)
    found[name, template] = same
    written[name] = tools, calls, rendered
    words = ["as in the template" if one else "other" for one in same]
    print(f"{name:10} {template:14} tools {words[0]:20} calls {words[1]}")
for name, tag in (("glm4_moe", "</tool_call>"), ("gemma4", "enum"), ("gemma4", "items"), ("qwen3_5", '{"type": "function"')):
    tools, calls, rendered = written[name]
    ours = (calls if tag == "</tool_call>" else tools).count(tag)
    theirs = rendered.split("Go on.", 1)[1].count(tag) if tag == "</tool_call>" else rendered.count(tag)
    found[name, tag] = ours, theirs
    print(f"{name}: {tag} {ours} times, in the template {theirs} times")
print(written["glm4_moe"][1])
SEEN |= {
    ("glm4_moe", "</tool_call>"): (0, 2),
    ("gemma4", "enum"): (0, 1),
    ("gemma4", "items"): (0, 1),
    ("qwen3_5", '{"type": "function"'): (0, 1),
}
sys.exit(f"changed: {found}" if found != SEEN else 0)
PY
