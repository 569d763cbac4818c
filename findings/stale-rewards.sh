#!/usr/bin/env bash
# Guess: `map` computes a column anew once the code that computes it has changed, as its cache goes by a hash of the function, and
# `from_generator` gives the rows that the generator yields now.
# Instead (datasets 5.2.0): of a function that is imported only the name is hashed. After an edit of `score.py` a new process gets
# the old scores, whether `score` is given to `map` or called in a lambda there. And `from_generator` does not run the generator a
# second time: the file that it reads has new lines, and the rows are the old ones. A function beside the `map` is hashed with its
# code and the values it reads, and `load_dataset` sees that a file has changed. No warning.
# Hurts: whoever mends a reward or a filter and trains on with the old one; and a loop that writes its rollouts to one file in each
# step and reads them by a generator: it trains on those of the first step, in later runs too.
# Here: the page on the store says how to read its exports: from a list, not by a generator.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check --no-compile datasets==5.2.0
cd "$tmp"
export HF_HOME=$tmp/hf HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=
cat > train.py <<'PY'
import datasets
from score import score

datasets.disable_progress_bars()


def own(row):
    return {"reward": row["n"] * FACTOR}


def lines():
    with open("rows.jsonl") as file:
        for line in file:
            yield {"n": int(line[6:-2])}


FACTOR = int(open("factor").read())
rows = datasets.load_dataset("json", data_files="rows.jsonl", split="train")
print("load_dataset  ", rows["n"][:])
print("own function  ", rows.map(own)["reward"][:])
print("imported      ", rows.map(score)["reward"][:])
print("in a lambda   ", rows.map(lambda row: score(row))["reward"][:])
print("from_generator", datasets.Dataset.from_generator(lines)["n"][:])
PY
factor() {
  echo "$1" > factor
  printf 'def score(row):\n    return {"reward": row["n"] * %s}\n' "$1" > score.py
}
rows() {
  printf '{"n": %s}\n{"n": %s}\n' "$@" > rows.jsonl
}
run() {
  echo "-- $1"
  "$tmp/venv/bin/python" train.py
}
{
  "$tmp/venv/bin/python" -c 'import datasets; print("datasets", datasets.__version__)'
  factor 1
  rows 1 2
  run "n * 1, rows 1 and 2"
  factor 100
  run "n * 100, rows 1 and 2"
  rows 3 4
  run "n * 100, rows 3 and 4"
} | tee seen.txt
diff seen.txt - <<'TXT' || { echo changed; exit 1; }
datasets 5.2.0
-- n * 1, rows 1 and 2
load_dataset   [1, 2]
own function   [1, 2]
imported       [1, 2]
in a lambda    [1, 2]
from_generator [1, 2]
-- n * 100, rows 1 and 2
load_dataset   [1, 2]
own function   [100, 200]
imported       [1, 2]
in a lambda    [1, 2]
from_generator [1, 2]
-- n * 100, rows 3 and 4
load_dataset   [3, 4]
own function   [300, 400]
imported       [300, 400]
in a lambda    [300, 400]
from_generator [1, 2]
TXT
