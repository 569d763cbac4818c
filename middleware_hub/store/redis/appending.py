"""A group of batches as one call of the script that appends them, see `append.lua`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from middleware_hub.store.errors import (
    ClosedLogError,
    ConflictingRecordError,
    LogMovedError,
    MissingRecordError,
    StoreError,
    StoreUnreachableError,
)
from middleware_hub.store.records import Mark
from middleware_hub.store.redis.connection import Command
from middleware_hub.store.redis.keys import CROWD, Keys, encoded
from middleware_hub.store.redis.preparing import MOST, Answers, Part, SortedBatch, pack_mark
from middleware_hub.store.redis.scripts import APPEND
from middleware_hub.store.redis.servers import Servers

Arguments = list[bytes | str | int]
_SYNC_MS: Final = 3_000


class AppendCommand:
    """Packs batches, and reads their results."""

    def __init__(self, keys: Keys, batches: Sequence[SortedBatch], marks: Iterable[Mark]) -> None:
        self._batches = batches
        self._names = keys
        self._keys: list[bytes] = [keys.counters]
        self._arguments: Arguments = [len(batches)]
        for batch in batches:
            self._pack(batch)
        some = list(marks)
        self._arguments.append(len(some))
        for mark in some:
            self._keys += (keys.root(mark.root), keys.order(mark.root))
            self._arguments += (mark.root, pack_mark(mark))

    def command(self, *, again: bool) -> Command:
        """Return the command that appends all. `again`: an earlier command may have been executed."""
        return APPEND.of(self._keys, ["1", "1" if again else "0", CROWD, *self._arguments])

    def _pack(self, batch: SortedBatch) -> None:
        names, keys, arguments = self._names, self._keys, self._arguments
        arguments.append(len(batch.parts))
        at = {}
        for number, part in enumerate(batch.parts.values(), 1):
            at[part.root] = number
            keys += (names.root(part.root), names.order(part.root))
            pack_part(part, arguments)
            if part.blobs:
                keys.append(names.blobs(part.root))
        arguments.append(len(batch.places))
        for place, root, reference in batch.places:
            main, more, field = names.places(place)
            keys += (main, more)
            arguments += (at[root], field, reference, MOST[place.kind])
        arguments.append(len(batch.events))
        for event, body in batch.events:
            keys += (names.log(event.log), names.index(event.log), names.dead(event.log))
            expected = -1 if event.expected is None else event.expected
            arguments += (encoded(event.log), event.closes, expected, body)

    def answers(self, reply: Sequence[Any]) -> Answers:
        """Return, for each batch, the numbers of its events or why it was refused."""
        return [
            answer[1] if answer[0] == b"ok" else refusal(batch, answer)
            for batch, answer in zip(self._batches, reply[0], strict=True)
        ]


class Appender:
    """Appends groups to a server that has all keys.

    Args:
        synced: whether to wait until a group is on the server's disk.
        replicas: how many replicas to wait for.
    """

    def __init__(self, servers: Servers, keys: Keys, *, synced: bool, replicas: int) -> None:
        self._servers = servers
        self._keys = keys
        self._synced = synced
        self._replicas = replicas
        self._waits: list[Command] = []
        if synced:
            self._waits.append(("WAITAOF", 1, 0, _SYNC_MS))
        if replicas:
            self._waits.append(("WAIT", replicas, _SYNC_MS))

    async def commit(self, batches: Sequence[SortedBatch], marks: Sequence[Mark]) -> Answers:
        """Append batches and marks; return the result of each batch. Raises StoreUnreachableError: perhaps all is appended."""
        group = AppendCommand(self._keys, batches, marks)
        first, again = group.command(again=False), group.command(again=True)
        replies = await self._servers.write([first, *self._waits], [again, *self._waits])
        if self._replicas and replies[-1] < self._replicas:
            raise StoreUnreachableError(
                f"only {replies[-1]} of {self._replicas} replicas of the store have what was appended: are they there?"
            )
        if self._synced and not replies[1][0]:
            raise StoreUnreachableError(
                f"the store's disk has taken nothing for {_SYNC_MS / 1000:g} seconds: look at its log"
            )
        return group.answers(replies[0])


def pack_part(part: Part, arguments: Arguments) -> None:
    """Add what the script reads of one root."""
    arguments += (part.root, part.generation, pack_mark(part.mark), len(part.records))
    for record, body, cost in part.records:
        links = record.links
        arguments += (record.id, "1" if record.sampled else "0", cost, body, len(links), *links)
    arguments.append(len(part.blobs))
    for owner, name, blob in part.blobs:
        arguments += (owner, encoded(name), blob)


def refusal(batch: SortedBatch, answer: Sequence[Any]) -> StoreError:
    """Return the error that says why a batch was refused."""
    why, *rest = answer
    if why == b"missing":
        return MissingRecordError(tuple(dict.fromkeys(rest)))
    if why == b"conflict":
        return ConflictingRecordError(f"record {rest[0].hex()} is stored with another content: the first one is kept")
    event = batch.events[rest[0] - 1][0]
    if why == b"closed":
        return ClosedLogError(f"the log {event.log!r} is closed: {event.kind!r} is refused")
    return LogMovedError(event.log, rest[1])
