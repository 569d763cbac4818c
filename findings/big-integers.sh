#!/usr/bin/env bash
# Guess: a parser of JSON for Python gives an integer of any size as an `int`, as the standard one does, or refuses it.
# Instead (orjson 3.13.0): beyond 64 bits it is a float with 17 digits, without an error. msgspec, pydantic-core, jiter, ujson
# and the standard parser keep each digit; orjson itself refuses to write the number.
# Hurts: tasks of number theory and cryptography, and files of rollouts that orjson reads. SGLang 0.5.23 reads the earlier calls
# of a conversation with it: after a call with 123456789012345678901234567890 the next prompt has 1.2345678901234568e+29 in that
# place, which the model never wrote, and which is what it copies from.
# Here: msgspec and Python's parser read the arguments. A turn that a client sends back with the rounded number is still the
# sampled turn, and keeps its ids.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check orjson==3.13.0 msgspec==0.23.0 pydantic-core==2.50.5 \
  jiter==0.19.0 ujson==6.1.0
"$tmp/venv/bin/python" - <<'PY'
import json
import sys
from importlib.metadata import version

import jiter
import msgspec
import orjson
import pydantic_core
import ujson

SIZES = {"2^53 + 1": 2**53 + 1, "2^64 - 1": 2**64 - 1, "2^64": 2**64, "-2^63 - 1": -(2**63) - 1, "25!": 15511210043330985984000000}
PARSERS = {
    "json": json.loads,
    "orjson": orjson.loads,
    "msgspec": msgspec.json.decode,
    "pydantic-core": pydantic_core.from_json,
    "jiter": lambda text: jiter.from_json(text.encode()),
    "ujson": ujson.loads,
}
print(", ".join(f"{name} {version(name)}" for name in PARSERS if name != "json"))
wrong = set()
for size, number in SIZES.items():
    for name, parse in PARSERS.items():
        found = parse(f'{{"n": {number}}}')["n"]
        print(f"{size:10} {name:14} {found!r}")
        if type(found) is not int or found != number:
            wrong.add((size, name, repr(found)))
SEEN = {
    ("2^64", "orjson", "1.8446744073709552e+19"),
    ("-2^63 - 1", "orjson", "-9.223372036854776e+18"),
    ("25!", "orjson", "1.5511210043330986e+25"),
}
try:
    orjson.dumps({"n": 2**64})
    refused = False
except TypeError as error:
    print("orjson.dumps:", error)
    refused = True
sys.exit("changed" if wrong != SEEN or not refused else 0)
PY
