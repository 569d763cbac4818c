#!/usr/bin/env bash
# Guess: rows of rollouts that go into a table with from_pylist or from_list come out as they went in.
# Instead (pyarrow 26.0.1, datasets 5.2.0): objects of one column become one struct with the keys of all rows, so that
# each call of a tool gets the arguments of every other tool, as null. A column that the first row lacks is dropped
# from all rows, without an error.
# Hurts: training data with calls: a chat template writes `"query": null` into calls that the model never made that
# way, and a reward or mask that only later rows have is gone.
# Here: the store's export has a fixed schema of texts and tokens, without objects of calls.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check pyarrow==26.0.1 datasets==5.2.0
"$tmp/venv/bin/python" - <<'PY'
import sys
from importlib.metadata import version

import datasets
import pyarrow

ROWS = [
    {"call": {"name": "read", "arguments": {"path": "/a"}}},
    {"call": {"name": "find", "arguments": {"query": "x"}}, "reward": 1.0},
]
EXPECTED = [
    {"call": {"name": "read", "arguments": {"path": "/a", "query": None}}},
    {"call": {"name": "find", "arguments": {"path": None, "query": "x"}}},
]
table = pyarrow.Table.from_pylist(ROWS).to_pylist()
dataset = datasets.Dataset.from_list(ROWS).to_list()
print("pyarrow", version("pyarrow"), "datasets", version("datasets"))
print("put in  ", *ROWS, sep="\n  ")
print("pyarrow ", *table, sep="\n  ")
print("datasets", *dataset, sep="\n  ")
sys.exit("changed" if (table, dataset) != (EXPECTED, EXPECTED) else 0)
PY
