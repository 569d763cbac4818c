#!/usr/bin/env bash
# Guess: `pandas.read_json(lines=True)` gives what stands in quotation marks as a text.
# Instead (pandas 3.1.1): if each text of a column looks like a number, the column is numbers: `007` is 7, `1e3` is 1000.0, `nan` is
# none, an identity of 23 digits a float. One row with another text, and all of them stay texts. Within lists and objects they do.
# Numbers change as well: with a row that lacks it, true is 1.0, and 9007199254740993 is 9007199254740992.0. `dtype=False` keeps
# texts, not numbers.
# Hurts: gold answers and identities of tasks: `0012` and `12` are one, and `str(answer)` is another text than the file has. Whether
# it happens depends on the other rows, so a part of a file reads otherwise than all of it.
# Here: the store's exports to Parquet and Arrow have a schema. Its lines of JSON are for a decoder of JSON, as its page says.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check --no-compile pandas==3.1.1 numpy==2.4.6
"$tmp/venv/bin/python" - <<'PY'
import io
import json
import sys

import pandas

FILES = {  # the values of a column, as read, as read with dtype=False
    "numbers in texts": (["007", "12"], "[7, 12]", "['007', '12']"),
    "one with an exponent": (["1e3", "12"], "[1000.0, 12.0]", "['1e3', '12']"),
    "nan": (["nan", "12"], "[nan, 12.0]", "['nan', '12']"),
    "23 digits": (["12345678901234567890123", "0"], "[1.2345678901234568e+22, 0.0]", "['12345678901234567890123', '0']"),
    "a word among them": (["007", "1e3", "x"], "['007', '1e3', 'x']", "['007', '1e3', 'x']"),
    "in lists": ([["007"], ["12"]], "[['007'], ['12']]", "[['007'], ['12']]"),
    "true, and a gap": ([True, None], "[1.0, nan]", "[True, nan]"),
    "2^53 + 1, and a gap": ([2**53 + 1, None], "[9007199254740992.0, nan]", "[9007199254740992.0, nan]"),
}
print("pandas", pandas.__version__)
changed = []
for name, (values, *expected) in FILES.items():
    lines = "".join(json.dumps({"answer": value}) + "\n" for value in values)
    found = [str(pandas.read_json(io.StringIO(lines), lines=True, **how)["answer"].tolist()) for how in ({}, {"dtype": False})]
    print(f"{name:22}{json.dumps(values):34}{found[0]:32}dtype=False {found[1]}")
    if found != expected:
        changed.append(name)
sys.exit(f"changed: {changed}" if changed else 0)
PY
