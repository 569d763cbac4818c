"""Subscriptions to the KV cache events of workers.

There is one subscription per cache: a worker has one for each data-parallel rank. Batches are numbered, so a missed batch
shows. The subscription then asks the worker to replay from that number on. If the worker offers no replay, or no longer has
the batch, the cache counts as empty from there on: a missed eviction never leaves a block that is wrongly believed to be
cached.

         connected                     batch n, and n is next
      ----------------> replay from 0  ----------------------> apply, next = n + 1
         disconnected                  n > next: replay from next; still missing: start over, incomplete
      ----------------> start over     n < next: known, unless it is later than the last: another process, start over

A subscription that fails, because of a socket or of something else that publishes at its port, starts over after a pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, field

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from router.engines.form.kv_events import (
    END_OF_REPLAY,
    AllBlocksCleared,
    KvBatch,
    KvSource,
    UnreadableBatchError,
    parts,
    read_batch,
)
from router.kv_cache.index import KvIndex
from router.workers.worker import KvFollowing, KvState

logger = logging.getLogger(__name__)

_QUEUED = 10_000
"""Batches that may wait while a replay is read. Further ones are lost, and replayed later."""

_BLOCKS_PER_STEP = 1_000
"""Blocks that are applied before other tasks get their turn: a millisecond or two."""

_EVENT = 8
"""An event costs as much as this many of its blocks. By default, SGLang's workers have a block and an event for each token."""

_HEARTBEAT_MS = 5_000
"""Heartbeats detect a worker whose machine is gone: it does not close its connection."""


FIRST_WAIT_SECONDS = 0.5
LONGEST_WAIT_SECONDS = 60.0
"""The pauses before a failed subscription starts over: each is twice the one before."""
STEADY_SECONDS = 60.0
"""A subscription that held for so long starts over as after a first failure."""
WARN_SECONDS = 60.0
"""One batch that cannot be read is logged in this time. A worker may publish thousands of them in a second."""


class KvSubscriptions:
    """The subscriptions of a fleet. Needs a running event loop.

    Attributes:
        counts: `batches`; requested `replays` and `replay_timeouts`; `gaps` in the numbers; `lost`: times that a cache had to
            count as empty; `restarts` and `disconnects` of workers; `unreadable` batches; times that a subscription `failed`.
    """

    def __init__(self, index: KvIndex, *, replay_seconds: float = 5.0) -> None:
        """`replay_seconds`: how long a worker may be silent during a replay."""
        self.counts: Counter[str] = Counter()
        self._index = index
        self._replay_seconds = replay_seconds
        self._context: zmq.asyncio.Context | None = None
        self._sources: dict[str, KvSource] = {}
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}
        self._ranks: dict[str, list[_Subscription]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def start(self, url: str, source: KvSource, targets: int = 1) -> None:
        """Follow a worker that is so many targets: each has a cache if there are as many caches, else one has all.

        With the source that it already has, do nothing; with another one, start over.
        """
        separate = targets > 1 and source.ranks == targets
        if self._sources.get(url) == source and self._index.is_separate(url) is separate:
            return
        self.stop(url)
        if self._context is None:
            self._context = zmq.asyncio.Context()
            # A cache needs three sockets, and the default limit is 1,023.
            self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        self._sources[url] = source
        self._index.separate(url, separate=separate)
        self._tasks[url] = []
        self._ranks[url] = []
        for rank in range(source.ranks):
            self._index.reset(url, rank, complete=False)
            subscription = _Subscription(
                self._context, url, rank, source, self._index, self.counts, self._replay_seconds
            )
            self._ranks[url].append(subscription)
            # In a fresh context, without the request id of the call that added the worker.
            task = asyncio.create_task(
                subscription.run(), name=f"KV events of {url}, rank {rank}", context=contextvars.Context()
            )
            self._tasks[url].append(task)

    def stop(self, url: str) -> None:
        """Stop following a worker and forget its cache at once. A worker that is not followed is no error."""
        self._sources.pop(url, None)
        self._ranks.pop(url, None)
        for task in self._tasks.pop(url, ()):
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        self._index.forget(url)

    @property
    def urls(self) -> Set[str]:
        """Return the workers that are followed, connected or not."""
        return self._sources.keys()

    def following(self, url: str) -> KvFollowing | None:
        """Return how far it is with a worker; None if it does not follow it."""
        ranks = self._ranks.get(url)
        if not ranks:
            return None
        worst = min(ranks, key=lambda one: list(KvState).index(one.state))
        return KvFollowing(worst.state, worst.error)

    async def close(self) -> None:
        """Stop following all workers, and wait until the sockets are closed."""
        for url in list(self._sources):
            self.stop(url)
        await asyncio.gather(*self._ending, return_exceptions=True)
        if self._context is not None:
            self._context.term()
            self._context = None


@dataclass
class _Subscription:
    """The subscription to one cache of one worker."""

    context: zmq.asyncio.Context
    url: str
    rank: int
    source: KvSource
    index: KvIndex
    counts: Counter[str]
    replay_seconds: float
    next: int = 0
    last: float = 0.0  # the last batch's time, by the worker's clock
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # a batch waits until the batches before it are replayed
    state: KvState = KvState.CONNECTING
    error: str | None = None
    warned: float | None = None  # when a batch that could not be read was logged, by the loop's clock

    async def run(self) -> None:
        """Follow the cache until cancelled, and start over after each failure."""
        clock, wait = asyncio.get_running_loop().time, 0.0
        while True:
            begun = clock()
            try:
                await self._follow()
            except* Exception as group:
                wait = 0.0 if clock() - begun > STEADY_SECONDS else wait
                wait = min(max(2 * wait, FIRST_WAIT_SECONDS), LONGEST_WAIT_SECONDS)
                logger.exception(
                    "the KV events of %s, rank %d, could not be followed; next attempt in %g s",
                    self.url,
                    self.rank,
                    wait,
                )
                error = group.exceptions[0]
                self.counts["failed"] += 1
                self.state, self.error = KvState.FAILED, f"{type(error).__name__}: {error}"
                self._start_over()
            await asyncio.sleep(wait)

    async def _follow(self) -> None:
        """Follow the cache until cancelled, or until it fails."""
        with contextlib.ExitStack() as sockets:
            socket = self._socket(zmq.SUB)
            sockets.callback(socket.close, linger=0)
            monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            sockets.callback(monitor.close, linger=0)
            sockets.callback(socket.disable_monitor)
            socket.rcvhwm = _QUEUED
            socket.heartbeat_ivl = _HEARTBEAT_MS
            socket.heartbeat_timeout = 3 * _HEARTBEAT_MS
            socket.subscribe(self.source.topic)
            socket.connect(self.source.endpoint(self.rank))
            async with asyncio.TaskGroup() as both:
                both.create_task(self._listen(socket))
                both.create_task(self._watch(monitor))

    async def _listen(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            async with self.turn:
                await self._take(frames)
            await asyncio.sleep(0)  # receiving from a socket that has more already never suspends

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        while True:
            event = await recv_monitor_message(monitor)
            async with self.turn:
                if event["event"] == zmq.EVENT_DISCONNECTED:
                    logger.info("the KV events of %s, rank %d, are disconnected", self.url, self.rank)
                    self.counts["disconnects"] += 1
                    self.state = KvState.CONNECTING
                    self._start_over()
                else:
                    await self._catch_up()
                    self.state, self.error = KvState.CONNECTED, None

    async def _take(self, frames: list[bytes]) -> None:
        number = int.from_bytes(frames[-2], "big") if len(frames) > 1 else 0
        batch = self._read(number, frames[-1])
        if batch is None:
            return
        if number < self.next:
            if batch.ts <= self.last:
                return  # a replay already delivered it
            self.counts["restarts"] += 1
            self._start_over()
        if number > self.next:
            self.counts["gaps"] += 1
            await self._catch_up()
            if number < self.next:
                return
        await self._apply(number, batch)

    async def _catch_up(self) -> None:
        """Replay everything from the next batch on, and repeat if some of it was dropped on the way."""
        endpoint = self.source.replay_endpoint(self.rank)
        before = -1
        while endpoint is not None and before < self.next:
            before = self.next
            if await self._replay(endpoint):
                return

    async def _replay(self, endpoint: str) -> bool:
        """Replay once. Return whether the worker has nothing more to replay."""
        self.counts["replays"] += 1
        # A REQ socket would add the empty frame itself, but accept only one reply.
        socket = self._socket(zmq.DEALER)
        try:
            socket.rcvhwm = 0
            socket.connect(endpoint)
            await socket.send_multipart([b"", self.next.to_bytes(8, "big")])
            first = True
            while True:
                async with asyncio.timeout(self.replay_seconds):
                    frames = await socket.recv_multipart()
                if frames[-2] == END_OF_REPLAY:
                    if self.next == 0:  # it has published nothing yet, so nothing was missed
                        self.index.reset(self.url, self.rank, complete=True)
                    return True
                number = int.from_bytes(frames[-2], "big")
                if number > self.next and not first:
                    return False
                if number >= self.next and (batch := self._read(number, frames[-1])) is not None:
                    await self._apply(number, batch)
                first = False
                await asyncio.sleep(0)  # see `_listen`
        except TimeoutError:
            logger.warning("worker %s does not answer at %s", self.url, endpoint)
            self.counts["replay_timeouts"] += 1
            return True
        finally:
            socket.close(linger=0)

    def _read(self, number: int, payload: bytes) -> KvBatch | None:
        try:
            batch = read_batch(payload)
        except UnreadableBatchError as error:
            now = asyncio.get_running_loop().time()
            if self.warned is None or now - self.warned > WARN_SECONDS:
                self.warned = now
                logger.warning("worker %s, rank %d: %s", self.url, self.rank, error)
            self.error = str(error)
            self.counts["unreadable"] += 1
            self._start_over()
            self.next = number + 1
            return None
        self.error = None
        return batch

    async def _apply(self, number: int, batch: KvBatch) -> None:
        if number == 0:
            self.index.reset(self.url, self.rank, complete=True)
        elif number > self.next:
            self.counts["lost"] += 1
            self._start_over()
        self.next = number + 1
        self.last = batch.ts
        self.counts["batches"] += 1
        done = 0
        for event in batch.events:
            for part in parts(event, _BLOCKS_PER_STEP):
                self.index.apply(self.url, (part,), self.rank)
                done += _EVENT if isinstance(part, AllBlocksCleared) else _EVENT + len(part.block_hashes)
                if done >= _BLOCKS_PER_STEP:
                    done = 0
                    await asyncio.sleep(0)

    def _start_over(self) -> None:
        self.next = 0
        self.last = 0.0
        self.index.reset(self.url, self.rank, complete=False)

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        socket: zmq.asyncio.Socket = self.context.socket(kind)
        socket.ipv6 = "[" in self.source.host
        return socket
