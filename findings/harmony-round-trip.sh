#!/usr/bin/env bash
# Guess: openai-harmony, the reference for gpt-oss's format, renders the messages that it parsed to the ids it parsed.
# Instead (openai-harmony 0.0.8): a call sampled as `<|channel|>commentary to=functions.look` is rendered with its
# recipient before the channel (both are valid, and parse to the same message). A final answer with a content type,
# `<|channel|>final <|constrain|>json<|message|>`, is parsed as a message *to* `<|constrain|>json`, and rendered with
# `to=<|constrain|>json` and `<|call|>` at its end: an answer has become a call.
# Hurts: loops that keep messages and render them for the next turn or the trainer: other ids than the sampled ones,
# with the sampled ones' logprobs; and a structured answer that is routed as a call to a tool that nobody has.
# Here: sampled ids are kept and never rendered again.
# The vocabulary comes from the npm package `tiktoken`; openai-harmony checks its hash.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check openai-harmony==0.0.8
npm install --silent --prefix "$tmp" tiktoken@1.0.22 >"$tmp/npm.log" 2>&1 || { cat "$tmp/npm.log"; exit 1; }
TIKTOKEN_ENCODINGS_BASE="$tmp" "$tmp/venv/bin/python" - "$tmp" <<'PY'
import json
import sys
from importlib.metadata import version
from pathlib import Path

from openai_harmony import Conversation, HarmonyEncodingName, Role, load_harmony_encoding

folder = Path(sys.argv[1])
ranks = []
for line in json.loads((folder / "node_modules/tiktoken/encoders/o200k_base.json").read_text())["bpe_ranks"].split("\n"):
    _, start, *tokens = line.split(" ")
    ranks += [f"{token} {int(start) + index}\n" for index, token in enumerate(tokens)]
(folder / "o200k_base.tiktoken").write_text("".join(ranks))
encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)


def again(reply):
    messages = encoding.parse_messages_from_completion_tokens(encoding.encode(reply, allowed_special="all"), Role.ASSISTANT)
    text = encoding.decode_utf8(encoding.render_conversation(Conversation.from_messages(messages)))
    return messages[-1].recipient, text.removeprefix("<|start|>assistant")


REPLIES = (
    '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"path":"/a"}<|call|>',
    ' to=functions.look<|channel|>commentary <|constrain|>json<|message|>{"path":"/a"}<|call|>',
    '<|channel|>final <|constrain|>json<|message|>{"answer":1}<|return|>',
)
EXPECTED = [
    ("functions.look", REPLIES[1]),
    ("functions.look", REPLIES[1]),
    ("<|constrain|>json", ' to=<|constrain|>json<|channel|>final<|message|>{"answer":1}<|call|>'),
]
print("openai-harmony", version("openai-harmony"))
seen = [again(reply) for reply in REPLIES]
for reply, (recipient, text) in zip(REPLIES, seen):
    print(f"sampled  {reply}\nrendered {text}   recipient: {recipient}\n")
sys.exit("changed" if seen != EXPECTED else 0)
PY
