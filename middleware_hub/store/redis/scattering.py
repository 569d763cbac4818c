"""A group of batches in a cluster, where no script has more than the keys of one slot.

    bodies, by root --> places --> events --> counters --> acknowledged

A partial write leads to nothing that is missing: a place is written after its record. A caller that is told of the failure
tries again, and completes the write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from middleware_hub.store.errors import ClosedLogError, LogMovedError, StoreError
from middleware_hub.store.records import Mark
from middleware_hub.store.redis.appending import Arguments, pack_part, refusal
from middleware_hub.store.redis.connection import Command
from middleware_hub.store.redis.keys import CROWD, Keys, encoded
from middleware_hub.store.redis.preparing import MOST, Answers, SortedBatch, pack_mark, score
from middleware_hub.store.redis.scripts import APPEND, LOG_END
from middleware_hub.store.redis.servers import Servers

_DELETED: Final = 2
Pair = tuple[Command, Command]
"""A command, and the command to send in its place if it may have been executed already."""


class Scatterer:
    """Appends groups to a cluster."""

    def __init__(self, servers: Servers, keys: Keys) -> None:
        self._servers = servers
        self._keys = keys

    async def commit(self, batches: Sequence[SortedBatch], marks: Sequence[Mark]) -> Answers:
        """Append batches and marks; return the result of each batch. Raises StoreUnreachableError: perhaps all is appended."""
        state = _State([None] * len(batches))
        await self._check_events(batches, state)
        written = await self._bodies(batches, state)
        await self._places(batches, state, written)
        await self._marks(marks, state)
        numbers = await self._events(batches, state)
        await self._count(state)
        return [numbers[at] if refused is None else refused for at, refused in enumerate(state.refused)]

    async def _write(self, pairs: Sequence[Pair]) -> list[Any]:
        return await self._servers.write([one for one, _ in pairs], [again for _, again in pairs]) if pairs else []

    async def _check_events(self, batches: Sequence[SortedBatch], state: _State) -> None:
        """Refuse what the logs would refuse now, before anything is written; list new logs."""
        logs = list(dict.fromkeys(event.log for batch in batches for event, _ in batch.events))
        if not logs:
            return
        replies = await self._servers.read([LOG_END.of([self._keys.log(log)], []) for log in logs])
        ends = {log: (last, closed) for log, (last, closed, _) in zip(logs, replies, strict=True)}
        for at, batch in enumerate(batches):
            refused = _refused(batch, dict(ends))
            # A batch that was appended before may find its own events.
            if refused is not None and not (batch.parts and await self._there(batch)):
                state.refused[at] = refused
        taken = (batch for batch, refused in zip(batches, state.refused, strict=True) if refused is None)
        new = {event.log for batch in taken for event, _ in batch.events if not ends[event.log][0]}
        await self._servers.write([("ZADD", self._keys.index(log), 0, encoded(log)) for log in new])

    async def _there(self, batch: SortedBatch) -> bool:
        """Return whether any event of a batch is among the last ones of its log: then the batch was begun before."""
        commands: list[Command] = [("LRANGE", self._keys.log(event.log), -1_000, -1) for event, _ in batch.events]
        replies = await self._servers.read(commands)
        return any(body in last for (_, body), last in zip(batch.events, replies, strict=True))

    async def _bodies(self, batches: Sequence[SortedBatch], state: _State) -> dict[tuple[int, bytes], bytes]:
        """Write records, blobs and marks of roots; return the generation of each root."""
        keys, pairs, owners = self._keys, list[Pair](), []
        for at, batch in enumerate(batches):
            for part in batch.parts.values() if state.refused[at] is None else ():
                arguments: Arguments = [1, 1]
                pack_part(part, arguments)
                arguments += (0, 0, 0)
                pairs.append(_pair([keys.root(part.root), *([keys.blobs(part.root)] if part.blobs else [])], arguments))
                owners.append((at, part.root))
        generations = {}
        for (at, root), reply in zip(owners, await self._write(pairs), strict=True):
            answer = reply[0][0]
            if answer[0] == b"ok":
                ((generation, mark, count, size),) = answer[2]
                generations[at, root] = generation
                state.records += count
                state.bytes += size
                if mark:
                    state.order[root] = mark
            else:
                state.refused[at] = state.refused[at] or refusal(batches[at], answer)
        return generations

    async def _places(
        self, batches: Sequence[SortedBatch], state: _State, generations: dict[tuple[int, bytes], bytes]
    ) -> None:
        pairs = []
        for at, batch in enumerate(batches):
            for place, root, reference in batch.places if state.refused[at] is None else ():
                main, more, field = self._keys.places(place)
                arguments: Arguments = [1, 0, 1, 0, field, generations[at, root] + reference, MOST[place.kind], 0, 0]
                pairs.append(_pair([main, more], arguments))
        await self._write(pairs)

    async def _marks(self, marks: Sequence[Mark], state: _State) -> None:
        pairs = [_pair([self._keys.root(mark.root)], [0, 1, mark.root, pack_mark(mark)]) for mark in marks]
        for mark, reply in zip(marks, await self._write(pairs), strict=True):
            if reply[1][0]:
                state.order[mark.root] = reply[1][0]

    async def _events(self, batches: Sequence[SortedBatch], state: _State) -> list[list[int]]:
        """Append the events; return their numbers.

        Those that a log may refuse come first: if it does, the other events of their batch are not written.
        """
        numbers = [[0] * len(batch.events) for batch in batches]
        for refusable in (True, False):
            pairs, owners = list[Pair](), []
            for at, batch in enumerate(batches):
                for number, (event, body) in enumerate(batch.events if state.refused[at] is None else ()):
                    if (event.expected is not None) is refusable:
                        expected = -1 if event.expected is None else event.expected
                        arguments: Arguments = [1, 0, 0, 1, encoded(event.log), event.closes, expected, body, 0]
                        pairs.append(_pair([self._keys.log(event.log)], arguments, doubt=bool(batch.parts)))
                        owners.append((at, number))
            for (at, number), reply in zip(owners, await self._write(pairs), strict=True):
                answer = reply[0][0]
                state.bytes += reply[2]
                if answer[0] == b"ok":
                    (numbers[at][number],) = answer[1]
                    event = batches[at].events[number][0]
                    if event.closes >= _DELETED:
                        state.dead[event.log] = None
                else:
                    state.refused[at] = state.refused[at] or refusal(batches[at], [answer[0], number + 1, *answer[2:]])
        return numbers

    async def _count(self, state: _State) -> None:
        commands: list[Command] = [
            ("ZADD", self._keys.order(root), score(mark), root) for root, mark in state.order.items()
        ]
        commands += [("ZADD", self._keys.dead(log), 0, encoded(log)) for log in state.dead]
        if state.records:
            commands.append(("HINCRBY", self._keys.counters, "records", state.records))
        if state.bytes:
            commands.append(("HINCRBY", self._keys.counters, "bytes", state.bytes))
        await self._servers.write(commands)


class _State:
    """The state of a group so far."""

    def __init__(self, refused: list[StoreError | None]) -> None:
        self.refused = refused
        self.records = self.bytes = 0
        self.order: dict[bytes, bytes] = {}
        """The mark of each root."""
        self.dead: dict[str, None] = {}
        """Logs that were deleted."""


def _refused(batch: SortedBatch, ends: dict[str, tuple[int, int]]) -> StoreError | None:
    """Return why logs with these ends refuse the events of a batch, if it is certain that they do."""
    for event, _ in batch.events:
        last, closed = ends[event.log]
        if closed >= max(1, event.closes):
            return ClosedLogError(f"the log {event.log!r} is closed: {event.kind!r} is refused")
        if event.expected is not None and event.expected < last:
            return LogMovedError(event.log, last)
        ends[event.log] = last + 1, max(closed, event.closes)
    return None


def _pair(keys: list[bytes], arguments: Arguments, *, doubt: bool = False) -> Pair:
    """Return the command that appends the keys of one slot. `doubt`: they may have been appended before."""
    first = APPEND.of(keys, ["0", "1" if doubt else "0", CROWD, *arguments])
    return first, APPEND.of(keys, ["0", "1", CROWD, *arguments])
