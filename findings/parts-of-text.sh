#!/usr/bin/env bash
# Guess: a message whose content is a list of two parts of text, as OpenAI's format allows for each role, is rendered with both
# texts, or refused.
# Instead (the templates in TRL 1.16.0, rendered by transformers 5.24.0): Qwen3's leave the message empty, for a user, for the model
# and for a tool. Llama 3 to 3.2 print Python's list with its brackets, as do Gemma 1, Nemotron 3, Qwen 2.5 and GLM 4 MoE for a tool,
# and gpt-oss for a system message; LFM2's first ones print JSON. Gemma 3 writes the first part of a system message alone, LLaVA-NeXT
# that of a reply, too. DeepSeek V3 refuses, Qwen 2.5 for most roles. Qwen 2.5 VL, Qwen 3.5 to 3.8 and Gemma 4 join the two.
# Hurts: clients that send parts, and tools whose results are lists of parts, as those of MCP are. The policy answers a question
# that it never read, and is rewarded for that; or it learns from Python in its prompts. No error says so.
# Here: a template is tried with two parts for each role. Where it does not write both, it gets one text, with a space between them.
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
PARTS = [{"type": "text", "text": "ONE"}, {"type": "text", "text": "TWO"}]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": {}}}
USER = {"role": "user", "content": "hi"}
CONVERSATIONS = {
    "system": [{"role": "system", "content": PARTS}, USER],
    "user": [{"role": "user", "content": PARTS}],
    "assistant": [USER, {"role": "assistant", "content": PARTS}, USER],
    "tool": [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": CALL["id"], "name": "look", "content": PARTS},
    ],
}
SEEN = {  # system, user, assistant, tool
    "qwen2_5": "refused refused refused Python",
    "qwen2_5_vl": "joined joined joined joined",
    "qwen3": "refused empty empty empty",
    "qwen3_instruct_2507": "refused empty empty empty",
    "qwen3_5_think": "joined joined joined joined",
    "qwen3_8": "joined joined joined joined",
    "llama3": "Python Python Python Python",
    "llama3_1": "Python Python Python JSON",
    "llama3_2": "Python Python Python JSON",
    "gemma": "refused Python Python refused",
    "gemma3": "first joined joined refused",
    "gemma4": "joined joined joined joined",
    "gptoss": "Python refused refused JSON",
    "glm4moe": "joined joined joined Python",
    "deepseekv3": "refused refused refused refused",
    "nemotron_3_nano": "refused Python Python Python",
    "lfm2": "refused JSON JSON JSON",
    "lfm2_2_5": "joined joined joined joined",
    "llava_next": "first joined first refused",
}


def fate(source, messages):
    try:
        text = render_jinja_template([messages], chat_template=source, bos_token="<s>", eos_token="</s>")[0][0]
    except Exception:
        return "refused"
    if "'type': 'text'" in text:
        return "Python"
    if '"type": "text"' in text:
        return "JSON"
    return {(True, True): "joined", (True, False): "first", (False, False): "empty"}["ONE" in text, "TWO" in text]


print("trl", version("trl"), "transformers", version("transformers"))
print(f"{'':22}" + "".join(f"{role:12}" for role in CONVERSATIONS))
found = {}
for name in SEEN:
    source = (TEMPLATES / f"{name}.jinja").read_text()
    fates = [fate(source, messages) for messages in CONVERSATIONS.values()]
    print(f"{name:22}" + "".join(f"{one:12}" for one in fates))
    found[name] = " ".join(fates)
sys.exit("changed" if found != SEEN else 0)
PY
