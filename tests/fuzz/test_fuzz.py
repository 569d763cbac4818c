"""Whatever a client sends, the router answers: no 500 of its own, no hang, nothing left behind.

Hypothesis draws a router, a route, what is to be spoilt, and a number; a batch of requests is made from that, a few
microseconds each, and sent at the same time. Nine hundred of them belong to every run of the tests, the same ones each time;
`make test-slow` has three thousand, and `TITO_FUZZ=1000000` (`make fuzz`) makes it a million others.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Coroutine, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import uvloop
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.batch import Batch, Round
from tests.fuzz.draw import Shape
from tests.fuzz.tally import Tally
from tests.fuzz.target import Kind, Target, quiet
from tests.fuzz.workers import embedded_workers, garbled_worker, nobody

COUNT = int(os.environ.get("TITO_FUZZ", "0"))
BATCH = 200 if COUNT else 30
ENOUGH = 20 if COUNT else 1  # faults

# As often as they stand there.
KINDS: list[Kind] = [*["memory"] * 4, *["tenants"] * 2, *["stored"] * 3, *["vllm"] * 2, *["spoilt"] * 3, "plain"]
SHAPES: list[Shape] = [*["json"] * 10, *["bytes"] * 3, *["headers"] * 2, *["everything"] * 3, "target", "nothing"]

Rounds = dict[Kind, Round]


@pytest.fixture(scope="module")
def rounds() -> Iterator[tuple[asyncio.Runner, Rounds]]:
    """A router of each kind, all in one event loop, which runs only while there is a batch."""
    with contextlib.ExitStack() as entered:
        entered.enter_context(quiet())
        embedded = entered.enter_context(embedded_workers())
        others = entered.enter_context(embedded_workers("vllm"))
        garbled = entered.enter_context(garbled_worker())
        absent = entered.enter_context(nobody())
        runner = entered.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        tally = Tally(tells=COUNT > 0)
        found: Rounds = {}
        for kind in dict.fromkeys(KINDS):
            good = {"vllm": others, "spoilt": [], "plain": []}.get(kind, embedded)
            urls = [worker.url for worker in good] or [garbled]
            found[kind] = Round(partial(Target, kind, urls, absent, good), tally)
        runner.run(_each(one.start() for one in found.values()))
        runner.run(_each(one.begin() for one in found.values()))
        yield runner, found
        runner.run(_each(one.stop() for one in found.values()))
        print(f"\n{tally}")


@pytest.mark.parametrize("count", [COUNT] if COUNT else [300, pytest.param(3_000, marks=pytest.mark.slow)])
def test_no_request_is_too_much(rounds: tuple[asyncio.Runner, Rounds], count: int) -> None:
    """Every answer keeps the rules of `tests/fuzz/rules.py`, and after each batch a good request is served as before."""
    runner, found = rounds
    faults: list[str] = []

    @settings(
        max_examples=max(1, count // BATCH),
        deadline=None,
        database=None,
        derandomize=not COUNT,
        phases=(Phase.generate,),  # a batch finds its smallest request by itself
        suppress_health_check=list(HealthCheck),
    )
    @given(kind=st.sampled_from(KINDS), shape=st.sampled_from(SHAPES), number=st.integers(0, 2**60), data=st.data())
    def play(kind: Kind, shape: Shape, number: int, data: st.DataObject) -> None:
        if len(faults) >= ENOUGH:
            return
        path = data.draw(st.sampled_from(found[kind].paths))
        numbers = random.Random(number).sample(range(2**60), BATCH)
        fault = runner.run(found[kind].play(Batch(path, shape, numbers)))
        if fault is not None:
            faults.append(fault)
            print(f"\n{fault}\n", flush=True)

    play()
    if faults:
        pytest.fail(f"{len(faults)} faults, the first of them:\n{faults[0]}", pytrace=False)


async def _each(steps: Iterable[Coroutine[Any, Any, None]]) -> None:
    for step in steps:
        await step
