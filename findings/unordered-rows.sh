#!/usr/bin/env bash
# Guess: the environment of skyrl-gym in which a model asks a database shows it the rows that its query gave, in their order and
# number, and pays an answer whose rows are those of the right query, in their order if it sorts.
# Instead (skyrl-gym 0.4.0, pandas 3.1.1): rows go through a `frozenset`. What was sorted comes in another order, which changes from
# process to process; rows that are equal are one, so their number is not that of `count(*)`. Columns have numbers for names, and
# beside a NULL 9007199254740993 is 9.007199e+15. Rewards go by the same sets: `ORDER BY` and `DISTINCT` count for nothing. Its tool
# for Python gives the text of a warning in place of the output that the program printed.
# Hurts: a model that looks at the first row of a sorted table and answers what it says there; a group on one prompt, whose rollouts
# in several processes see several tables; and a policy that learns to leave `ORDER BY` out.
# Here: the router passes observations on as the environment sends them.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check --no-compile skyrl-gym==0.4.0 pandas==3.1.1 numpy==2.4.6
cat > "$tmp/ask.py" <<'PY'
import json
import sqlite3
import sys
from pathlib import Path

from skyrl_gym.envs.sql.env import SQLEnv, Text2SQLEnvConfig
from skyrl_gym.tools.python import PythonCodeExecutorToolGroup

file = Path("spider/database/shop/shop.sqlite")
if not file.exists():
    file.parent.mkdir(parents=True)
    with sqlite3.connect(file) as database:
        database.execute("CREATE TABLE item (name TEXT, size TEXT, number INTEGER)")
        rows = [*((f"item {n}", "small", n) for n in range(8)), ("chair", "large", 2**53 + 1), ("table", "large", None)]
        database.executemany("INSERT INTO item VALUES (?, ?, ?)", rows)


def environment(gold="SELECT 1"):
    extras = {"db_id": "shop", "data": "spider", "reward_spec": {"ground_truth": gold}}
    return SQLEnv(Text2SQLEnvConfig(db_path="."), extras)


def seen(query):
    reply = environment().step(f"<think>I look.</think><sql>{query}</sql>")
    return reply["observations"][0]["content"].split("<observation>")[1].split("\n<reminder>")[0]


def reward(gold, query):
    return environment(gold).step(f"<think>I know.</think><solution>{query}</solution>")["reward"]


SORTED = "SELECT name FROM item WHERE size = 'small' ORDER BY number"
python = PythonCodeExecutorToolGroup().execute_tool
found = {
    "sorted": seen(SORTED),
    "sizes": seen("SELECT size FROM item WHERE number < 8"),
    "numbers": seen("SELECT number FROM item WHERE size = 'large'"),
    "rewards": [
        reward(SORTED, SORTED),
        reward(SORTED, SORTED.removesuffix(" ORDER BY number")),
        reward(SORTED, SORTED + " DESC"),
        reward("SELECT size FROM item", "SELECT DISTINCT size FROM item"),
        reward(SORTED, "SELECT size FROM item"),
    ],
    "python": python("python", "print(42)"),
    "warning": python("python", "import warnings; warnings.warn('slow'); print(42)").split("\n")[0],
}
print(json.dumps(found))
PY
cd "$tmp"
PATH=$tmp/venv/bin:$PATH
for run in 1 2 3; do
  PYTHONHASHSEED=$run python ask.py >> seen.jsonl
done
python - <<'PY'
import json
import sys
from importlib.metadata import version

runs = [json.loads(line) for line in open("seen.jsonl")]
print("skyrl-gym", version("skyrl-gym"), "pandas", version("pandas"))
orders = [[line.strip() for line in run["sorted"].split("\n")] for run in runs]
for order in orders:
    print("ORDER BY number:", ", ".join(order[1:]))
first = runs[0]
for name in ("sizes", "numbers", "rewards", "python", "warning"):
    print(f"{name}: {first[name]!r}")
names = [f"item {n}" for n in range(8)]
numbers = sorted(first["numbers"].split())
holds = [
    all(order[0] == "0" and sorted(order[1:]) == names for order in orders),
    all(order[1:] != names for order in orders) and len(set(map(tuple, orders))) == 3,
    first["sizes"].split() == ["0", "small"],
    numbers == sorted(["0", "9.007199e+15", "NaN"]),
    first["rewards"] == [1.0, 1.0, 1.0, 1.0, 0.0],
    first["python"] == "42" and "warn" in first["warning"].lower() and "42" not in first["warning"].replace("print(42)", ""),
]
sys.exit(f"changed: {holds}" if not all(holds) else 0)
PY
