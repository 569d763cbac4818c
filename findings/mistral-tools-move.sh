#!/usr/bin/env bash
# Guess: tools stand at the front of a prompt, so the prompt of turn 2 begins with the prompt and the reply of turn 1.
# Instead (mistral-common 1.13.1, its own tekken_240911 and the v7 SentencePiece model): the list of tools stands
# before the *last* user's message. With each new user's message it moves, and the ids of all earlier turns stand
# elsewhere. In the Tekken one a tool's result that is JSON is also parsed and written again (`{"a":1,  "b":2.0}` gets
# other spaces).
# Hurts: rollouts of several user turns with Mistral's format. No turn is a prefix of the next: an engine's cache
# misses, and one conversation is no one training sample: each user's turn needs its own.
# Here: a session goes on from the sampled ids and leaves the tools where the model read them.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check mistral-common==1.13.1 sentencepiece==0.2.3
"$tmp/venv/bin/python" - <<'PY'
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

DATA = Path(find_spec("mistral_common").submodule_search_locations[0], "data")
PATH = {"type": "object", "properties": {"path": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": PATH}}]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": '{"path": "/a"}'}}
FIRST = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abcdefghi", "name": "look", "content": '{"a":1,  "b":2.0}'},
]
SECOND = [*FIRST, {"role": "assistant", "content": "two"}, {"role": "user", "content": "three"}]

print("mistral-common", version("mistral-common"))
seen = []
for file in "tekken_240911.json", "mistral_instruct_tokenizer_241114.model.v7":
    tokenizer = MistralTokenizer.from_file(str(DATA / file))
    first, second = (
        tokenizer.encode_chat_completion(ChatCompletionRequest.from_openai(said, tools=TOOLS)) for said in (FIRST, SECOND)
    )
    common = next(i for i, (a, b) in enumerate(zip(first.tokens, second.tokens)) if a != b)
    result = '{"a":1,  "b":2.0}' in first.text.replace("▁", " ")
    seen.append((common, result))
    print(f"{file}: {common} of the {len(first.tokens)} ids of turn 1 begin turn 2; result as it was given: {result}")
    print("  turn 1", first.text)
    print("  turn 2", second.text)
sys.exit("changed" if seen != [(1, False), (1, True)] else 0)
PY
