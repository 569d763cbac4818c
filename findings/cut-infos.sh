#!/usr/bin/env bash
# Guess: a vector of environments gives back the numbers that each of them put in its `info`: a score of 0.5 as 0.5.
# Instead (gymnasium 1.4.0): the array of a key has the type of the first environment's value. If that is 1, the 0.5 of the next
# one is 0; if it is True, 0.5 and 3 are True; beside an array of whole numbers an array of fractions is cut off, nested keys too.
# With the environments the other way round all numbers are right. No warning. Rewards, which have an array of their own, are kept.
# Hurts: metrics and verifiers' scores that travel in `info`: a partial score counts as 0 or as a success, according to what
# another environment returned in the same step, so no run of one environment alone shows it.
# Here: sessions keep the numbers of each rollout by themselves. A scorer in a vector should return floats alone.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check --no-compile gymnasium==1.4.0 numpy==2.4.6
"$tmp/venv/bin/python" -W error - <<'PY'
import sys
from importlib.metadata import version

import gymnasium
import numpy as np
from gymnasium.spaces import Discrete
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv


class Task(gymnasium.Env):
    observation_space = action_space = Discrete(2)

    def __init__(self, score):
        self.score = score

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        return 0, float(np.mean(self.score)), False, False, {"score": self.score, "nested": {"score": self.score}}


def step(kind, first, second):
    """The infos and the rewards of two environments after one step."""
    vector = kind([lambda: Task(first), lambda: Task(second)])
    try:
        vector.reset()
        _, rewards, _, _, infos = vector.step(np.zeros(2, int))
    finally:
        vector.close()
    assert np.array_equal(infos["score"], infos["nested"]["score"])
    return infos["score"].tolist(), rewards.tolist()


SEEN = {  # the two environments' scores: the infos and the rewards of both
    "1 and 0.5": ((1, 0.5), [1, 0], [1.0, 0.5]),
    "0.5 and 1": ((0.5, 1), [0.5, 1.0], [0.5, 1.0]),
    "0 and 0.9": ((0, 0.9), [0, 0], [0.0, 0.9]),
    "True and 0.5": ((True, 0.5), [True, True], [1.0, 0.5]),
    "True and 3": ((True, 3), [True, True], [1.0, 3.0]),
    "two arrays": ((np.array([1, 0]), np.array([0.9, 0.8])), [[1, 0], [0, 0]], [0.5, 0.85]),
}
print("gymnasium", version("gymnasium"))
changed = []
for name, (scores, infos, rewards) in SEEN.items():
    found = [step(kind, *scores) for kind in (SyncVectorEnv, AsyncVectorEnv)]
    print(f"{name:13} infos {found[0][0]!s:18} rewards {found[0][1]}")
    if any(one[0] != infos or not np.allclose(one[1], rewards) for one in found):
        changed.append((name, found))
sys.exit(f"changed: {changed}" if changed else 0)
PY
