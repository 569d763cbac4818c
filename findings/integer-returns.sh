#!/usr/bin/env bash
# Guess: Atropos' discounted returns are floats for any rewards, and a group of equal rewards, which has nothing to learn from, is
# refused with the ValueError that its advantages document.
# Instead (atroposlib 0.4.0): an array of whole rewards, such as the 0 and 1 of a verifier, has returns of whole numbers, cut off:
# of [0, 0, 1] with a discount of 0.5 they are [0, 0, 1], and not [0.25, 0.5, 1]; the same numbers in a list are right. The
# variance is the mean of the squares less the square of the mean, which rounding makes negative: three rewards of 0.1 or eight of
# 0.7 are a TypeError about complex numbers, eight of 0.1 the ValueError, and eight of 1000.7 get tiny advantages. Rewards as
# numpy's float32 are refused, as float64 not.
# Hurts: sparse rewards of the last step, of which the steps before get nothing; and loops that skip a group at the ValueError,
# which end at some rewards and not at others.
# Here: the product computes no advantages; trainers get rewards as they were given.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check --no-compile numpy==2.4.6
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check --no-compile --no-deps atroposlib==0.4.0
"$tmp/venv/bin/python" - <<'PY'
import sys
from importlib.metadata import version
from types import SimpleNamespace

import numpy as np

sys.modules["atroposlib.type_definitions"] = SimpleNamespace(number=int | float)  # the module itself wants openai and pydantic
from atroposlib.utils.advantages import compute_discounted_returns, compute_grpo_process_supervision_advantages  # noqa: E402


def returns(rewards):
    return [float(one) for one in compute_discounted_returns(rewards, 0.5)]


def advantages(rewards):
    try:
        found = compute_grpo_process_supervision_advantages([[one] for one in rewards])
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "advantages" if np.any(found) else "no advantages"


print("atroposlib", version("atroposlib"), "numpy", version("numpy"))
found = {"list": returns([0, 0, 1]), "integers": returns(np.array([0, 0, 1])), "floats": returns(np.array([0.0, 0.0, 1.0]))}
for kind, values in found.items():
    print(f"returns of [0, 0, 1] as {kind:8} {values}")
GROUPS = {
    "3 of 0.1": [0.1] * 3,
    "8 of 0.1": [0.1] * 8,
    "8 of 0.7": [0.7] * 8,
    "8 of 1000.7": [1000.7] * 8,
    "float64": [np.float64(0), np.float64(1)],
    "float32": [np.float32(0), np.float32(1)],
}
for kind, rewards in GROUPS.items():
    found[kind] = advantages(rewards)
    print(f"{kind:11} {found[kind]}")
COMPLEX = "TypeError: '<' not supported between instances of 'complex' and 'float'"
SEEN = {
    "list": [0.25, 0.5, 1.0],
    "integers": [0.0, 0.0, 1.0],
    "floats": [0.25, 0.5, 1.0],
    "3 of 0.1": COMPLEX,
    "8 of 0.1": "ValueError: `std` is smaller than tolerance of 1e-08.",
    "8 of 0.7": COMPLEX,
    "8 of 1000.7": "advantages",
    "float64": "advantages",
    "float32": "ValueError: Invalid element type encountered: <class 'numpy.float32'>",
}
sys.exit(f"changed: {found}" if found != SEEN else 0)
PY
