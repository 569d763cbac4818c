"""The same over real sockets, with what can only go wrong there: heads, lengths, chunks, line ends, bytes that are no HTTP."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Iterator

import pytest
import uvloop

from tests.fuzz import rules
from tests.fuzz.draw import SHAPES, Drawing
from tests.fuzz.target import Target, quiet
from tests.fuzz.wire import spoilt, talk
from tests.fuzz.workers import embedded_workers, nobody

COUNT = int(os.environ.get("TITO_FUZZ", "0")) // 50
BATCH, AT_ONCE = 20, 8
PATIENCE = 0.2  # seconds that an answer gets to begin, to what may be only half a request
SECONDS = 30.0


@pytest.mark.parametrize("count", [COUNT] if COUNT else [80, pytest.param(500, marks=pytest.mark.slow)])
def test_whatever_comes_over_a_socket(count: int) -> None:
    """An answer that is one, or an end; and afterwards all is as before."""
    seed = random.SystemRandom().getrandbits(40) if COUNT else 7
    with quiet(), embedded_workers() as embedded, nobody() as absent:
        target = Target("memory", [worker.url for worker in embedded], absent, embedded)
        with target.watched(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            statuses = runner.run(_play(target, seed, count))
    print(f"\n{statuses.total()} connections, seed {seed}: {dict(statuses.most_common())}")


async def _play(target: Target, seed: int, count: int) -> Counter[str]:
    drawing, statuses = Drawing(target.around), Counter[str]()
    async with target.served() as port:
        target.begin()
        for first in range(0, count, BATCH):
            # One route: a pause is not to hang the others.
            path = random.Random(seed + first).choice(("/generate", "/generate", *drawing.paths))
            numbers = iter(range(seed + first, seed + first + BATCH))
            await asyncio.gather(*(_client(drawing, path, port, numbers, statuses) for _ in range(AT_ONCE)))
            wrong = await target.afterwards()
            if wrong is not None:
                pytest.fail(f"{wrong}\n\nafter the batch of {first}, seed {seed}", pytrace=False)
    return statuses


async def _client(drawing: Drawing, path: str, port: int, numbers: Iterator[int], statuses: Counter[str]) -> None:
    for number in numbers:
        await _one(drawing, path, port, random.Random(number), statuses)


async def _one(drawing: Drawing, path: str, port: int, rng: random.Random, statuses: Counter[str]) -> None:
    case = drawing.case(path, rng.choice(SHAPES), rng.getrandbits(60))
    if case is None:
        return
    whole = rng.random() < 0.2
    sent = case.wire() if whole else spoilt(case.wire(), rng)
    if not whole and b"worker" in sent[:200]:
        return  # spoilt in that way, it might name a stranger
    answer = await talk(port, sent, patience=SECONDS if whole else PATIENCE, seconds=SECONDS)
    statuses[str(answer.status)] += 1
    if answer.status is None and not answer.faults and answer.error is None and not whole:
        return
    wrong = rules.complaint(case, answer, good_workers=True)
    if wrong is not None:
        pytest.fail(f"{wrong}\n\n{sent!r}", pytrace=False)
