#!/usr/bin/env bash
# Guess: a data set of reasoning-gym gives the full reward to right answers only.
# Instead (reasoning-gym 0.1.25): game_of_life_halting gives it to every text that is not empty: it compares `bool(answer)`, and
# "False" is true.
# coin_flip gives it to `0` for each probability but 1: a wrong answer gets the part of the shorter text with which both begin,
# and `0` and `0.3` are all of it for 0.3125.
# Hurts: a policy is paid for answers that say nothing, and finds out. The mean reward of a mixture of tasks goes up meanwhile.
# Here: the product scores nothing; rewards come from the trainer's own code.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check --no-compile reasoning-gym==0.1.25
"$tmp/venv/bin/python" -W ignore - <<'PY'
import sys
from importlib.metadata import version

import reasoning_gym

ENTRIES = 50
ANSWERS = ("True", "False", "I do not know", "0", "0.", "1", "2")
SEEN = {  # in how many entries the text is not the right answer, and gets the reward 1.0
    "game_of_life_halting": [26, 24, 50, 50, 50, 50, 50],
    "coin_flip": [0, 0, 0, 47, 47, 0, 0],
    "gcd": [0, 0, 0, 0, 0, 0, 0],
    "leg_counting": [0, 0, 0, 0, 0, 0, 0],
}
print("reasoning-gym", version("reasoning-gym"), "- wrong answers that get the reward 1.0")
print(f"{'':22}", *(f"{answer:>14}" for answer in ANSWERS))
found = {}
for name in SEEN:
    tasks = reasoning_gym.create_dataset(name, size=ENTRIES, seed=1)
    entries = [tasks[at] for at in range(ENTRIES)]
    wrong = [[entry for entry in entries if entry["answer"] not in (answer, f"{answer}.0", f"{answer}0")] for answer in ANSWERS]
    paid = [sum(tasks.score_answer(answer, entry) == 1.0 for entry in rest) for answer, rest in zip(ANSWERS, wrong, strict=True)]
    print(f"{name:22}", *(f"{one:>8} of {len(rest)}" for one, rest in zip(paid, wrong, strict=True)))
    found[name] = paid
sys.exit("changed" if found != SEEN else 0)
PY
