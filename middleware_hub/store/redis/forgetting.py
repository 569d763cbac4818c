"""Forgets whole conversations while others use the store.

1. all records of a conversation are read, and where they are entered is computed from them
2. the conversation is removed atomically, if no router has appended to it since
3. files of media that only it named are removed, see `media`
4. its places are removed: each reference names the life of the root that it belongs to, so what a router appends again
   after 2 stays. If this process dies during 4, the places that are left lead nowhere, and no look-up finds anything there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from middleware_hub.store.look_up import complete
from middleware_hub.store.protocol import Forgotten
from middleware_hub.store.records import SpanRecord
from middleware_hub.store.redis.connection import Command
from middleware_hub.store.redis.keys import Keys
from middleware_hub.store.redis.logs import Logs
from middleware_hub.store.redis.media import RedisMedia, names_in
from middleware_hub.store.redis.preparing import Entered, entries, pack_mark, score
from middleware_hub.store.redis.reading import Reading, StoredConversation
from middleware_hub.store.redis.scripts import FORGET, LEAVE
from middleware_hub.store.redis.servers import Servers
from middleware_hub.store.retracing import Retracer

_PLANNED: Final = 64
"""Conversations from which the next to be forgotten are chosen."""
_AT_ONCE: Final = 8
"""Conversations that are read at once."""
FORGETTING: Final = "-inf"
"""The place of a conversation of a cluster in the order of forgetting while it is removed."""
_PLACES: Final = 200
"""Places that one command removes: Redis does nothing else meanwhile."""


class Forgetting:
    """See the top of this file."""

    def __init__(self, servers: Servers, keys: Keys, reading: Reading, logs: Logs, media: RedisMedia) -> None:
        self._servers = servers
        self._keys = keys
        self._reading = reading
        self._logs = logs
        self._media = media

    async def forget(self, max_bytes: int) -> Forgotten:
        """Forget the events of deleted logs, then conversations, until at most `max_bytes` bytes are used."""
        events, done = 0, Forgotten()
        while await self._excess(max_bytes) > 0:
            count = await self._forget_events()
            if not count:
                break
            events += count
        while (excess := await self._excess(max_bytes)) > 0:
            some = await self._forget_next(excess)
            if some is None:
                break
            done = done.plus(some)
        return done.plus(Forgotten(events=events))

    async def _excess(self, max_bytes: int) -> int:
        *_, size = await self._reading.sizes()
        return size - max_bytes

    async def _forget_events(self) -> int:
        """Forget the events of some deleted logs except the last; return how many."""
        forgotten = 0
        for dead in self._keys.deads:
            (names,) = await self._servers.read([("ZRANGE", dead, 0, _PLANNED - 1)])
            for name in names:
                log = name.decode("utf-8", "surrogatepass")
                (info,) = await self._logs.ends([log])
                count, _ = await self._logs.trim(log, info.last, dead=True)
                await self._servers.write([("ZREM", dead, name)])
                forgotten += count
            if names:
                break
        return forgotten

    async def _forget_next(self, excess: int) -> Forgotten | None:
        """Forget some of the next conversations, of about `excess` bytes; None if there is none."""
        done, left = Forgotten(), excess
        order = await self._next()
        for at in range(0, len(order), _AT_ONCE):
            for one in await self._reading.whole(order[at : at + _AT_ONCE]):
                if left <= 0:
                    return done
                gone, size = await self._forget_one(one)
                done, left = done.plus(gone), left - size
        return done if order and left < excess else None

    async def _next(self) -> list[bytes]:
        """Return the conversations that are forgotten next, in order."""
        commands: list[Command] = [("ZRANGE", order, 0, _PLANNED - 1) for order in self._keys.orders]
        roots = [root for some in await self._servers.read(commands) for root in some]
        marks = await self._reading.marks(roots)
        gone = [root for root in roots if root not in marks]
        if gone:
            await self._servers.write([("ZREM", self._keys.order(root), root) for root in gone])
        # The sets are approximate: they have microseconds, and in a cluster perhaps another order of writing.
        found = sorted(marks.values(), key=lambda mark: (not mark.retrieved, mark.tick))
        return [mark.root for mark in found[:_PLANNED]]

    async def forget_roots(self, roots: Sequence[bytes]) -> Forgotten:
        """Forget these conversations. A conversation that grows meanwhile is kept."""
        done, some = Forgotten(), list(dict.fromkeys(roots))
        for at in range(0, len(some), _AT_ONCE):
            for one in await self._reading.whole(some[at : at + _AT_ONCE]):
                gone, _ = await self._forget_one(one)
                done = done.plus(gone)
        return done

    async def _forget_one(self, one: StoredConversation) -> tuple[Forgotten, int]:
        """Forget a conversation that was read; return what is gone, and its bytes."""
        keys = self._keys
        names = [keys.root(one.root), keys.blobs(one.root)]
        if self._servers.together:
            names += (keys.order(one.root), keys.counters)
        else:  # if this process ends before the last write, `verify` must not take the conversation for a lost one
            await self._rank(one.root, FORGETTING)
        (size,) = await self._servers.write([FORGET.of(names, [one.size, one.generation, one.root])])
        if size < 0:
            if not self._servers.together:
                for mark in (await self._reading.marks([one.root])).values():
                    await self._rank(one.root, score(pack_mark(mark)))
            return Forgotten(), 0
        if not self._servers.together:
            await self._servers.write(
                [
                    ("ZREM", keys.order(one.root), one.root),
                    ("HINCRBY", keys.counters, "records", -one.size),
                    ("HINCRBY", keys.counters, "bytes", -size),
                ]
            )
        records = one.records()
        size += await self._media.release(names_in(records.values()))
        await self._leave(one.generation, entered(records))
        kept = int(one.mark.retrieved)
        return Forgotten(kept, 1 - kept, one.size, 0, (one.mark.stamp,)), size

    async def _rank(self, root: bytes, place: int | str) -> None:
        """Change the place of a conversation in the order of forgetting, if it is there."""
        await self._servers.write([("ZADD", self._keys.order(root), "XX", place, root)])

    async def _leave(self, generation: bytes, places: Sequence[Entered]) -> None:
        commands: list[Command] = []
        size = _PLACES if self._servers.together else 1
        for at in range(0, len(places), size):
            names: list[bytes] = []
            arguments: list[bytes | str | int] = []
            for place, _, reference in places[at : at + size]:
                main, more, field = self._keys.places(place)
                names += (main, more)
                arguments += (field, generation + reference)
            commands.append(LEAVE.of(names, arguments))
        at_once = _PLACES // size
        for at in range(0, len(commands), at_once):
            await self._servers.write(commands[at : at + at_once])


def entered(records: Mapping[bytes, SpanRecord]) -> list[Entered]:
    """Return where the records of a conversation are entered; what builds on records that cannot be read is left out."""
    retracer = Retracer(records.get)
    found = []
    for record in complete(records.values(), ())[0]:
        if record.findable:
            found += entries(record, retracer.places(record) or [])
    return found
