"""The logs of a store, what routers announce, and waiting for news."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from heapq import merge
from itertools import islice
from time import monotonic
from typing import Final

from middleware_hub.store.protocol import LogInfo
from middleware_hub.store.records import Event, decode_event
from middleware_hub.store.redis.connection import Command
from middleware_hub.store.redis.keys import Keys, encoded
from middleware_hub.store.redis.preparing import TRY_SIZE
from middleware_hub.store.redis.scripts import ANNOUNCE, ANNOUNCED, FORGET_LOG, LOG_END, READ_LOG, TRIM
from middleware_hub.store.redis.servers import Servers

_LOOK_EVERY: Final = 1.0
"""Seconds after which a log is read without a notification: one may be lost when a connection breaks."""
_MOST_WAITED_FOR: Final = 1_000
_DELETED: Final = 2
_TRIMMED: Final = 1_000
"""Events that one command forgets."""


class Logs:
    """Reads logs, and waits for them to grow."""

    def __init__(self, servers: Servers, keys: Keys, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ahead = 0.0  # seconds by which the store's clock is ahead of this one
        self._servers = servers
        self._keys = keys
        self._news: dict[bytes, asyncio.Event] = {}

    async def read(self, log: str, after: int, limit: int) -> list[Event]:
        command = READ_LOG.of([self._keys.log(log)], [after, limit])
        ((first, bodies),) = await self._servers.read([command])
        return [decode_event(log, number, body[TRY_SIZE:]) for number, body in enumerate(bodies, first)]

    async def ends(self, logs: Sequence[str]) -> list[LogInfo]:
        """Return the ends of logs; a missing log has number 0."""
        replies = await self._servers.read([self.end_of(log) for log in logs])
        return [LogInfo(log, last, closed) for log, (last, closed, _) in zip(logs, replies, strict=True)]

    def end_of(self, log: str) -> Command:
        return LOG_END.of([self._keys.log(log)], [])

    async def list(self, prefix: str, after: str, limit: int) -> list[LogInfo]:
        """Return logs in the order of their keys, see `Store.logs`."""
        begin, behind = encoded(prefix), encoded(after)
        low = b"(" + behind if behind >= begin else b"[" + begin
        high = b"(" + begin + b"\xff"  # a byte that no text contains
        commands: list[Command] = [("ZRANGEBYLEX", index, low, high, "LIMIT", 0, limit) for index in self._keys.indexes]
        names = [
            name.decode("utf-8", "surrogatepass") for name in islice(merge(*await self._servers.read(commands)), limit)
        ]
        return [info for info in await self.ends(names) if info.last]

    async def wait(self, log: str, after: int, seconds: float) -> int:
        """Return the number of a log's last event as soon as it is greater than `after`, or when the time is up."""
        end = monotonic() + seconds
        key = self._keys.log(log)
        while True:
            news = self._news.get(key)
            if news is None:
                if len(self._news) >= _MOST_WAITED_FOR:
                    self.close()  # the waiters look again
                news = self._news[key] = asyncio.Event()
            await self._servers.listen(key, self._tell)
            (info,) = await self.ends([log])
            left = end - monotonic()
            if info.last > after or left <= 0:
                return info.last
            try:
                async with asyncio.timeout(min(left, _LOOK_EVERY)):
                    await news.wait()
            except TimeoutError:
                pass

    def close(self) -> None:
        """Wake all waiters."""
        for key in list(self._news):
            self._tell(key)

    def _tell(self, key: bytes) -> None:
        news = self._news.pop(key, None)
        if news is not None:
            news.set()

    async def trim(self, log: str, before: int, *, dead: bool = False) -> tuple[int, int]:
        """Forget the events before a number; return how many, and the bytes that are freed."""
        command = TRIM.of([self._keys.log(log)], [before, _TRIMMED, "1" if dead else "0"])
        events = size = 0
        while True:
            ((count, given),) = await self._servers.write([command])
            events, size = events + count, size + given
            if count < _TRIMMED:
                if size:
                    await self._servers.write([("HINCRBY", self._keys.counters, "bytes", -size)])
                return events, size

    async def forget(self, logs: Sequence[str]) -> int:
        """Forget those of these logs that are deleted, and return how many."""
        keys, servers = self._keys, self._servers
        dead = [info.log for info in await self.ends(list(dict.fromkeys(logs))) if info.closed >= _DELETED]
        lists = [[keys.index(log), keys.dead(log)] for log in dead]
        if not servers.together:  # a log that is not listed is only unused space if this process ends now
            await servers.write(
                [("ZREM", one, encoded(log)) for log, both in zip(dead, lists, strict=True) for one in both]
            )
        commands = [
            FORGET_LOG.of([keys.log(log), *((*both, keys.counters) if servers.together else ())], [encoded(log)])
            for log, both in zip(dead, lists, strict=True)
        ]
        sizes = await servers.write(commands)
        if not servers.together and sum(sizes):
            await servers.write([("HINCRBY", keys.counters, "bytes", -sum(sizes))])
        return sum(size > 0 for size in sizes)

    async def announce(self, name: str, data: bytes, seconds: float) -> None:
        command = ANNOUNCE.of([self._keys.announced], [encoded(name), data, round(1000 * seconds)])
        (milliseconds,) = await self._servers.write([command])
        self._compare(milliseconds)

    async def announced(self, prefix: str) -> Mapping[str, bytes]:
        ((milliseconds, *flat),) = await self._servers.write([ANNOUNCED.of([self._keys.announced], [])])
        self._compare(milliseconds)
        found = {name.decode("utf-8", "surrogatepass"): data for name, data in zip(flat[::2], flat[1::2], strict=True)}
        return {name: data for name, data in found.items() if name.startswith(prefix)}

    def _compare(self, milliseconds: int) -> None:
        self._ahead = milliseconds / 1000 - self._clock()

    def now(self) -> float:
        """Return the time by the store's clock, in seconds since 1970."""
        return self._clock() + self._ahead
