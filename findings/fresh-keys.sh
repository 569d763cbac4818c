#!/usr/bin/env bash
# Guess: `dcp.load` puts back what `dcp.save` was given: an optimizer's moments, and a mapping with all its keys; or it is an error.
# Instead (torch 2.13.0): it loads the keys that the state has at the moment of loading. An AdamW of a new process has no moments
# before its first step, so it comes back with its learning rate, without moments and with step 0; given as the object itself, too.
# A mapping keeps the keys that the new process has already, mostly none; a list of numbers is loaded whole. Saved tensors
# become what they are loaded into: 70000 is inf in float16, and 1.5 is 1 in int64. No error and no warning.
# Hurts: runs that resume: Adam starts anew at the full learning rate, which the restored rate hides; and counts, such as those of
# the tasks that were solved, are lost. `get_state_dict` makes moments first; mappings need a `state_dict` of one text or bytes.
# Here: the product keeps no weights.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check --no-compile torch==2.13.0 numpy==2.4.6
"$tmp/venv/bin/python" - 2> "$tmp/errors.txt" <<'PY' || { cat "$tmp/errors.txt"; exit 1; }
import sys
import tempfile

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def resumed(saved, fresh):
    """What a new process has after it loaded the state that another one saved."""
    with tempfile.TemporaryDirectory() as folder:
        dcp.save(saved, checkpoint_id=folder)
        dcp.load(fresh, checkpoint_id=folder)
    return fresh


def trained(rate, steps):
    """A model and its AdamW after so many steps."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return model, optimizer


def moments(optimizer):
    """The learning rate, and the steps that its moments know of."""
    steps = [int(one["step"]) for one in optimizer.state_dict()["state"].values()]
    return optimizer.param_groups[0]["lr"], steps


found = {}
model, optimizer = trained(0.5, 3)
found["an optimizer"] = moments(resumed({"adam": optimizer}, {"adam": trained(0.1, 0)[1]})["adam"])
fresh = trained(0.1, 0)[1]
fresh.load_state_dict(resumed({"adam": optimizer.state_dict()}, {"adam": fresh.state_dict()})["adam"])
found["its state_dict"] = moments(fresh)
fresh_model, fresh = trained(0.1, 0)
saved, empty = (dict(zip(("model", "adam"), get_state_dict(*pair), strict=True)) for pair in ((model, optimizer), (fresh_model, fresh)))
loaded = resumed(saved, empty)
set_state_dict(fresh_model, fresh, model_state_dict=loaded["model"], optim_state_dict=loaded["adam"])
found["get_state_dict"] = moments(fresh)
solved = {"sums": 3, "mazes": 1}
found["a mapping, {}"] = resumed({"solved": solved}, {"solved": {}})["solved"]
found["a mapping, one key"] = resumed({"solved": solved}, {"solved": {"sums": 0}})["solved"]
found["a list, []"] = resumed({"seen": [1, 2, 3]}, {"seen": []})["seen"]
numbers = torch.tensor([70000.0, 1.5])
for kind in (torch.float16, torch.int64):
    found[str(kind)] = resumed({"w": numbers}, {"w": torch.zeros(2, dtype=kind)})["w"].tolist()
SEEN = {
    "an optimizer": (0.5, []),
    "its state_dict": (0.5, []),
    "get_state_dict": (0.5, [3, 3]),
    "a mapping, {}": {},
    "a mapping, one key": {"sums": 3},
    "a list, []": [1, 2, 3],
    "torch.float16": [float("inf"), 1.5],
    "torch.int64": [70000, 1],
}
print("torch", torch.__version__)
for name, value in found.items():
    print(f"{name:19} {value}")
sys.exit(f"changed: {found}" if found != SEEN else 0)
PY
