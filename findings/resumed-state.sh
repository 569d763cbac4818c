#!/usr/bin/env bash
# Guess: a graph of LangGraph that waits and goes on from its checkpoint has the state that its steps left, or the checkpoint is
# refused.
# Instead (langgraph 1.2.24, langgraph-checkpoint 4.3.2): up to the pause each step gets the very object, and after it another
# one, without an error: a tuple is a list, a Counter and a defaultdict are a dict, whose missing keys raise, an Enum as a key is
# its value, an exception is a text, and an array of lists of different length, as token ids are, is None. A mean of rewards,
# which numpy makes a float64, and an integer beyond 64 bits are refused; Enums, sets, decimals and arrays of numbers come back.
# Hurts: agents that wait for a person, a verifier or a longer tool: a test that never pauses passes. A rollout whose ids were in
# the state goes on with none.
# Here: sessions keep a rollout's ids in the router's store, not in the agent's state.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check --no-compile langgraph==1.2.24 langgraph-checkpoint==4.3.2 numpy==2.4.6
"$tmp/venv/bin/python" -W ignore - <<'PY'
import logging
import sys
from collections import Counter, defaultdict
from decimal import Decimal
from enum import Enum
from importlib.metadata import version
from typing import Any, TypedDict

import numpy as np
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, interrupt

logging.disable()
Verdict = Enum("Verdict", "RIGHT WRONG")
VALUES = {
    "tuple": (1, 2),
    "Counter": Counter("aab"),
    "defaultdict": defaultdict(list, a=[1]),
    "Enum as a key": {Verdict.RIGHT: 3},
    "exception": ValueError("no tool"),
    "lists of ids": np.array([[1, 2], [3]], dtype=object),
    "mean of rewards": np.mean([0.0, 1.0]),
    "2 ** 64": 2**64,
    "Enum": Verdict.RIGHT,
    "set": {1},
    "decimal": Decimal("0.10"),
}


class State(TypedDict, total=False):
    value: Any
    before: str
    after: str


def paused(value):
    """How a step before the pause and one after it have the value."""
    graph = StateGraph(State)
    graph.add_node("make", lambda state: {"value": value})
    graph.add_node("use", lambda state: {"before": repr(state["value"])})
    graph.add_node("wait", lambda state: interrupt("wait") and {})
    graph.add_node("go on", lambda state: {"after": repr(state["value"])})
    for one, next_one in zip([START, *graph.nodes], [*graph.nodes, END], strict=True):
        graph.add_edge(one, next_one)
    app, thread = graph.compile(checkpointer=InMemorySaver()), {"configurable": {"thread_id": "1"}}
    try:
        app.invoke({}, thread)
        state = app.invoke(Command(resume=True), thread)
    except TypeError as error:
        return repr(value), f"refused: {error}"
    return state["before"], state["after"]


print("langgraph", version("langgraph"), "langgraph-checkpoint", version("langgraph-checkpoint"))
found = {}
for kind, value in VALUES.items():
    before, after = paused(value)
    found[kind] = "the same" if before == after else after
    print(f"{kind:16} {before:56} {found[kind]}")
SEEN = {
    "tuple": "[1, 2]",
    "Counter": "{'a': 2, 'b': 1}",
    "defaultdict": "{'a': [1]}",
    "Enum as a key": "{1: 3}",
    "exception": "\"ValueError('no tool')\"",
    "lists of ids": "None",
    "mean of rewards": "refused: Type is not msgpack serializable: numpy.float64",
    "2 ** 64": "refused: Integer exceeds 64-bit range",
    "Enum": "the same",
    "set": "the same",
    "decimal": "the same",
}
sys.exit("changed" if found != SEEN else 0)
PY
