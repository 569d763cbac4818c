#!/usr/bin/env bash
# Guess: XGrammar's grammar of a family's calls, which vLLM 0.32.0 and SGLang 0.5.23 take for forced calls and strict tools,
# allows each call that is valid by the tool's schema, as the family's own chat template writes it.
# Instead (xgrammar 0.2.8, the templates in trl 1.16.0): Qwen 3.5's forbids a call without arguments as the template has it,
# `<function=look>\n</function>`, and wants an empty line in it, which no template writes. It forbids `True`, which the template
# of Qwen 3.5 writes for a boolean, that of Qwen 3.8 not. gpt-oss's forbids the space before `<|constrain|>` with which OpenAI's
# guide to Harmony shows a call. In all of them arguments have to come in the order of the schema, and no others, although the
# schema leaves both open, and 2.0 is no integer.
# Hurts: a policy that has such calls in its prompt, or writes them where nothing is forced: its next token is masked, it goes on
# in a way that it never took, and no error says so.
# Here: forced calls have a grammar of the router's own, which allows a call without arguments; the sampled ids stay as they are.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check --no-compile transformers==5.24.0 jinja2==3.1.6 pydantic==2.14.4 \
  apache-tvm-ffi numpy==2.4.6
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check --no-compile --no-deps xgrammar==0.2.8 trl==1.16.0
TRANSFORMERS_VERBOSITY=error "$tmp/venv/bin/python" - <<'PY'
import importlib.machinery
import json
import sys
import types
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template

import tvm_ffi  # noqa: E402, F401  (before the stub below)

torch = sys.modules["torch"] = types.ModuleType("torch")  # for bit masks, which are not made here
torch.__spec__ = importlib.machinery.ModuleSpec("torch", None)
torch.int32, torch.device, torch.Tensor, torch.LongTensor, torch.FloatTensor = int, str, object, object, object
torch.tensor = lambda *values, **options: None
torch.cuda = types.SimpleNamespace(is_available=lambda: False)
import xgrammar  # noqa: E402

TEMPLATES = Path(find_spec("trl").submodule_search_locations[0], "chat_templates")
PROPERTIES = {"path": {"type": "string"}, "lines": {"type": "integer"}, "new": {"type": "boolean"}}
TOOL = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": PROPERTIES}}
TOOLS = [{"type": "function", "function": TOOL}]
CALLS = {
    "all": {"path": "a\nb", "lines": 2},
    "boolean": {"new": True},
    "none": {},
    "other order": {"lines": 2, "path": "a"},
    "another one": {"path": "a", "depth": 1},
    "2.0": {"lines": 2.0},
}
FAMILIES = {"qwen3": "qwen_3", "qwen3_5_think": "qwen_3_5", "qwen3_8": "qwen_3_5", "llama3_1": "llama"}
BYTES = xgrammar.TokenizerInfo([*(bytes([byte]) for byte in range(256)), b"<end>"], stop_token_ids=[256])


def allows(model, text):
    tag = xgrammar.get_model_structural_tag(model, tools=TOOLS, tool_choice="required", reasoning=False)
    matcher = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(BYTES).compile_structural_tag(tag))
    return matcher.accept_string(text) and matcher.accept_token(256)


def written(template, arguments):
    """A call as the template writes it, without what ends the turn."""
    call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    messages = [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    source = (TEMPLATES / f"{template}.jinja").read_text()
    text = render_jinja_template([messages], tools=TOOLS, chat_template=source, bos_token="")[0][0]
    turn = text.split("Go on.")[1]
    start = turn.index("<tool_call>" if "<tool_call>" in turn else '{"name"')
    return turn[start:].split("<|im_end|>")[0].split("<|eot_id|>")[0]


print("xgrammar", version("xgrammar"), "trl", version("trl"))
found = {}
for template, model in FAMILIES.items():
    found[template] = [kind for kind, arguments in CALLS.items() if not allows(model, written(template, arguments))]
    print(f"{template:14} forbidden: {', '.join(found[template])}")
empty = "<tool_call>\n<function=look>\n{}</function>\n</tool_call>"
found["empty line"] = allows("qwen_3_5", empty.format("")), allows("qwen_3_5", empty.format("\n"))
print("Qwen 3.5, without arguments: as the template has it, and with an empty line:", found["empty line"])
HARMONY = [
    '<|channel|>commentary to=functions.look<|constrain|>json<|message|>{"path": "a"}<|call|>',
    ' to=functions.look<|channel|>commentary <|constrain|>json<|message|>{"path": "a"}<|call|>',
    '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"path": "a"}<|call|>',
]
found["harmony"] = [allows("harmony", text) for text in HARMONY]
for text, allowed in zip(HARMONY, found["harmony"], strict=True):
    print("allowed  " if allowed else "forbidden", json.dumps(text))
OPEN = ["other order", "another one", "2.0"]
SEEN = {
    "qwen3": OPEN,
    "qwen3_5_think": ["boolean", "none", *OPEN],
    "qwen3_8": ["none", *OPEN],
    "llama3_1": OPEN,
    "empty line": (False, True),
    "harmony": [True, True, False],
}
sys.exit(f"changed: {found}" if found != SEEN else 0)
PY
