"""Telling one worker: for how long it is waited for, and what counts as done."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from router.config import HealthConfig
from router.generate.fleet_calls import CallSender, FleetCall, WorkerAnswer
from router.http.upstream import AiohttpUpstream
from router.workers.probe import Prober
from router.workers.worker import Worker, WorkerState
from tests.router.conftest import ENGINE, PROBED, answer
from tests.support.serving import SocketHandler, dead_url, read_request, serving, serving_socket

SECONDS = 0.2
FLUSH = FleetCall("POST", "/flush_cache", [], b"{}")
TRANSFER = FleetCall("POST", "/update_weights_from_disk", [], b"{}", transfer=True, updates=True)
UPDATE = FleetCall("POST", "/update_weight_version", [], b"{}", updates=True)


class Slow:
    """A worker with two gates: for the questions how it is, and for what it is told."""

    def __init__(self, said: bytes = b'{"success": true}', status: int = 200) -> None:
        self.said = said
        self.status = status
        self.probes = 0
        self.told = 0
        self.well, self.willing = asyncio.Event(), asyncio.Event()
        self.changed = asyncio.Condition()

    async def until(self, *, probes: int = 0, told: int = 0) -> None:
        async with asyncio.timeout(30), self.changed:
            await self.changed.wait_for(lambda: self.probes >= probes and self.told >= told)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        probed = scope["path"] in PROBED
        async with self.changed:
            self.probes += probed
            self.told += not probed
            self.changed.notify_all()
        await (self.well if probed else self.willing).wait()
        await answer(send, self.status, ENGINE if probed else self.said)


@contextlib.asynccontextmanager
async def sent(app: Slow, seconds: float = SECONDS, state: str = "healthy") -> AsyncIterator[tuple[CallSender, Worker]]:
    async with serving(app) as url, sender(seconds) as made:
        yield made, worker_at(url, state)


@contextlib.asynccontextmanager
async def sender(seconds: float = SECONDS) -> AsyncIterator[CallSender]:
    async with AiohttpUpstream(connect_timeout=1) as upstream:
        yield CallSender(upstream, Prober(upstream, seconds=0.05), seconds=seconds)


def worker_at(url: str, state: str = "healthy") -> Worker:
    worker, twice = Worker(url), HealthConfig(failure_threshold=2)
    complaints = {"healthy": (None,), "starting": ("silence",), "suspect": (None, "silence")}
    for complaint in complaints.get(state, (None, "silence", "silence")):
        worker.probed(complaint, twice)
    assert worker.state is WorkerState(state)
    return worker


@pytest.mark.parametrize("call", [FLUSH, UPDATE], ids=["a flush", "a version"])
def test_a_worker_that_answers_probes_and_not_the_call_is_given_up(call: FleetCall) -> None:
    """Only a transfer of weights may take any time. Nobody knows whether it does what it was told, later."""

    async def main() -> None:
        slow = Slow()
        slow.well.set()
        async with sent(slow) as (made, worker), asyncio.timeout(30):
            found = await made.send(worker, call)
            assert (found.status, found.done, found.unsure) == (None, False, True)
            assert found.error == "no answer within 0.2 s"

    asyncio.run(main())


def test_a_transfer_takes_as_long_as_its_worker_answers_probes() -> None:
    async def main() -> None:
        slow = Slow()
        slow.well.set()
        async with sent(slow) as (made, worker):
            told = asyncio.create_task(made.send(worker, TRANSFER))
            await slow.until(told=1, probes=12)  # one every 0.05 s: three times the limit
            assert not told.done()
            slow.willing.set()
            assert (await told).done

    asyncio.run(main())


def test_a_transfer_to_a_worker_that_is_removed_is_given_up() -> None:
    """Its engine may answer probes and never end the transfer, for which all later updates would wait."""

    async def main() -> None:
        slow = Slow()
        slow.well.set()
        async with sent(slow) as (made, worker), asyncio.timeout(30):
            told = asyncio.create_task(made.send(worker, TRANSFER))
            await slow.until(told=1, probes=1)
            worker.move_to(WorkerState.DRAINING)
            await slow.until(probes=slow.probes + 12)  # three times the limit
            assert not told.done(), "what it has in flight needs the new weights, too"
            worker.move_to(WorkerState.GONE)
            found = await told
            assert (found.status, found.done, found.unsure) == (None, False, True)

    asyncio.run(main())


@pytest.mark.parametrize("probes", [0, 3], ids=["at once", "later"])
def test_a_transfer_to_a_worker_that_hangs_is_given_up(probes: int) -> None:
    async def main() -> None:
        slow = Slow()
        async with sent(slow) as (made, worker), asyncio.timeout(30):
            told = asyncio.create_task(made.send(worker, TRANSFER))
            if probes:
                slow.well.set()
                await slow.until(probes=probes)
                slow.well.clear()
            found = await told
            assert (found.status, found.unsure) == (None, True)

    asyncio.run(main())


@pytest.mark.parametrize("state", ["starting", "suspect", "quarantined"])
@pytest.mark.parametrize("call", [FLUSH, TRANSFER], ids=["a flush", "a transfer"])
def test_a_worker_whose_last_probe_was_bad_and_that_hangs_is_not_told(call: FleetCall, state: str) -> None:
    """It would do it when it goes on: a pause, say, long after the others were told to continue."""

    async def main() -> None:
        slow = Slow()
        async with sent(slow, state=state) as (made, worker), asyncio.timeout(30):
            found = await made.send(worker, call)
            assert (found.status, found.unsure) == (None, False)
            assert found.error is not None
            assert state in found.error
            assert "not told" in found.error
        assert slow.told == 0

    asyncio.run(main())


@pytest.mark.parametrize("call", [FLUSH, TRANSFER], ids=["a flush", "a transfer"])
def test_a_quarantined_worker_that_comes_back_meanwhile_is_told(call: FleetCall) -> None:
    async def main() -> None:
        slow = Slow()
        slow.willing.set()
        async with sent(slow, seconds=10, state="quarantined") as (made, worker):
            told = asyncio.create_task(made.send(worker, call))
            await slow.until(probes=2)
            slow.well.set()
            assert (await told).done

    asyncio.run(main())


def test_what_is_right_at_any_time_is_told_to_a_quarantined_worker_too() -> None:
    """The end of one generation: it finds that when it goes on."""

    async def main() -> None:
        slow = Slow()
        slow.willing.set()
        async with sent(slow, state="quarantined") as (made, worker):
            found = await made.send(worker, FleetCall("POST", "/abort_request", [], b'{"rid": "x"}', lasting=True))
            assert (found.done, slow.probes) == (True, 0)

    asyncio.run(main())


def test_a_worker_where_nobody_listens_is_named_at_once() -> None:
    async def main() -> None:
        async with sender(seconds=3600) as made, asyncio.timeout(30):
            for state in ("healthy", "quarantined"):
                for call in (FLUSH, TRANSFER):
                    found = await made.send(worker_at(dead_url(), state), call)
                    assert found.error is not None
                    assert "Connect call failed" in found.error

    asyncio.run(main())


HALF = b"HTTP/1.1 200 OK\r\ncontent-le"


@pytest.mark.parametrize("hangs", [True, False], ids=["and hangs", "and leaves"])
@pytest.mark.parametrize(
    "said", [HALF, HALF + b"ngth: 100\r\n\r\n{", b""], ids=["half a head", "half a body", "nothing"]
)
def test_a_worker_that_says_half_of_it_has_not_done_it(said: bytes, hangs: bool) -> None:
    def half() -> SocketHandler:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_request(reader)
            writer.write(said)
            await writer.drain()
            if hangs:
                await reader.read()

        return handle

    async def main() -> None:
        async with serving_socket(half()) as url, sender() as made, asyncio.timeout(30):
            found = await made.send(worker_at(url), UPDATE)
            assert (found.status, found.done, found.unsure) == (None, False, True)
            assert found.error

    asyncio.run(main())


@pytest.mark.parametrize(
    ("call", "status", "said", "done"),
    [
        (UPDATE, 200, b'{"success": true}', True),
        (UPDATE, 200, b'{"success": false, "message": "no such model"}', False),
        (UPDATE, 200, b'[{"success": true}, {"success": false}]', False),
        (UPDATE, 200, b'[{"success": true}, {"success": true}]', True),
        (UPDATE, 200, b"{}", True),
        (UPDATE, 200, b"", True),
        (UPDATE, 200, b"<html>Welcome</html>", False),
        (UPDATE, 200, b'{"success": tr', False),
        (UPDATE, 207, b'{"success": false}', False),
        (UPDATE, 302, b"", False),
        (UPDATE, 400, b'{"success": true}', False),
        (FLUSH, 200, b"Cache flushed.\n", True),
        (FLUSH, 200, b'{"success": false}', False),
        (FLUSH, 200, b"null", True),
    ],
)
def test_a_good_status_is_not_enough(call: FleetCall, status: int, said: bytes, done: bool) -> None:
    async def main() -> WorkerAnswer:
        slow = Slow(said, status)
        slow.willing.set()
        async with sent(slow) as (made, worker):
            return await made.send(worker, call)

    found = asyncio.run(main())
    assert (found.status, found.done, found.unsure) == (status, done, False)
    shown: dict[str, Any] = found.shown()
    assert shown.keys() == {"id", "url", "status", "body"}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"success": False, "message": "no such folder"}, "status 400: no such folder"),
        ({"error": {"message": "no such mode", "code": 400}}, "status 400: no such mode"),
        ({"error": "no such adapter"}, "status 400: no such adapter"),
        ({"detail": "Not Found"}, "status 400: Not Found"),
        ({"detail": [{"msg": "field required"}]}, "status 400"),
        ("no", "status 400"),
    ],
    ids=str,
)
def test_what_a_worker_says_is_in_the_one_line(body: Any, words: str) -> None:
    assert WorkerAnswer("id", "http://w", 400, body).failure == f"http://w ({words})"
