#!/usr/bin/env bash
# Guess: a StatefulDataLoader that gets its own state back goes on in the middle of any epoch with the rows that were left, as it is
# made for that, also if it was given a shuffling sampler of torch's by name.
# Instead (torchdata 0.11.0, torch 2.13.0): with `shuffle=True` it does. With `sampler=RandomSampler(...)`, which is documented as
# the same, and with the other samplers of torch's, it keeps how many batches were taken and not their order: it draws the order
# anew and skips as many. With the seed as at the start that is right in the first epoch, and wrong in each later one: some rows
# come twice in that epoch, as many never. So also if the sampler has a generator of its own. No warning.
# Hurts: runs that resume in a later epoch: they train on rows twice, and a test of resuming that stops in the first epoch passes.
# Here: the product feeds no prompts. torchdata has a RandomSampler with a state, under the same name.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check --no-compile torch==2.13.0 torchdata==0.11.0 numpy==2.4.6
"$tmp/venv/bin/python" -W error -W "ignore:'set_vital'" - <<'PY'
import sys
from collections import Counter
from importlib.metadata import version

import torch
from torch.utils import data
from torchdata.stateful_dataloader import StatefulDataLoader, sampler

ROWS, BATCH = range(20), 4


def generator():
    return torch.Generator().manual_seed(0)


WAYS = {
    "shuffle=True": lambda: {"shuffle": True},
    "torchdata's RandomSampler": lambda: {"sampler": sampler.RandomSampler(ROWS)},
    "RandomSampler": lambda: {"sampler": data.RandomSampler(ROWS)},
    "the same, a generator": lambda: {"sampler": data.RandomSampler(ROWS, generator=generator())},
    "SubsetRandomSampler": lambda: {"sampler": data.SubsetRandomSampler(ROWS)},
    "WeightedRandomSampler": lambda: {"sampler": data.WeightedRandomSampler([1.0] * 20, 20, replacement=False)},
}


def loader(way):
    """A loader as a process makes it at its start: the seed is the same each time."""
    torch.manual_seed(0)
    return StatefulDataLoader(ROWS, batch_size=BATCH, **way())


def rows(batches):
    return [row for batch in batches for row in batch.tolist()]


def resumed(way, epoch):
    """How many rows come twice and never in an epoch that was left after two batches."""
    first = loader(way)
    for _ in range(epoch - 1):
        assert sorted(rows(first)) == list(ROWS)
    batches = iter(first)
    before = rows(next(batches) for _ in range(2))
    state = first.state_dict()
    second = loader(way)
    second.load_state_dict(state)
    times = Counter(before + rows(second))
    return sum(one > 1 for one in times.values()), len(ROWS) - len(times)


print("torchdata", version("torchdata"), "torch", version("torch"))
changed = []
for name, way in WAYS.items():
    found = [resumed(way, epoch) for epoch in (1, 2, 3)]
    print(f"{name:26}", *(f"epoch {epoch}: {twice} twice, {never} never." for epoch, (twice, never) in enumerate(found, 1)))
    keeps = name in ("shuffle=True", "torchdata's RandomSampler")
    if found[0] != (0, 0) or any((one == (0, 0)) != keeps for one in found[1:]):
        changed.append(name)
sys.exit(f"changed: {changed}" if changed else 0)
PY
