"""Following what workers say about their KV caches.

A subscription per cache (a worker has one for each data-parallel rank). Batches are numbered, so a missed one shows: then the
worker is asked for what it still has from that one on. Where it does not offer that, or has too little, the cache counts as
empty from there on. Nothing is ever believed to be cached because an eviction was missed.

         connected                     batch n, and n is next
      ----------------> replay from 0  ----------------------> apply, next = n + 1
         gone                          n > next: replay from next; still missing: begin anew, incomplete
      ----------------> begin anew     n < next: known, if it is no later than the last; else another process: begin anew
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections import Counter

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from router.engines.sglang.kv_events import END_OF_REPLAY, KvBatch, KvSource, UnreadableBatchError, parts, read_batch
from router.kv_cache.index import KvIndex

logger = logging.getLogger(__name__)

_QUEUED = 10_000
"""Batches that may wait here while a replay is read. Further ones are lost, and asked for again."""

_AT_ONCE = 1_000
"""Blocks that the index takes before requests get their turn: a millisecond or two."""

_HEARTBEAT_MS = 5_000
"""A worker whose machine is gone does not close its connection."""


class KvSubscriptions:
    """The subscriptions of a fleet. Needs a running event loop.

    Attributes:
        counts: `batches`; `replays` that were asked for, `replay_timeouts`; `gaps` in the numbers; `lost`: times that a cache
            had to be taken for empty; `restarts` and `disconnects` of workers; `unreadable` batches; `failed` subscriptions.
    """

    def __init__(self, index: KvIndex, *, replay_seconds: float = 5.0) -> None:
        """`replay_seconds`: how long a worker may say nothing in the midst of a replay."""
        self.counts: Counter[str] = Counter()
        self._index = index
        self._replay_seconds = replay_seconds
        self._context: zmq.asyncio.Context | None = None
        self._sources: dict[str, KvSource] = {}
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def start(self, url: str, source: KvSource) -> None:
        """Follow a worker. Again changes nothing; with another source it begins anew."""
        if self._sources.get(url) == source:
            return
        self.stop(url)
        if self._context is None:
            self._context = zmq.asyncio.Context()
            # Three sockets per cache; the default is room for 1,023.
            self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        self._sources[url] = source
        self._tasks[url] = []
        for rank in range(source.ranks):
            self._index.reset(url, rank, complete=False)
            one = _Subscription(self._context, url, rank, source, self._index, self.counts, self._replay_seconds)
            # Not in the context of the call that added the worker: its request id is none of ours.
            task = asyncio.create_task(
                one.run(), name=f"KV events of {url}, rank {rank}", context=contextvars.Context()
            )
            self._tasks[url].append(task)

    def stop(self, url: str) -> None:
        """Follow it no more, and forget its cache, at once. One that is not followed is no error."""
        self._sources.pop(url, None)
        for task in self._tasks.pop(url, ()):
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        self._index.forget(url)

    def following(self, url: str) -> bool:
        """Whether a worker is followed: it need not be connected."""
        return url in self._sources

    async def close(self) -> None:
        """Stop them all, and wait until their sockets are closed."""
        for url in list(self._sources):
            self.stop(url)
        await asyncio.gather(*self._ending, return_exceptions=True)
        if self._context is not None:
            self._context.term()
            self._context = None


class _Subscription:
    """One cache of one worker."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        url: str,
        rank: int,
        source: KvSource,
        index: KvIndex,
        counts: Counter[str],
        replay_seconds: float,
    ) -> None:
        self._context = context
        self._url = url
        self._rank = rank
        self._source = source
        self._index = index
        self._counts = counts
        self._replay_seconds = replay_seconds
        self._next = 0
        self._last = 0.0  # when the last batch was made, by the worker's clock
        self._turn = asyncio.Lock()  # a batch waits for the replay of those before it

    async def run(self) -> None:
        """Until it is cancelled."""
        socket = self._socket(zmq.SUB)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        try:
            socket.rcvhwm = _QUEUED
            socket.heartbeat_ivl = _HEARTBEAT_MS
            socket.heartbeat_timeout = 3 * _HEARTBEAT_MS
            socket.subscribe(self._source.topic)
            socket.connect(self._source.endpoint(self._rank))
            async with asyncio.TaskGroup() as both:
                both.create_task(self._listen(socket))
                both.create_task(self._watch(monitor))
        except* Exception:
            logger.exception("the KV events of %s are no longer followed", self._url)
            self._counts["failed"] += 1
            self._index.reset(self._url, self._rank, complete=False)
        finally:
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=0)

    async def _listen(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            async with self._turn:
                await self._take(frames)
            await asyncio.sleep(0)  # a socket that has more already does not give way

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        while True:
            event = await recv_monitor_message(monitor)
            async with self._turn:
                if event["event"] == zmq.EVENT_DISCONNECTED:
                    logger.info("the KV events of %s, rank %d, have ended", self._url, self._rank)
                    self._counts["disconnects"] += 1
                    self._begin_anew()
                else:
                    await self._catch_up()

    async def _take(self, frames: list[bytes]) -> None:
        number = int.from_bytes(frames[-2], "big") if len(frames) > 1 else 0
        batch = self._read(number, frames[-1])
        if batch is None:
            return
        if number < self._next:
            if batch.ts <= self._last:
                return  # a replay has brought it
            self._counts["restarts"] += 1
            self._begin_anew()
        if number > self._next:
            self._counts["gaps"] += 1
            await self._catch_up()
            if number < self._next:
                return
        await self._apply(number, batch)

    async def _catch_up(self) -> None:
        """Ask for all from the next batch on, again if some of it was dropped on the way."""
        endpoint = self._source.replay_endpoint(self._rank)
        before = -1
        while endpoint is not None and before < self._next:
            before = self._next
            if await self._replay(endpoint):
                return

    async def _replay(self, endpoint: str) -> bool:
        """Whether there is nothing more to be had."""
        self._counts["replays"] += 1
        # A REQ socket would write the empty frame itself, and take one answer only.
        socket = self._socket(zmq.DEALER)
        try:
            socket.rcvhwm = 0
            socket.connect(endpoint)
            await socket.send_multipart([b"", self._next.to_bytes(8, "big")])
            first = True
            while True:
                async with asyncio.timeout(self._replay_seconds):
                    frames = await socket.recv_multipart()
                if frames[-2] == END_OF_REPLAY:
                    if self._next == 0:  # it has never said anything, so there is nothing to be missed
                        self._index.reset(self._url, self._rank, complete=True)
                    return True
                number = int.from_bytes(frames[-2], "big")
                if number > self._next and not first:
                    return False
                if number >= self._next and (batch := self._read(number, frames[-1])) is not None:
                    await self._apply(number, batch)
                first = False
        except TimeoutError:
            logger.warning("worker %s does not answer at %s", self._url, endpoint)
            self._counts["replay_timeouts"] += 1
            return True
        finally:
            socket.close(linger=0)

    def _read(self, number: int, payload: bytes) -> KvBatch | None:
        try:
            return read_batch(payload)
        except UnreadableBatchError as error:
            logger.warning("worker %s: %s", self._url, error)
            self._counts["unreadable"] += 1
            self._begin_anew()
            self._next = number + 1
            return None

    async def _apply(self, number: int, batch: KvBatch) -> None:
        if number == 0:
            self._index.reset(self._url, self._rank, complete=True)
        elif number > self._next:
            self._counts["lost"] += 1
            self._begin_anew()
        self._next = number + 1
        self._last = batch.ts
        self._counts["batches"] += 1
        for event in batch.events:
            for part in parts(event, _AT_ONCE):
                self._index.apply(self._url, (part,), self._rank)
                await asyncio.sleep(0)

    def _begin_anew(self) -> None:
        self._next = 0
        self._last = 0.0
        self._index.reset(self._url, self._rank, complete=False)

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        socket: zmq.asyncio.Socket = self._context.socket(kind)
        socket.ipv6 = "[" in self._source.host
        return socket
