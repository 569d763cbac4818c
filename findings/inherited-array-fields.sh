#!/usr/bin/env bash
# Guess: a field with a default that is added to a subclass is the last element of an `array_like` msgspec struct, so
# that arrays written before still decode (msgspec's documented way to extend a struct).
# Instead (msgspec 0.22.0): if the base class is `kw_only` and the subclass is not, the base's fields move *behind*
# all of the subclass's. The new field then stands in the middle, and old arrays are read with their values shifted:
# an error if the types differ, and a wrong value without a word if they do not.
# Hurts: compact logs of rollouts: after an update a file of tokens, versions or rewards reads as other ones.
# Here: fields that are new stand in a kw_only class of their own, below the old ones.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check msgspec==0.22.0
"$tmp/venv/bin/python" - <<'PY'
import sys

import msgspec


class Event(msgspec.Struct, array_like=True, kw_only=True):
    time: int = 0


class Old(Event, array_like=True):
    reward: int


class New(Event, array_like=True):
    reward: int
    version: int = -1


written = msgspec.json.encode(Old(time=1700, reward=1))
read = msgspec.json.decode(written, type=New)
print("msgspec", msgspec.__version__)
print("order before ", Old.__struct_fields__, "and with the new field", New.__struct_fields__)
print("written      ", written.decode(), "by", Old(time=1700, reward=1))
print("read         ", read)
order = New.__struct_fields__ == ("reward", "version", "time")
sys.exit(0 if order and (read.reward, read.version, read.time) == (1, 1700, 0) else "changed")
PY
