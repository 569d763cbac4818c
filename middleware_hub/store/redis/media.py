"""Files of media in Redis: a hash for each, and a set of the conversations (roots) whose records name it.

A file and the records that name it are under several keys, which may be at several nodes. So they are not written at once, but
in an order in which each side sees what the other one does:

    append     name the file (SADD) -> write it if it is not there -> append the records -> name it again
                   -> was the name or the file gone?   write it again, and if the conversation is gone, too: forget
    forget     forget the records -> hold the file, and take the names back (SREM) -> is the conversation there again?
                   yes: name the file again
               -> let the file go, and remove it if it is unnamed

If a conversation is appended again while it is forgotten, either the append names the file after `forget` took the name back,
and writes it again; or `forget` finds the conversation, and puts the name back. Meanwhile its hold, a name that is no
conversation's, keeps others from removing the file. What a process leaves that dies on the way is a name of a conversation that
is not there, a file without a name, or its hold: `sweep` removes these, and breaks no append that is on its way, for the same
reason. A hold is a dead process's if it is there for seconds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, Final

from middleware_hub.store.errors import DamagedRecordError, StoreMismatchError
from middleware_hub.store.media import MediaFile, media_key
from middleware_hub.store.protocol import Batch, Finding
from middleware_hub.store.records import SpanRecord, decode_file, encode_about, new_id
from middleware_hub.store.redis.connection import Command
from middleware_hub.store.redis.keys import Keys
from middleware_hub.store.redis.reading import Reading
from middleware_hub.store.redis.scripts import DROP_MEDIA, HOLD_MEDIA
from middleware_hub.store.redis.servers import Servers
from middleware_hub.store.verifying import check_file

logger = logging.getLogger(__name__)

_ABOUT, _DATA, _SIZE, _LENGTH = b"a", b"d", b"s", b"l:"
_AGAIN: Final = 8
"""How often a file is written again that others remove meanwhile."""
_FILES_AT_ONCE: Final = 2
"""Files that are on their way at once: others wait for the same connection."""
_AT_ONCE: Final = 256
_PATIENCE: Final = 0.5
"""Seconds after which an apparent fault is checked again: the record may just have been written."""
_HOLD: Final = b"hold:"
_HELD_SECONDS: Final = 5.0
"""How long a hold may be there, which is some round trips long in use."""

Names = dict[bytes, set[bytes]]
"""By the key of a file, the roots of the conversations that name it."""


def names_in(records: Iterable[SpanRecord]) -> Names:
    """Return what records name."""
    found: Names = {}
    for record in records:
        for key in record.files if record.media else ():
            found.setdefault(key, set()).add(record.root)
    return found


class RedisMedia:
    """See the top of this file. Its methods raise StoreError."""

    def __init__(self, servers: Servers, keys: Keys, reading: Reading) -> None:
        self._servers = servers
        self._keys = keys
        self._reading = reading
        self._turns = asyncio.Semaphore(_FILES_AT_ONCE)

    # Appending and forgetting ------------------------------------------------------------------------------------------------

    async def put(self, names: Names, files: Sequence[MediaFile]) -> None:
        """Name files, and write those that are not there. Call this before the records that name them are appended."""
        named: list[Command] = [("SADD", self._keys.named(key), *roots) for key, roots in names.items()]
        asked: list[Command] = [("HEXISTS", self._keys.media(file.key), _DATA) for file in files]
        replies = await self._servers.write([*named, *asked])
        for file, there in zip(files, replies[len(named) :], strict=True):
            key = self._keys.media(file.key)
            lengths = [part for name, length in file.lengths.items() for part in (_LENGTH + name.encode(), length)]
            learned: list[Command] = [("HSET", key, *lengths)] if lengths else []
            if not there:
                fields = (_ABOUT, encode_about(file), _SIZE, file.size, _DATA, file.data)
                async with self._turns:
                    new, *_ = await self._servers.write([("HSET", key, *fields), *learned])
                if new == len(fields) // 2:  # else another router has written it at the same time
                    await self._count(1, file.size)
            elif learned:
                await self._servers.write(learned)

    async def confirm(self, names: Names, files: Sequence[MediaFile]) -> None:
        """Name files again, after the records that name them were appended, and write those that are gone again."""
        kept = {file.key: file for file in files}
        again: set[bytes] = set()
        for _ in range(_AGAIN):
            named: list[Command] = [("SADD", self._keys.named(key), *roots) for key, roots in names.items()]
            asked: list[Command] = [("HEXISTS", self._keys.media(key), _DATA) for key in kept]
            replies = await self._servers.write([*named, *asked])
            gone = {key for key, new in zip(names, replies[: len(named)], strict=True) if new}
            gone.update(key for key, there in zip(kept, replies[len(named) :], strict=True) if not there)
            if not gone:
                break
            again |= gone
            await self.put({}, [kept[key] for key in gone & kept.keys()])
        there = await self._there({root for key in again for root in names[key]})
        await self.release({key: left for key in again if (left := names[key] - there)})

    async def release(self, names: Names) -> int:
        """Take back the names of conversations that are not there, and remove the files that nobody names any more.

        Returns the bytes of these files.
        """
        if not names:
            return 0
        hold = _HOLD + new_id()
        held = [HOLD_MEDIA.of([self._keys.named(key)], [hold, *roots]) for key, roots in names.items()]
        await self._servers.write(held)
        there = await self._there({root for roots in names.values() for root in roots})
        back: list[Command] = [
            ("SADD", self._keys.named(key), *(roots & there)) for key, roots in names.items() if roots & there
        ]
        if back:
            await self._servers.write(back)
        return await self._drop(names, hold)

    async def _there(self, roots: set[bytes]) -> set[bytes]:
        """Return those of the conversations that are there."""
        found: set[bytes] = set()
        some = sorted(roots)
        for at in range(0, len(some), _AT_ONCE):
            part = some[at : at + _AT_ONCE]
            replies = await self._servers.read([("EXISTS", self._keys.root(root)) for root in part])
            found.update(root for root, held in zip(part, replies, strict=True) if held)
        return found

    async def _drop(self, keys: Iterable[bytes], hold: bytes) -> int:
        """Let files go that `hold` holds, and remove those that are unnamed; return their bytes."""
        commands = [DROP_MEDIA.of([self._keys.media(key), self._keys.named(key)], [hold]) for key in keys]
        sizes = [size for size in await self._servers.write(commands) if size >= 0]
        if sizes:
            await self._count(-len(sizes), -sum(sizes))
        return sum(sizes)

    async def _count(self, files: int, size: int) -> None:
        counters = self._keys.counters
        await self._servers.write([("HINCRBY", counters, "media", files), ("HINCRBY", counters, "media_bytes", size)])

    # Reading ---------------------------------------------------------------------------------------------------------------

    async def read(self, tenant: str, digests: Sequence[str], *, data: bool) -> dict[str, MediaFile]:
        """Return a tenant's files; a damaged file is left out."""
        found = {}
        for digest in dict.fromkeys(digests):
            key = self._keys.media(media_key(tenant, digest))
            fields = (_ABOUT, _DATA) if data else (_ABOUT,)
            asked: list[Command] = [("HMGET", key, *fields), ("HKEYS", key)]
            async with self._turns:
                (about, *rest), names = await self._servers.read(asked)
            if about is None or (data and rest[0] is None):
                continue
            settings = [name for name in names if name.startswith(_LENGTH)]
            told: list[Any] = (await self._servers.read([("HMGET", key, *settings)]))[0] if settings else []
            lengths = {
                name[len(_LENGTH) :].decode(): int(length)
                for name, length in zip(settings, told, strict=True)
                if length is not None
            }
            try:
                content = rest[0] if data else None
                found[digest] = await asyncio.to_thread(decode_file, tenant, about, content, lengths)
            except (DamagedRecordError, StoreMismatchError) as error:
                logger.error("the file of a picture cannot be used: %s: run `tito-router store verify`", error.message)
        return found

    async def sizes(self) -> tuple[int, int]:
        """Return how many files there are, and their bytes."""
        (found,) = await self._servers.read([("HMGET", self._keys.counters, "media", "media_bytes")])
        files, size = (max(0, int(one or 0)) for one in found)
        return files, size

    # What was left behind --------------------------------------------------------------------------------------------------

    async def unnamed(self) -> int:
        """Return how many files are named by no conversation that is there."""
        return sum([1 async for key, _ in self._stray() if await self._has_data(key)])

    async def sweep(self) -> int:
        """Remove the names of conversations that are not there, and the files that nobody names; return how many files."""
        (before, _) = await self.sizes()
        held: Names = {}
        async for key, names in self._stray():
            await self.release({key: {name for name in names if not name.startswith(_HOLD)}})
            if holds := {name for name in names if name.startswith(_HOLD)}:
                held[key] = holds
        if held:
            await asyncio.sleep(_HELD_SECONDS)
            await self.release(held)
        return max(0, before - (await self.sizes())[0])

    async def _stray(self) -> AsyncIterator[tuple[bytes, set[bytes]]]:
        """Yield the files that no conversation names that is there, with the conversations that are gone."""
        async for key, members, there in self._each():
            if not there & members:
                yield key, members

    async def _each(self) -> AsyncIterator[tuple[bytes, set[bytes], set[bytes]]]:
        """Yield the key of each file or set of names, with the roots that name it, and those of them that are there."""
        others, seen = await self._reading.stores_inside(), set[bytes]()
        for pattern in (b"m:*", b"w:*"):
            async for found in self._reading.own(pattern, others):
                for name in found:
                    key = key_in(name)
                    if key is None or key in seen:
                        continue
                    seen.add(key)
                    (members,) = await self._servers.read([("SMEMBERS", self._keys.named(key))])
                    yield key, set(members), await self._there(set(members))

    async def _has_data(self, key: bytes) -> bool:
        return bool((await self._servers.read([("HEXISTS", self._keys.media(key), _DATA)]))[0])

    async def verify(self) -> AsyncIterator[list[Finding]]:
        """Yield what is wrong with files, one after the other."""
        async for key, _, _ in self._each():
            if await self._check(key):
                await asyncio.sleep(_PATIENCE)
                yield await self._check(key)

    async def _check(self, key: bytes) -> list[Finding]:
        asked: list[Command] = [
            ("HMGET", self._keys.media(key), _ABOUT, _DATA),
            ("SMEMBERS", self._keys.named(key)),
        ]
        (about, data), members = await self._servers.read(asked)
        held = await self._servers.read([("EXISTS", self._keys.root(root)) for root in members]) if members else []
        if about is not None and data is not None:
            return await asyncio.to_thread(check_file, key, about, data, named=any(held))
        if any(held):
            return [Finding("media", f"a conversation names a picture whose file is not there: {key.hex()}")]
        return [Finding("media", f"names of a file are left that is not there: {key.hex()}")] if members else []


def key_in(name: bytes) -> bytes | None:
    """Return the key of a file in the name of a key of the server; None if there is none."""
    try:
        return bytes.fromhex(name.rpartition(b"{")[2].rstrip(b"}").decode())
    except ValueError:
        return None


def files_of(batch: Batch, names: Mapping[bytes, object]) -> list[MediaFile]:
    """Return the files of a batch that its records name, each once."""
    return list({file.key: file for file in batch.media if file.key in names}.values())
