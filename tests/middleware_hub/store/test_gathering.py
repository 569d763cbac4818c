"""When what was gathered is handed over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from middleware_hub.store import gathering
from middleware_hub.store.gathering import Gathering

Play = Callable[[float, int, int], list[list[int]]]


@pytest.fixture
def handed_over(monkeypatch: pytest.MonkeyPatch) -> Play:
    """Add a number in each turn of a busy event loop, 2 ms long, until it has nothing else to do; return what came of it."""
    now = [0.0]
    monkeypatch.setattr(gathering, "perf_counter", lambda: now[0])

    def play(patience: float, enough: int, turns: int) -> list[list[int]]:
        found: list[list[int]] = []

        async def run() -> None:
            numbers = Gathering[int](found.append, patience, enough)
            for number in range(turns):
                numbers.add(number, 1)
                now[0] += 0.002
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not numbers

        asyncio.run(run())
        return found

    return play


def test_a_busy_loop_gathers(handed_over: Play) -> None:
    assert handed_over(1, 100, 5) == [[0, 1, 2, 3, 4]]


def test_nobody_waits_longer_than_is_patient(handed_over: Play) -> None:
    assert handed_over(0.003, 100, 4) == [[0, 1], [2, 3]]


def test_what_is_enough_is_not_waited_with(handed_over: Play) -> None:
    assert handed_over(1, 3, 6) == [[0, 1, 2], [3, 4, 5]]


def test_what_was_taken_is_not_handed_over() -> None:
    async def run() -> None:
        found: list[list[int]] = []
        numbers = Gathering[int](found.append, 0, 1)
        numbers.add(1, 1)
        assert (len(numbers), numbers.take(), len(numbers)) == (1, [1], 0)
        await asyncio.sleep(0)
        numbers.add(2, 1)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert [one for one in found if one] == [[2]]

    asyncio.run(run())
