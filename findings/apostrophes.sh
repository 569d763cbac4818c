#!/usr/bin/env bash
# Guess: Atropos' parser of calls reads every call that is valid JSON between `<tool_call>` and `</tool_call>`, and of two calls
# both, or says that there are two.
# Instead (atroposlib 0.4.0): it makes a double quote of each apostrophe before it reads the JSON, so a call with `it's`, or with
# code that has a text in single quotes, is an error. Written as `\u0027`, an apostrophe is read. Of two calls it gives the first,
# without a word.
# Hurts: environments that execute what it gives: the policy is punished for valid calls in English or in Python, and learns to
# avoid apostrophes; its second call never runs.
# Here: sessions read a call's JSON as it was sampled, and all calls of a turn.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check --no-compile --no-deps atroposlib==0.4.0
"$tmp/venv/bin/python" - <<'PY'
import json
import logging
import sys
from importlib.metadata import version

from atroposlib.utils.tool_call_parser import parse_tool_call

logging.disable()
ERROR = ("-ERROR-", {}, True)


def call(text):
    return f"<tool_call>\n{json.dumps({'name': 'say', 'arguments': {'text': text}})}\n</tool_call>"


SEEN = {
    call("Hello"): ("say", {"text": "Hello"}, False),
    call("It's"): ERROR,
    call("print('a')"): ERROR,
    call("It's").replace("'", r"\u0027"): ("say", {"text": "It's"}, False),
    call("one") + "\n" + call("two"): ("say", {"text": "one"}, False),
}
print("atroposlib", version("atroposlib"))
found = {}
for reply in SEEN:
    found[reply] = parse_tool_call(reply)
    print(f"{reply!r}\n  {found[reply]}")
sys.exit("changed" if found != SEEN else 0)
PY
