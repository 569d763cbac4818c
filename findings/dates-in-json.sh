#!/usr/bin/env bash
# Guess: `load_dataset("json")` gives the texts of a file as texts, and what `Dataset.to_json` wrote is read back as it was.
# Instead (datasets 5.2.0, pyarrow 26.0.1): a field whose texts all look like a date or a time becomes a column of timestamps,
# a nested field too. The answer `2024-01-05` is a `datetime` then, as a text `2024-01-05 00:00:00`; `2024-01-05T10:00:00Z`
# has lost its `T` and `Z`. Written again, both are numbers: 1704412800000. To say with `features` that they are strings makes
# texts of the timestamps: `2024-01-05 00:00:00` again. One row with another text, and the whole column stays as it was.
# Hurts: tasks about dates, and calls with dates in them: the right answer is no longer equal to the gold one, and a template
# writes a call that the model never made. Whether it happens depends on what other rows the file has.
# Here: the store's exports to Parquet and Arrow have a schema. Its lines of JSON are for a decoder of JSON, as its page says.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check pyarrow==26.0.1 datasets==5.2.0
HF_HOME="$tmp/home" HF_DATASETS_DISABLE_PROGRESS_BARS=1 "$tmp/venv/bin/python" - "$tmp" <<'PY'
import json
import sys
from importlib.metadata import version
from pathlib import Path

from datasets import Dataset, Features, Value, disable_progress_bars

disable_progress_bars()
FOLDER = Path(sys.argv[1])
ROWS = [
    {"answer": "2024-01-05", "call": {"name": "book", "arguments": {"at": "2024-01-05T10:00:00Z"}}},
    {"answer": "2024-02-06", "call": {"name": "book", "arguments": {"at": "2024-02-06T11:30:00Z"}}},
]
OTHER = {"answer": "never", "call": {"name": "book", "arguments": {"at": "noon"}}}
NESTED = {"name": Value("string"), "arguments": {"at": Value("string")}}


def read_back(rows: list | Dataset, features: Features | None = None) -> Dataset:
    file = FOLDER / "rows.jsonl"
    (Dataset.from_list(rows) if isinstance(rows, list) else rows).to_json(file)
    return Dataset.from_json(str(file), features=features, keep_in_memory=True)


def values(row: dict) -> tuple[str, str]:
    return str(row["answer"]), str(row["call"]["arguments"]["at"])


print("datasets", version("datasets"), "pyarrow", version("pyarrow"))
once = read_back(ROWS)
written = json.loads((FOLDER / "rows.jsonl").read_text().splitlines()[0])
read_back(once)
again = json.loads((FOLDER / "rows.jsonl").read_text().splitlines()[0])
with_another = read_back([*ROWS, OTHER])
with_types = read_back(ROWS, Features({"answer": Value("string"), "call": NESTED}))
FOUND = {
    "put in": values(ROWS[0]),
    "in the file": values(written),
    "read back": values(once[0]),
    "written again": values(again),
    "with another row": values(with_another[0]),
    "with features": values(with_types[0]),
}
for name, found in FOUND.items():
    print(f"{name:17}", found)
text = ("2024-01-05", "2024-01-05T10:00:00Z")
SEEN = {
    "put in": text,
    "in the file": text,
    "read back": ("2024-01-05 00:00:00", "2024-01-05 10:00:00"),
    "written again": ("1704412800000", "1704448800000"),
    "with another row": text,
    "with features": ("2024-01-05 00:00:00", "2024-01-05 10:00:00"),
}
sys.exit("changed" if FOUND != SEEN else 0)
PY
