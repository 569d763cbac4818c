"""A server goes back to an earlier state: every log that routers share says the same to all of them afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec
import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from middleware_hub.chat.keys import canonical
from middleware_hub.metrics import SessionMetrics
from middleware_hub.persistence.saving import Saving
from middleware_hub.persistence.store_channel import StoreChannel
from middleware_hub.persistence.weight_versions import VersionLog
from middleware_hub.sessions.events import SessionRewarded
from middleware_hub.sessions.log.archive import Archive
from middleware_hub.sessions.session import Session
from middleware_hub.spans.versions import VersionClock, WorkerVersions
from middleware_hub.store.errors import LogMovedError, StoreUnreachableError
from middleware_hub.store.opening import open_store
from middleware_hub.store.protocol import Batch, Store
from middleware_hub.store.records import Serials
from middleware_hub.trajectories.events import Sampled
from middleware_hub.trajectories.journal import StoreJournal
from router.peers.channel import ChannelError
from router.peers.control_log import ControlLog
from router.peers.events import ControlEvent, WorkerAdded
from tests.support.redis_server import RedisServer, redis_server


class Workers:
    """The control log of one router."""

    def __init__(self, store: Store) -> None:
        self.channel, self.log = StoreChannel(store, "test"), ControlLog("token")
        self.untold: list[ControlEvent] = []
        self.log.on_set_back = self.untold.extend

    async def act(self, name: str) -> None:
        await self.log.append(self.channel, WorkerAdded(name))

    async def state(self) -> object:
        await self.log.read_on(self.channel)
        while self.untold:
            await self.log.append(self.channel, self.untold.pop(0))
        await self.log.read_on(self.channel)
        return self.log.state.workers.keys()


class Versions:
    """The order of weight versions, as one router knows it."""

    def __init__(self, store: Store) -> None:
        self.clock = VersionClock()
        self.log = VersionLog(store, self.clock, WorkerVersions())

    async def act(self, name: str) -> None:
        self.clock.observe(name)
        await self.log.write()

    async def state(self) -> object:
        await self.log.read()
        await self.log.write()
        await self.log.read()
        return set(self.clock.known)


class Rewards:
    """A session of one router."""

    def __init__(self, store: Store) -> None:
        versions = VersionLog(store, VersionClock(), WorkerVersions())
        metrics = SessionMetrics(CollectorRegistry())
        self.archive = Archive(Saving(store), Serials(), VersionClock(), versions, canonical, metrics, self)
        self.here: Session | None = None
        store.on_loss(self.archive.refill)

    def __iter__(self) -> Iterator[Session]:
        return iter([] if self.here is None else [self.here])

    def held(self, tokens: int) -> None:
        pass

    def closed_elsewhere(self, tenant: str, session_id: str) -> None:
        pass

    async def session(self) -> Session:
        if self.here is not None and not await self.archive.refresh(self.here):
            self.here = None
        if self.here is None:
            self.here = await self.archive.find("", "s")
        if self.here is None:
            self.here = Session("s", "", canonical, ttl=3600.0)
            await self.archive.create(self.here)
        return self.here

    async def act(self, name: str) -> None:
        await (await self.session()).happen(SessionRewarded(info=msgspec.json.encode({name: 1}), branch=None, time=0.0))

    async def state(self) -> object:
        return (await self.session()).reward_info


class Replies:
    """The groups of one router."""

    def __init__(self, store: Store) -> None:
        self.journal = StoreJournal(Saving(store), "groups/a/b")

    async def act(self, name: str) -> None:
        await self.journal.append(
            Sampled(
                key=name.encode(), root=b"", group=name, size=1, rollout=None, ended=True, parent=None, lora="",
                names=(name,), inexact=False, versions=("1",), time=0.0,
            )
        )  # fmt: skip

    async def state(self) -> object:
        await self.journal.read_on()
        return self.journal.ledger.groups.keys()


Log = Workers | Versions | Rewards | Replies
MORE: Final = 6
"""Events of a new router, with which the log is longer than it was."""


async def insisted(act: Callable[[], object]) -> None:
    """Act as a client does that asks again after 503."""
    async with asyncio.timeout(30):
        while True:
            try:
                await act()  # type: ignore[misc]
                return
            except (ChannelError, StoreUnreachableError):
                await asyncio.sleep(0.01)


@asynccontextmanager
async def router(kind: type[Log], server: RedisServer) -> AsyncIterator[tuple[Store, Log]]:
    store = open_store(server.address)
    await store.open("t")
    try:
        yield store, kind(store)
    finally:
        await store.close()


@pytest.mark.parametrize("more", [0, MORE])
@pytest.mark.parametrize("kind", [Workers, Versions, Rewards, Replies])
def test_all_routers_hear_the_same_of_a_log_that_was_set_back(kind: type[Log], more: int, tmp_path: Path) -> None:
    """Whoever had read what is lost, whoever appends after it, and however long the log is by then."""

    async def work(server: RedisServer) -> None:
        async with AsyncExitStack() as stack:
            enter = stack.enter_async_context
            (first, one), (second, two) = [await enter(router(kind, server)) for _ in range(2)]
            await one.act("a")
            await two.act("b")
            server.say("SAVE")
            for name in "cd":
                await one.act(name)
                await two.act(name * 2)
            assert await one.state() == await two.state()
            server.kill()
            await asyncio.to_thread(server.start)
            _, late = await enter(router(kind, server))
            for number in range(more):
                await late.act(f"late {number}")
            for store in (first, second):  # both notice that it was another server's life, as routers do by being there
                await insisted(lambda store=store: store.announce("router/", b"", 5.0))  # type: ignore[misc]
            await insisted(lambda: one.act("one"))
            await insisted(lambda: two.act("two"))
            await insisted(one.state)
            await insisted(two.state)
            _, new = await enter(router(kind, server))
            heard = await new.state()
            assert await one.state() == await two.state() == await late.state() == heard
            kept = {"a", "b", "one", "two", *(f"late {number}" for number in range(more))}
            assert kept <= set(heard)  # type: ignore[call-overload]

    with redis_server(tmp_path, ("appendonly", "no")) as server:
        asyncio.run(work(server))


def test_a_session_whose_last_event_was_written_again_behind_others_is_read_anew(tmp_path: Path) -> None:
    """A router may write its last events again before it looks at its sessions, and at their old numbers by chance."""

    async def work(server: RedisServer) -> None:
        async with AsyncExitStack() as stack:
            first, one = await stack.enter_async_context(router(Rewards, server))
            await one.act("a")
            server.say("SAVE")
            for name in "bcd":
                await one.act(name)
            (log,) = await first.logs("")
            last = (await first.read(log.log))[-1]
            server.kill()
            await asyncio.to_thread(server.start)
            other, late = await stack.enter_async_context(router(Rewards, server))
            for number in range(2):
                await late.act(f"late {number}")
            with suppress(LogMovedError):  # the router has written it again itself already
                await other.append(Batch(events=[replace(last, number=0, expected=last.number - 1)]))
            await insisted(lambda: first.announce("router/", b"", 5.0))
            await insisted(lambda: one.act("one"))
            heard = await late.state()
            await insisted(one.state)
            assert await one.state() == heard
            assert {"a", "late 0", "late 1", "one"} <= set(heard)  # type: ignore[call-overload]

    with redis_server(tmp_path, ("appendonly", "no")) as server:
        asyncio.run(work(server))
