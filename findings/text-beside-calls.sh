#!/usr/bin/env bash
# Guess: a turn in which the model wrote text (and reasoning) and then called a tool can be written back by its own
# template.
# Instead (the templates in TRL 1.16.0, rendered by transformers 5.24.0; mistral-common 1.13.1 with its Tekken
# 240911): Llama 3.1, Llama 3.2 and Muse Glimmer leave the text out without a word; gpt-oss refuses a turn that has
# reasoning, text and a call; mistral-common refuses text beside a call.
# Hurts: agents whose model says what it does before it calls. The next prompt lacks what was sampled (so it is no
# prefix and the logprobs belong to another context), or the run ends with an error that names the client's request.
# Here: a turn that was sampled in a session is continued from its ids and never written by the template again.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check transformers==5.24.0 jinja2==3.1.6 mistral-common==1.13.1
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check --no-deps trl==1.16.0
"$tmp/venv/bin/python" - <<'PY'
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

TEMPLATES = Path(find_spec("trl").submodule_search_locations[0], "chat_templates")
TEKKEN = Path(find_spec("mistral_common").submodule_search_locations[0], "data", "tekken_240911.json")
PATH = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": PATH}}]


def messages(arguments, **reasoning):
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "TEXT", "tool_calls": [call], **reasoning},
        {"role": "tool", "tool_call_id": "abcdefghi", "name": "look", "content": "ok"},
    ]


def fate(render):
    try:
        return "text kept" if "TEXT" in render() else "text dropped"
    except Exception as error:
        return f"error: {str(error).split('!')[0]}"


def template(name, **reasoning):
    source = (TEMPLATES / f"{name}.jinja").read_text()
    said = [messages({"path": "/a"}, **reasoning)]
    return fate(lambda: render_jinja_template(said, tools=TOOLS, chat_template=source, bos_token="<s>", eos_token="</s>")[0][0])


def mistral():
    request = ChatCompletionRequest.from_openai(messages('{"path": "/a"}'), tools=TOOLS)
    return MistralTokenizer.from_file(str(TEKKEN)).encode_chat_completion(request).text


seen = {
    "llama3_1": template("llama3_1"),
    "llama3_2": template("llama3_2"),
    "muse_glimmer": template("muse_glimmer"),
    "gptoss": template("gptoss"),
    "gptoss, reasoning": template("gptoss", thinking="THINK"),
    "mistral-common": fate(mistral),
    "qwen3, reasoning": template("qwen3", reasoning_content="THINK"),
}
print(*(f"{name} {version(name)}" for name in ("trl", "transformers", "mistral-common")))
for name, what in seen.items():
    print(f"{name:18} {what}")
expected = ["text dropped"] * 3 + [
    "text kept",
    "error: Cannot pass both content and thinking in an assistant message with tool calls",
    "error: Assistant message must have either content or tool_calls, but not both.",
    "text kept",
]
sys.exit("changed" if list(seen.values()) != expected else 0)
PY
