#!/usr/bin/env bash
# Guess: a run that resumes with more steps gets the schedule of its new length, as the scheduler is made with it; and an optimizer
# and a scheduler that both got their states back have the learning rates of a run that was not left.
# Instead (torch 2.13.0): `load_state_dict` puts the old length back. A cosine of 10 steps that goes on to 20 falls to 0 at step 10
# and rises again to the full rate at step 20; a linear decay stays at its end. If the optimizer is loaded before the scheduler is
# made, which a note on `Optimizer.load_state_dict` advises against, its rate is multiplied by the first factor again, and the
# scheduler's own state does not mend that: behind a warm-up from a tenth all later rates are about a tenth, to the end, in the
# cosine that follows too. No warning at run time.
# Hurts: runs that go on for longer, whose last steps are at the full rate; and resumed runs with a warm-up, which learn ten times
# slower than before.
# Here: the product has no schedules.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check --no-compile torch==2.13.0 numpy==2.4.6
"$tmp/venv/bin/python" -W error - <<'PY'
import sys
from copy import deepcopy

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR


def cosine(optimizer, steps):
    return CosineAnnealingLR(optimizer, steps)


def decay(optimizer, steps):
    return LinearLR(optimizer, 1.0, 0.1, steps)


def warmed(optimizer, steps):
    return SequentialLR(optimizer, [LinearLR(optimizer, 0.1, 1.0, 2), CosineAnnealingLR(optimizer, steps - 2)], [2])


def new():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def rates(optimizer, scheduler, number):
    """The learning rates of so many steps."""
    found = []
    for _ in range(number):
        found.append(round(optimizer.param_groups[0]["lr"], 3))
        optimizer.step()
        scheduler.step()
    return found


def resumed(make, steps, later, first):
    """The rates of a run of `steps` that was left at the half, and goes on until `later`."""
    optimizer = new()
    scheduler = make(optimizer, steps)
    rates(optimizer, scheduler, steps // 2)
    states = deepcopy((optimizer.state_dict(), scheduler.state_dict()))
    optimizer = new()
    if first == "optimizer":
        optimizer.load_state_dict(states[0])
    scheduler = make(optimizer, later)
    if first == "scheduler":
        optimizer.load_state_dict(states[0])
    scheduler.load_state_dict(states[1])
    return rates(optimizer, scheduler, later - steps // 2 + 1)


def whole(make, steps):
    optimizer = new()
    return rates(optimizer, make(optimizer, steps), steps + 1)


print("torch", torch.__version__)
found = {}
for make, later, first in ((cosine, 20, "scheduler"), (decay, 20, "scheduler"), (warmed, 10, "scheduler"), (warmed, 10, "optimizer")):
    name = f"{make.__name__} to {later}, {first} made first"
    found[name] = resumed(make, 10, later, first)
    print(f"{name}\n  resumed {found[name]}\n  whole   {whole(make, later)[5:]}")
right = whole(warmed, 10)[5:]
SEEN = {
    "cosine to 20, scheduler made first": [0.5, 0.345, 0.206, 0.095, 0.024, 0.0, 0.024, 0.095, 0.206, 0.345, 0.5, 0.655, 0.794, 0.905, 0.976, 1.0],
    "decay to 20, scheduler made first": [0.55, 0.46, 0.37, 0.28, 0.19] + [0.1] * 11,
    "warmed to 10, scheduler made first": right,
    "warmed to 10, optimizer made first": [0.1, 0.072, 0.045, 0.021, 0.006, 0.0],
}
sys.exit(f"changed: {found}" if found != SEEN else 0)
PY
