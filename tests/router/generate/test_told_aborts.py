"""An aborted reply that comes faster than the news of its abort: the router looks before it sends again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from starlette.types import Message

from router.config import AbortConfig, KvSaltConfig, ServerConfig
from router.generate.fleet import Fleet
from router.generate.fleet_calls import CallSender
from router.generate.generations import Generations
from router.kv_cache.salts import KvSalts
from router.observability.metrics import RouterMetrics
from router.peers.events import Abort, CallBegan, CallOver, ControlEvent, FleetState
from router.peers.peers import Peers
from router.policies.least_inflight import LeastInflight
from router.proxy.in_flight import InFlight
from router.proxy.worker_reply import WorkerReply
from router.workers.pool import WorkerPool
from tests.router.peers.fleets import Breakable
from tests.support.dictionary_store import DictionaryStore

ABORTED = {"text": "", "output_ids": [], "meta_info": {"id": "x", "finish_reason": {"type": "abort"}}}


def reply_to(body: bytes, before: Callable[[Peers], Awaitable[object]], away: bool = False, alone: bool = True) -> Any:
    """Send a generation whose every attempt is aborted, after something was told by another router. Return the attempts."""
    attempts: list[int] = []

    async def main() -> Any:
        store = DictionaryStore()
        ours, other = Peers(), Peers()
        channel = Breakable(store)
        ours.join(channel)
        other.join(Breakable(store))
        ours.log.live = True  # it hears when it looks, and never by itself
        sent: list[Message] = []

        class Aborting:
            """A proxy whose workers abort everything."""

            async def generate(self, _: InFlight) -> WorkerReply:
                attempts.append(1)
                if len(attempts) == 1:
                    await before(other)
                    channel.away = away
                reply = [ABORTED, ABORTED] if b"B:" in body else ABORTED
                return WorkerReply(200, [], json.dumps(reply).encode())

        async def receive() -> Message:
            if not attempts:
                return {"type": "http.request", "body": body, "more_body": False}
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Message) -> None:
            sent.append(message)

        sender: Any = CallSender(None, None, seconds=1.0)  # type: ignore[arg-type]
        fleet = Fleet(WorkerPool(LeastInflight()), sender, max_body_bytes=1000, forward_authorization=False, peers=ours)
        if not alone:
            await other.presence.announce(Breakable(store), 0)
            await ours.presence.look(channel)
        proxy: Any = Aborting()
        app = Generations(
            proxy,
            proxy,
            fleet,
            RouterMetrics(CollectorRegistry()),
            AbortConfig(attempts=3, wait=0),
            ServerConfig(),
            salts=KvSalts(KvSaltConfig(), fleet.version, {}),
        )
        async with asyncio.timeout(30):
            await app({"type": "http", "method": "POST", "path": "/generate", "headers": []}, receive, send)
        return sent[-1]["body"]

    assert b'"abort"' in asyncio.run(main())
    return len(attempts)


async def nothing(_: Peers) -> None:
    pass


async def ended_all(other: Peers) -> None:
    await other.take_turn(CallBegan("1", "/abort_request", aborts=True))


ONE = b'{"text": "A:", "rid": "mine"}'
TWO = b'{"text": ["A:", "B:"], "rid": ["mine", "yours"]}'


@pytest.mark.parametrize(
    ("body", "before", "attempts"),
    [
        (ONE, nothing, 3),
        (ONE, ended_all, 1),
        (TWO, ended_all, 1),
        (ONE, lambda other: other.tell(Abort("mine"), seconds=0.0), 1),
        (ONE, lambda other: other.tell(Abort("mi"), seconds=0.0), 1),
        (ONE, lambda other: other.tell(Abort("mi", exact=True), seconds=0.0), 3),
        (ONE, lambda other: other.tell(Abort("mine", tenant="red"), seconds=0.0), 3),
        (ONE, lambda other: other.tell(Abort("mine", tenant=""), seconds=0.0), 1),
        (TWO, lambda other: other.tell(Abort("yours"), seconds=0.0), 3),
    ],
)
def test_what_was_asked_for_elsewhere_is_not_sent_again(
    body: bytes, before: Callable[[Peers], Awaitable[object]], attempts: int
) -> None:
    assert reply_to(body, before) == attempts


def test_whoever_cannot_ask_does_not_send_again() -> None:
    """Unless there was no other router."""
    assert reply_to(ONE, ended_all, away=True, alone=False) == 1
    assert reply_to(ONE, nothing, away=True, alone=False) == 1
    assert reply_to(ONE, nothing, away=True, alone=True) == 3


@pytest.mark.parametrize("at", [CallBegan, CallOver])
def test_a_call_that_is_cancelled_while_others_are_told_is_over_for_them(at: type[ControlEvent]) -> None:
    """As at the end of a shutdown: otherwise they would wait for it, and end what begins, as long as this router is there."""

    class Stopping(Breakable):
        """Cancels the call when its beginning was appended, or when its end is about to be."""

        async def append(self, kind: str, data: bytes, expected: int | None = None) -> int | None:
            number = await super().append(kind, data, expected) if kind == CallBegan.KIND else None
            if kind == at.KIND:
                call.cancel()
                await asyncio.sleep(0)
            return await super().append(kind, data, expected) if number is None else number

    async def send(_: Message) -> None:
        raise AssertionError

    async def main() -> FleetState:
        nonlocal call
        store = DictionaryStore()
        ours, other = Peers(), Peers()
        ours.join(Stopping(store))
        other.join(Breakable(store))
        sender: Any = CallSender(None, None, seconds=1.0)  # type: ignore[arg-type]
        fleet = Fleet(WorkerPool(LeastInflight()), sender, max_body_bytes=1000, forward_authorization=False, peers=ours)
        path = "/update_weight_version"
        scope = {"method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "headers": []}
        call = asyncio.create_task(fleet.everywhere(scope, send, b'{"new_version": "2"}', aborts=True))
        await asyncio.wait([call])
        assert call.cancelled()
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))
        await other.catch_up()
        return other.log.state

    call: asyncio.Task[None]
    assert asyncio.run(main()).calls == {}
