"""A store in a dictionary: what all other stores are judged by. It compares texts, and is slow on purpose."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Container, Iterable, Sequence
from dataclasses import replace
from itertools import groupby

import msgspec

from middleware_hub.spans.chain import names_of
from middleware_hub.store.errors import (
    ClosedLogError,
    ConflictingRecordError,
    LogMovedError,
    MissingRecordError,
    StoreMismatchError,
)
from middleware_hub.store.protocol import (
    MOST_CHAINS,
    MOST_VARIANTS,
    Batch,
    Durability,
    Finding,
    Forgotten,
    Found,
    LogInfo,
    Query,
    StoreStats,
)
from middleware_hub.store.records import Blob, Event, Mark, SpanRecord, complete, encode, faults


class DictionaryStore:
    """A `Store` that ends with its process."""

    def __init__(self, _: str = "", __: Durability = "process") -> None:
        self._fingerprint: str | None = None
        self._records: dict[bytes, SpanRecord] = {}
        self._blobs: dict[tuple[bytes, str], Blob] = {}
        self._logs: dict[str, list[Event]] = {}
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
        for event, number in zip(batch.events, numbers, strict=True):
            self._logs.setdefault(event.log, []).append(msgspec.structs.replace(event, number=number, expected=None))
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
        ends = {log: (held[-1].number, max(event.closes for event in held)) for log, held in self._logs.items()}
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

    def note(self, marks: Sequence[Mark]) -> None:
        for mark in marks:
            known = self._marks.get(mark.root)
            self._marks[mark.root] = mark if known is None else known.merged(mark)

    def others(self) -> int:
        return 0

    def text_of(self, record: SpanRecord) -> str:
        """Return the whole text of a record."""
        parts = [record.text]
        while record.base is not None:
            record = self._records[record.base]
            parts.append(record.text)
        return "".join(reversed(parts))

    async def find(self, query: Query) -> Found:
        text, namespace = query.path.text, query.path.namespace
        every = (record for record in reversed(self._records.values()) if record.text_end)
        replies = [record for record in every if record.sampled and record.namespace == namespace]
        texts = {reply.id: self.text_of(reply) for reply in replies}
        ends = [r for r in replies if r.text_end >= query.known_from and text.startswith(texts[r.id])]
        wanted, cut_off = [r for r in replies if _spelled(r, query)], 0
        for _, same in groupby(sorted(ends, key=lambda r: r.text_end), key=lambda r: r.text_end):
            variants = list(same)
            wanted += variants[:MOST_VARIANTS]
            cut_off += len(variants) > MOST_VARIANTS
        named = [r for name in query.parents for r in self._named(replies, name)]
        floor = max((r.text_end for r in ends if r.continuable), default=query.known_from)
        floor = max(query.known_from, min(floor, *(r.text_end for r in named), floor))
        chains = []
        prompts = set()
        for reply in replies:
            agreed = _agreed(texts[reply.id], text)
            begin = reply.start if reply.left_from is None else reply.left_from
            if agreed > floor and agreed > begin:
                chains.append((agreed, reply))
            elif agreed == len(text) == reply.start and reply.parent not in prompts:
                prompts.add(reply.parent)
                wanted.append(reply)
        chains.sort(key=lambda chain: -chain[0])
        wanted += [reply for _, reply in chains[:MOST_CHAINS]] + named
        cut_off += len(chains) > MOST_CHAINS
        return self._found(wanted, query.known, cut_off)

    @staticmethod
    def _named(replies: Iterable[SpanRecord], name: str) -> list[SpanRecord]:
        for one in names_of(name):
            found = next((reply for reply in replies if one in reply.request_ids), None)
            if found is not None:
                return [found]
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

    async def get(self, ids: Sequence[bytes], *, known: Container[bytes] = ()) -> Found:
        return self._found([self._records[i] for i in ids if i in self._records], known)

    async def blobs(self, record: bytes, names: Sequence[str] | None = None) -> list[Blob]:
        return [b for (i, name), b in self._blobs.items() if i == record and (names is None or name in names)]

    async def read(self, log: str, *, after: int = 0, limit: int = 1_000) -> list[Event]:
        return [event for event in self._logs.get(log, ()) if event.number > after][:limit]

    async def logs(self, prefix: str = "", *, after: str = "", limit: int = 1_000) -> list[LogInfo]:
        keys = sorted(log for log in self._logs if log.startswith(prefix) and log > after)[:limit]
        return [LogInfo(k, self._logs[k][-1].number, max(e.closes for e in self._logs[k])) for k in keys]

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
            if self._bytes() > max_bytes and held[-1].closes >= 2:
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
        del self._marks[mark.root]
        return Forgotten(int(mark.retrieved), int(not mark.retrieved), len(records), 0, (mark.stamp,))

    def _bytes(self) -> int:
        blobs = sum(len(blob.data) for blob in self._blobs.values())
        events = sum(len(event.data) for held in self._logs.values() for event in held)
        return blobs + events + sum(len(encode(record)) for record in self._records.values())

    async def stats(self) -> StoreStats:
        roots = len({record.root for record in self._records.values()})
        return replace(self._stats, records=len(self._records), roots=roots, logs=len(self._logs), bytes=self._bytes())


def _spelled(reply: SpanRecord, query: Query) -> bool:
    """Return whether a text begins with what the ids of a reply's chain spell."""
    if reply.spelled is None:
        return False
    _, length, digest = reply.spelled
    return query.known_from <= length <= len(query.path.text) and query.path.hash(length) == digest


def _agreed(one: str, other: str) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
