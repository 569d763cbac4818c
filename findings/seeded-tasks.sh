#!/usr/bin/env bash
# Guess: reasoning-gym, whose tasks many trainers generate while they train, makes the same tasks from the same seed, in every
# process.
# Instead (reasoning-gym 0.1.25): some of its data sets draw from a Python `set`, whose order is another one in each process
# unless PYTHONHASHSEED is set. One seed gives other questions, or other answers. Of polynomial_multiplication both change: a
# process that has the same entry of the same seed rewards none of the right answers of another process. list_functions draws
# some numbers from Python's shared generator, which the seed does not set, so that its questions change under one hash seed too.
# Hurts: a rollout process and a reward process, or the workers of two machines, that share a seed and an index instead of the
# entry; a run that is resumed or compared, and an evaluation that is fixed by its seed. Forked workers share the order.
# Here: the product generates no tasks, and its scripts that compare runs read tasks from files.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check --no-compile reasoning-gym==0.1.25
cat >"$tmp/tasks.py" <<'PY'
import json
import sys

import reasoning_gym

ENTRIES = 20
known = json.loads(sys.argv[1])
found = {}
for name in sys.argv[2:]:
    tasks = reasoning_gym.create_dataset(name, size=ENTRIES, seed=1)
    entries = [tasks[at] for at in range(ENTRIES)]
    answers = known.get(name, [entry["answer"] for entry in entries])
    rewarded = sum(tasks.score_answer(answer, entry) == 1.0 for answer, entry in zip(answers, entries, strict=True))
    found[name] = [entry["question"] for entry in entries], [entry["answer"] for entry in entries], rewarded
print(json.dumps(found))
PY
"$tmp/venv/bin/python" -W ignore - "$tmp/tasks.py" <<'PY'
import json
import os
import subprocess
import sys
from importlib.metadata import version

SEEN = {  # does another process have other questions, other answers, and does it reward all right answers of the first?
    "chain_sum": (False, False, True),
    "gcd": (False, False, True),
    "isomorphic_strings": (True, False, True),
    "ransom_note": (True, False, True),
    "word_ladder": (False, True, True),
    "polynomial_multiplication": (True, True, False),
}
SHARED = "list_functions"


def in_a_process(hash_seed, known):
    command = [sys.executable, "-W", "ignore", sys.argv[1], json.dumps(known), *SEEN, SHARED]
    written = subprocess.check_output(command, env=os.environ | {"PYTHONHASHSEED": hash_seed}, text=True)
    return json.loads(written.splitlines()[-1])


first = in_a_process("1", {})
again = in_a_process("1", {})
other = in_a_process("2", {name: answers for name, (_, answers, _) in first.items()})
print("reasoning-gym", version("reasoning-gym"))
found = {}
for name in SEEN:
    questions, answers, rewarded = other[name]
    asked, right = sum(map(str.__ne__, first[name][0], questions)), sum(map(str.__ne__, first[name][1], answers))
    found[name] = asked > 0, right > 0, rewarded == len(answers)
    print(f"{name:26} of {len(answers)}: {asked:2} other questions, {right:2} other answers, {rewarded:2} rewarded")
stable = all(again[name] == first[name] for name in SEEN)
drawn = sum(map(str.__ne__, first[SHARED][0], again[SHARED][0]))
print(f"the same hash seed again: the same {'tasks' if stable else 'CHANGED'}, but {drawn} other questions of {SHARED}")
sys.exit("changed" if found != SEEN or not stable or not drawn or other["polynomial_multiplication"][2] > 0 else 0)
PY
