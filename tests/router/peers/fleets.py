"""Routers of one process that share a store: their peers, pools and generations, without HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from middleware_hub.persistence.store_channel import StoreChannel
from middleware_hub.store.protocol import Store
from router.errors import BadRequestError
from router.peers.channel import ChannelError, Entry, SetBack
from router.peers.peers import Peers
from router.peers.presence import Presence
from router.policies.least_inflight import LeastInflight
from router.workers.membership import FleetMembership
from router.workers.pool import WorkerPool
from router.workers.worker import ProbeResult, Worker
from tests.support.dictionary_store import DictionaryStore


class Breakable:
    """A channel that can be away."""

    kind = "test"

    def __init__(self, store: Store) -> None:
        self.away = False
        self._channel = StoreChannel(store, "test")

    def _check(self) -> None:
        if self.away:
            raise ChannelError("it is away")

    async def append(self, kind: str, data: bytes, expected: int | None = None) -> int | None:
        self._check()
        return await self._channel.append(kind, data, expected)

    async def read_on(self) -> Sequence[Entry] | SetBack:
        self._check()
        return await self._channel.read_on()

    def take(self, entry: Entry) -> None:
        self._channel.take(entry)

    async def wait(self, seconds: float) -> None:
        self._check()
        await self._channel.wait(min(seconds, 0.05))

    async def trim(self, before: int) -> None:
        self._check()
        await self._channel.trim(before)

    async def announce(self, name: str, data: bytes, seconds: float) -> None:
        self._check()
        await self._channel.announce(name, data, seconds)

    async def announced(self) -> Mapping[str, bytes]:
        self._check()
        return await self._channel.announced()


class OpenDoor:
    """Takes in every worker without asking it.

    Attributes:
        refused: are not allowed here.
        taken: those that were taken in.
        meanwhile: what happens while several workers are asked.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        self.refused: set[str] = set()
        self.taken: list[str] = []
        self.meanwhile: Callable[[], Awaitable[None]] = nothing

    async def check(self, url: str, found: ProbeResult | None = None) -> None:
        if url in self.refused:
            raise BadRequestError(f"{url} is not allowed")

    async def examine(self, url: str) -> ProbeResult:
        await self.check(url)
        return ProbeResult(version="1")

    def take_in(self, url: str, found: ProbeResult) -> Worker:
        self.taken.append(url)
        worker = self.pool.add(url)
        self.pool.probed(worker, found.complaint, found.version)
        return worker

    async def admit_all(self, urls: Iterable[str]) -> None:
        await self.meanwhile()
        for url in urls:
            self.take_in(url, ProbeResult())


async def nothing() -> None:
    pass


class FakeRouter:
    """What of a router has to do with the others."""

    def __init__(self, store: Store | None, name: str) -> None:
        self.peers = Peers(Presence(name))
        self.channel = None if store is None else Breakable(store)
        if self.channel is not None:
            self.peers.join(self.channel)
        self.pool = WorkerPool(LeastInflight())
        self.door = OpenDoor(self.pool)
        self.members = FleetMembership(self.pool, self.door, self.peers)

    @property
    def urls(self) -> list[str]:
        return [worker.url for worker in self.pool.list()]

    async def start(self, urls: Sequence[str] = ()) -> None:
        await self.peers.start()
        await self.members.begin(urls)
        await self.peers.go_live()


@asynccontextmanager
async def routers(count: int, store: Store | None = None, urls: Sequence[str] = ()) -> AsyncIterator[list[FakeRouter]]:
    store = store or DictionaryStore()
    async with AsyncExitStack() as stack:
        found = []
        for number in range(count):
            one = FakeRouter(store, f"router-{number}")
            await one.start(urls)
            stack.push_async_callback(one.peers.close)
            found.append(one)
        yield found
