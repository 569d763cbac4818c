"""A time limit for others, in which the lateness of this process does not count."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest
import uvloop

from router.http import time_limits
from router.http.time_limits import end_now, patience
from router.http.upstream import AiohttpUpstream
from router.workers.probe import Prober
from tests.support.serving import read_request, serve_socket


def test_it_passes() -> None:
    async def main() -> None:
        async with asyncio.timeout(30):
            with pytest.raises(TimeoutError):
                async with patience(0.05):
                    await asyncio.Event().wait()

    asyncio.run(main())


async def _passed() -> float:
    """Return how long a limit of 0.2 s takes to pass."""
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        async with patience(0.2):
            await asyncio.Event().wait()
    return time.monotonic() - begun


def test_it_does_not_pass_early() -> None:
    assert asyncio.run(_passed()) >= 0.19


def test_whoever_is_done_in_time_is_left_alone() -> None:
    async def main() -> None:
        async with patience(0.01):
            pass
        await asyncio.sleep(0.05)  # if a tick were left, it would find a block that is over

    asyncio.run(main())


def test_a_loop_that_is_late_again_and_again_uses_up_little_of_it() -> None:
    """Six turns of 0.1 s each, as a question on a new connection takes them, within a limit of 0.2 s."""

    async def main() -> None:
        async with patience(0.2):
            for _ in range(6):
                time.sleep(0.1)  # noqa: ASYNC251 - this is the lateness
                await asyncio.sleep(0)

    asyncio.run(main())


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_its_last_step_is_in_time(
    new_loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop is held up in the last step of the limit, and what comes meanwhile is seen."""
    monkeypatch.setattr(time_limits, "TICKS", 1)

    async def main() -> None:
        loop, seen = asyncio.get_running_loop(), asyncio.Event()
        loop.call_later(0.05, time.sleep, 0.5)
        loop.call_later(0.2, seen.set)
        async with patience(0.1):
            await seen.wait()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


def test_a_loop_that_is_always_late_does_not_stretch_it_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limits, "LATE", -1.0)  # each step counts as late
    assert asyncio.run(_passed()) >= 0.39


def test_an_answer_that_was_there_before_the_router_looked_counts() -> None:
    """The loop is held up for longer than a probe may take, while its answer lies in the socket."""
    arrived, may_answer, answered = threading.Event(), threading.Event(), threading.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        arrived.set()
        await asyncio.to_thread(may_answer.wait)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        await writer.drain()
        answered.set()

    async def main(url: str) -> None:
        async with AiohttpUpstream(connect_timeout=10) as upstream:
            probing = asyncio.create_task(Prober(upstream, seconds=0.5).probe(url))
            await asyncio.to_thread(arrived.wait)
            may_answer.set()
            answered.wait()
            time.sleep(1)  # noqa: ASYNC251 - this is the lateness
            found = await probing
            assert found.complaint is None

    with serve_socket(handle) as url:
        asyncio.run(main(url))


async def sleeping(limit: asyncio.Timeout | patience, at_the_end: Callable[[], None]) -> None:
    """Sleep within a limit. `at_the_end` is called while the block ends."""
    async with limit:
        try:
            await asyncio.sleep(60)
        finally:
            at_the_end()


@pytest.mark.parametrize("limit", [lambda: asyncio.timeout(0), lambda: patience(0)], ids=["timeout", "patience"])
def test_what_ends_by_itself_may_be_ended(limit: Callable[[], asyncio.Timeout | patience]) -> None:
    """By somebody who hears of it in the same pass of the event loop, or later: others are to be ended after it."""

    async def main() -> None:
        one, other = limit(), asyncio.timeout(60)
        with pytest.raises(TimeoutError):
            await sleeping(one, lambda: end_now(one))
        end_now(one)
        asyncio.get_running_loop().call_soon(lambda: end_now(other))
        with pytest.raises(TimeoutError):
            await sleeping(other, lambda: None)

    asyncio.run(main())
