#!/usr/bin/env bash
# Guess: LitData reads each row as it was written, or refuses to write a row whose types or keys are other than the first one's.
# Instead (litdata 0.2.76): the keys of mappings and the types of arrays are those of the first row. After an array of whole
# numbers, 0.5 is read as 4602678819172646912, its bits; None is 0.0 after a float; True stands for each number after a
# True. Of a call's arguments `{"query": "cats"}` is `{"path": ""}` if the first call had a path. After `{}` the value of a key
# there is read as the next column: a reward of 1 as the step, 7. No error and no warning, in writing or in reading.
# Hurts: rollouts that are written with it: the rewards of a first row are 0 or 1, and those of others are partial or missing; and
# tools' arguments, which have other keys in each call.
# Here: the store's exports are JSON. In LitData such values should be one text of JSON, and rewards floats.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check --no-compile litdata==0.2.76 torch==2.13.0 torchvision==0.28.0 numpy==2.4.6
cd "$tmp"
export HOME=$tmp
cat > first_rows.py <<'PY'
import sys
from importlib.metadata import version

import litdata
import numpy as np

WRITTEN = {
    "types": [
        {"rewards": np.array([0, 1]), "score": 1.0, "won": True, "arguments": {"path": "a.txt"}},
        {"rewards": np.array([0.5, 1.0]), "score": None, "won": 0.5, "arguments": {"query": "cats"}},
    ],
    "empty": [{"arguments": {}, "reward": 0}, {"arguments": {"step": 7}, "reward": 1}],
}
SEEN = {
    "types": [
        {"rewards": [0, 1], "score": 1.0, "won": True, "arguments": {"path": "a.txt"}},
        {"rewards": [4602678819172646912, 4607182418800017408], "score": 0.0, "won": True, "arguments": {"path": ""}},
    ],
    "empty": [{"arguments": {}, "reward": 0}, {"arguments": {}, "reward": 7}],
}


def row(place):
    name, number = place
    return WRITTEN[name][number]


def plain(read):
    return {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in read.items()}


if __name__ == "__main__":
    found = {}
    for name, rows in WRITTEN.items():
        places = [(name, number) for number in range(len(rows))]
        litdata.optimize(fn=row, inputs=places, output_dir=name, num_workers=1, chunk_bytes="64MB")
        found[name] = [plain(one) for one in litdata.StreamingDataset(name)]
    print("litdata", version("litdata"), "numpy", version("numpy"))
    for name, rows in WRITTEN.items():
        for written, read in zip(rows, found[name], strict=True):
            print(f"written {plain(written)}\nread    {read}")
    sys.exit("changed" if found != SEEN else 0)
PY
if ! "$tmp/venv/bin/python" first_rows.py > out.txt 2> errors.txt; then
  cat out.txt errors.txt
  exit 1
fi
grep -E "^(litdata|written|read) " out.txt
