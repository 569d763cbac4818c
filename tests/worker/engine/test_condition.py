"""Waiting for conditions."""

from __future__ import annotations

import asyncio

import pytest

from worker.engine.engine import Condition


def test_a_ring_wakes_those_whose_condition_holds() -> None:
    async def run() -> None:
        condition, seen = Condition(), set[int]()
        tasks = [asyncio.create_task(condition.wait_for(lambda number=number: number in seen)) for number in range(2)]
        await asyncio.sleep(0)
        seen.add(1)
        condition.notify()
        await tasks[1]
        assert not tasks[0].done()
        assert condition.has_waiters
        seen.add(0)
        condition.notify()
        await tasks[0]
        assert not condition.has_waiters

    asyncio.run(run())


def test_what_held_at_a_ring_has_been_seen_even_if_it_is_over() -> None:
    async def run() -> None:
        condition, count = Condition(), 0
        task = asyncio.create_task(condition.wait_for(lambda: count == 1))
        await asyncio.sleep(0)
        for count in range(3):  # noqa: B007 - the condition looks at it
            condition.notify()
        await task

    asyncio.run(run())


def test_what_holds_already_is_not_has_waiters() -> None:
    asyncio.run(Condition().wait_for(lambda: True))


def test_a_condition_that_fails_is_its_waiters_error() -> None:
    async def run() -> None:
        condition, broken = Condition(), list[int]()
        task = asyncio.create_task(condition.wait_for(lambda: bool(broken and broken[1])))
        await asyncio.sleep(0)
        broken.append(1)
        condition.notify()
        with pytest.raises(IndexError):
            await task

    asyncio.run(run())


def test_one_who_gives_up_is_forgotten() -> None:
    async def run() -> None:
        condition = Condition()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(condition.wait_for(lambda: False), 0.01)
        assert not condition.has_waiters
        condition.notify()

    asyncio.run(run())
