"""A store in a dictionary, the reference for all other stores. It compares texts, and is slow on purpose."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from time import monotonic, time
from typing import Final

import msgspec

from middleware_hub.spans.chain import names_of
from middleware_hub.store.errors import (
    ClosedLogError,
    ConflictingRecordError,
    LogMovedError,
    MissingRecordError,
    StoreMismatchError,
)
from middleware_hub.store.look_up import MOST_CHAINS, MOST_VARIANTS, complete
from middleware_hub.store.media import MediaFile, media_key
from middleware_hub.store.protocol import (
    Batch,
    Durability,
    Finding,
    Forgotten,
    Found,
    LogInfo,
    Query,
    StoreStats,
)
from middleware_hub.store.records import Blob, Event, Mark, SpanRecord, encode, faults

_LOOK_EVERY: Final = 0.005


class DictionaryStore:
    """A `Store` that ends with its process."""

    def __init__(self, _: str = "", __: Durability = "process") -> None:
        self._fingerprint: str | None = None
        self._records: dict[bytes, SpanRecord] = {}
        self._blobs: dict[tuple[bytes, str], Blob] = {}
        self._media: dict[bytes, MediaFile] = {}
        self._logs: dict[str, list[Event]] = {}
        self._ends: dict[str, tuple[int, int]] = {}
        self._announced: dict[str, tuple[bytes, float]] = {}
        self._marks: dict[bytes, Mark] = {}
        self._stats = StoreStats()

    async def open(self, fingerprint: str | None) -> None:
        if fingerprint is None:
            return
        if self._fingerprint not in (None, fingerprint):
            raise StoreMismatchError(
                f"this store belongs to the tokenizer {self._fingerprint!r}, not to {fingerprint!r}"
            )
        self._fingerprint = fingerprint

    async def close(self) -> None:
        pass

    async def append(self, batch: Batch) -> list[int]:
        new = self._new_records(batch.records)
        missing = tuple(b.record for b in batch.blobs if b.record not in new and b.record not in self._records)
        if missing:
            raise MissingRecordError(missing)
        numbers = self._numbers(batch.events)
        self._records.update(new)
        for record in new.values():
            self.note([Mark(record.root, record.serial, record.stamp)])
        self._blobs = {**{(blob.record, blob.name): blob for blob in batch.blobs}, **self._blobs}
        for file in batch.media:
            lengths = {**self._media.get(file.key, file).lengths, **file.lengths}
            self._media[file.key] = msgspec.structs.replace(self._media.get(file.key, file), lengths=lengths)
        self._keep_named()
        for event, number in zip(batch.events, numbers, strict=True):
            self._logs.setdefault(event.log, []).append(msgspec.structs.replace(event, number=number, expected=None))
            self._ends[event.log] = number, max(event.closes, self._ends.get(event.log, (0, 0))[1])
        self._stats = replace(self._stats, groups=self._stats.groups + 1, appends=self._stats.appends + 1)
        return numbers

    def _new_records(self, records: Iterable[SpanRecord]) -> dict[bytes, SpanRecord]:
        new: dict[bytes, SpanRecord] = {}
        for record in records:
            wrong = faults(record)
            if wrong:
                raise ValueError(f"record {record.id.hex()}: {'; '.join(wrong)}")
            encode(record)
            here = self._records.get(record.id) or new.get(record.id)
            if here is not None:
                if record.sampled and here != record:
                    raise ConflictingRecordError(f"record {record.id.hex()} is stored with another content")
                continue
            links = [self._records.get(link) or new.get(link) for link in record.links]
            if None in links:
                raise MissingRecordError(tuple(i for i, r in zip(record.links, links, strict=True) if r is None))
            if any(link is not None and link.root != record.root for link in links):
                raise ConflictingRecordError(f"record {record.id.hex()} builds on records of another root")
            new[record.id] = record
        return new

    def _numbers(self, events: Iterable[Event]) -> list[int]:
        ends = dict(self._ends)
        numbers = []
        for event in events:
            last, closed = ends.get(event.log, (0, 0))
            if closed >= max(1, event.closes):
                raise ClosedLogError(f"the log {event.log!r} is closed: {event.kind!r} is refused")
            if event.expected not in (None, last):
                raise LogMovedError(event.log, last)
            ends[event.log] = last + 1, max(closed, event.closes)
            numbers.append(last + 1)
        return numbers

    def on_loss(self, refill: object) -> None:
        """Do nothing: this store loses nothing by itself."""

    def note(self, marks: Sequence[Mark]) -> None:
        for mark in marks:
            known = self._marks.get(mark.root)
            self._marks[mark.root] = mark if known is None else known.merged(mark)

    def others(self) -> int:
        return 0

    def spared(self, query: Query) -> Found | None:
        return Found(ends=self._ends_of(query.logs)) if query.complete and not self.others() else None

    def _ends_of(self, logs: Sequence[str]) -> dict[str, int]:
        return {log: self._ends.get(log, (0, 0))[0] for log in logs}

    def text_of(self, record: SpanRecord) -> str:
        """Return the whole text of a record."""
        parts = [record.text]
        while record.base is not None:
            record = self._records[record.base]
            parts.append(record.text)
        return "".join(reversed(parts))

    async def find(self, query: Query) -> Found:
        text, namespace = query.path.text, query.path.namespace
        every = [one for one in reversed(self._records.values()) if one.findable and one.namespace == namespace]
        replies = [record for record in every if not record.note]
        texts = {reply.id: self.text_of(reply) for reply in replies}
        ends = [r for r in replies if r.text_end >= query.known_from and text.startswith(texts[r.id])]
        wanted, cut_off = [r for r in replies if _spelled(r, query)], 0
        for _, same in groupby(sorted(ends, key=lambda r: r.text_end), key=lambda r: r.text_end):
            variants = list(same)
            wanted += variants[:MOST_VARIANTS]
            cut_off += len(variants) > MOST_VARIANTS
        named = [r for name in query.parents for r in self._named(every, name)[: query.each]]
        floor = max((r.text_end for r in ends if r.continuable), default=query.known_from)
        floor = max(query.known_from, min(floor, *(r.text_end for r in named), floor))
        chains = []
        prompts = set()
        for reply in replies:
            agreed = _agreed(texts[reply.id], text)
            begin = reply.start if reply.left_from is None else reply.left_from
            if agreed >= floor and agreed > begin:
                chains.append((agreed, reply))
            elif agreed == len(text) == reply.start and reply.parent not in prompts:
                prompts.add(reply.parent)
                wanted.append(reply)
        chains.sort(key=lambda chain: -chain[0])
        wanted += [reply for _, reply in chains[:MOST_CHAINS]] + named
        cut_off += len(chains) > MOST_CHAINS
        found = self._found(wanted, query.known, cut_off)
        return msgspec.structs.replace(found, ends=self._ends_of(query.logs))

    @staticmethod
    def _named(records: Sequence[SpanRecord], name: str) -> list[SpanRecord]:
        """Return the records of a name, newest first."""
        for one in names_of(name):
            found = [record for record in records if one in record.request_ids]
            if found:
                return sorted(found, key=lambda record: record.serial, reverse=True)
        return []

    def _found(self, wanted: Iterable[SpanRecord], known: Container[bytes], cut_off: int = 0) -> Found:
        needed: dict[bytes, SpanRecord] = {}
        stack = list(wanted)
        while stack:
            record = stack.pop()
            if record.id not in needed and record.id not in known:
                needed[record.id] = record
                stack += [self._records[link] for link in record.links]
        records, damaged = complete(needed.values(), known)
        marks = {r.root: self._marks[r.root] for r in records if r.root in self._marks}
        return Found(records, marks, cut_off, damaged)

    async def get(
        self, ids: Sequence[bytes], *, known: Container[bytes] = (), roots: Mapping[bytes, bytes] | None = None
    ) -> Found:
        return self._found([self._records[i] for i in ids if i in self._records], known)

    async def blobs(
        self, record: bytes, names: Sequence[str] | None = None, *, root: bytes | None = None
    ) -> list[Blob]:
        return [b for (i, name), b in self._blobs.items() if i == record and (names is None or name in names)]

    def _keep_named(self) -> None:
        named = {key for record in self._records.values() for key in record.files}
        self._media = {key: file for key, file in self._media.items() if key in named}

    async def media_unnamed(self) -> int:
        return 0

    async def sweep_media(self) -> int:
        return 0

    async def media(self, tenant: str, digests: Sequence[str], *, data: bool = True) -> Mapping[str, MediaFile]:
        found = {one: self._media[key] for one in digests if (key := media_key(tenant, one)) in self._media}
        return found if data else {one: msgspec.structs.replace(file, data=b"") for one, file in found.items()}

    async def read(self, log: str, *, after: int = 0, limit: int = 1_000) -> list[Event]:
        return [event for event in self._logs.get(log, ()) if event.number > after][:limit]

    async def logs(self, prefix: str = "", *, after: str = "", limit: int = 1_000) -> list[LogInfo]:
        keys = sorted(log for log in self._ends if log.startswith(prefix) and log > after)[:limit]
        return [LogInfo(key, *self._ends[key]) for key in keys]

    async def wait(self, log: str, after: int, seconds: float) -> int:
        deadline = monotonic() + seconds
        while True:
            last, _ = self._ends.get(log, (0, 0))
            if last > after or monotonic() >= deadline:
                return last
            await asyncio.sleep(_LOOK_EVERY)

    async def trim(self, log: str, before: int) -> None:
        if log in self._logs:
            self._logs[log] = [event for event in self._logs[log] if event.number >= before]

    async def forget_logs(self, logs: Sequence[str]) -> int:
        gone = [log for log in dict.fromkeys(logs) if self._ends.get(log, (0, 0))[1] >= 2]
        for log in gone:
            del self._ends[log], self._logs[log]
        return len(gone)

    async def announce(self, name: str, data: bytes, seconds: float) -> None:
        self._announced[name] = data, monotonic() + seconds

    async def announced(self, prefix: str = "") -> Mapping[str, bytes]:
        now = monotonic()
        self._announced = {name: said for name, said in self._announced.items() if said[1] > now}
        return {name: data for name, (data, _) in self._announced.items() if name.startswith(prefix)}

    def now(self) -> float:
        return time()

    async def scan(self) -> AsyncIterator[SpanRecord]:
        for record in list(self._records.values()):
            yield record

    async def verify(self, checked: Callable[[int], None] | None = None) -> AsyncIterator[Finding]:
        for record in list(self._records.values()):
            if checked is not None:
                checked(1)
            for wrong in faults(record, thorough=True):
                yield Finding("record", f"record {record.id.hex()}: {wrong}", record.id)

    async def forget(self, max_bytes: int) -> Forgotten:
        order = sorted(self._marks.values(), key=lambda mark: (not mark.retrieved, mark.tick))
        events = 0
        for log, held in self._logs.items():
            if self._bytes() > max_bytes and held and self._ends[log][1] >= 2:
                events += len(held) - 1
                self._logs[log] = held[-1:]
        done = Forgotten(events=events)
        for mark in order:
            if self._bytes() <= max_bytes:
                break
            done = done.plus(self._forget_root(mark))
        return done

    async def forget_roots(self, roots: Sequence[bytes]) -> Forgotten:
        done = Forgotten()
        for root in dict.fromkeys(roots):
            if root in self._marks:
                done = done.plus(self._forget_root(self._marks[root]))
        return done

    def _forget_root(self, mark: Mark) -> Forgotten:
        records = [record.id for record in self._records.values() if record.root == mark.root]
        for record in records:
            del self._records[record]
        self._blobs = {key: blob for key, blob in self._blobs.items() if key[0] in self._records}
        self._keep_named()
        del self._marks[mark.root]
        return Forgotten(int(mark.retrieved), int(not mark.retrieved), len(records), 0, (mark.stamp,))

    def _bytes(self) -> int:
        blobs = sum(len(blob.data) for blob in self._blobs.values())
        events = sum(len(event.data) for held in self._logs.values() for event in held)
        return blobs + events + self._media_bytes() + sum(len(encode(record)) for record in self._records.values())

    async def stats(self) -> StoreStats:
        roots = len({record.root for record in self._records.values()})
        return replace(
            self._stats,
            records=len(self._records),
            roots=roots,
            logs=len(self._logs),
            bytes=self._bytes(),
            media=len(self._media),
            media_bytes=self._media_bytes(),
        )

    def _media_bytes(self) -> int:
        return sum(len(file.data) for file in self._media.values())


def _spelled(reply: SpanRecord, query: Query) -> bool:
    """Return whether a text begins with what the ids of a reply's chain spell."""
    if reply.spelled is None:
        return False
    _, length, digest = reply.spelled
    return query.known_from <= length <= len(query.path.text) and query.path.hash(length) == digest


def _agreed(one: str, other: str) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
