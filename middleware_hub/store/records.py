"""The records of a store: immutable spans, blobs and files of media beside them, events of logs, and marks of what was hit.

A `SpanRecord` is a `TokenSpan` whose place in a chain is given by ids instead of pointers, with its text. The text of a chain
is kept once: a record has the characters after the whole text of `base`, another record of the same chain.

    whole text of a record = whole text of its base (or nothing) + its own `text`

On disk a record is `format (1 byte) | xxh3-64 of the rest, with the format as seed (8 bytes) | msgpack`. Every later format
keeps these nine bytes, so damage and a newer format can be told apart. New fields go to the end and have a default; an older
router refuses a record only if the format byte has grown.
"""

from __future__ import annotations

import os
import random
import time
from hashlib import blake2b, sha256
from typing import Final, TypeVar

import msgspec
from xxhash import xxh3_64_digest

from middleware_hub.spans.chain import ID_BYTES, SpanFlag, Versions
from middleware_hub.spans.hidden_tail import HiddenToken
from middleware_hub.store.errors import VERIFY, DamagedRecordError, StoreMismatchError
from middleware_hub.store.media import MediaFile, media_key
from middleware_hub.store.paths import END_ALONE, Namespace, Place, TextPath, name_place, places, ways

T = TypeVar("T")

FORMAT: Final = 1
ID_SIZE: Final = 16
_HEAD: Final = 9
_NEAR: Final = 5


class SpanRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One span of a chain: the context of a prompt, or a sampled reply. Fields not described here are those of `TokenSpan`.

    Attributes:
        id: 16 bytes: of a context, the hash of its content (`content_id`); of a reply, unique (`new_id`); see `note_on`.
        root: the id of the first record of the chain (perhaps its own): records with one root are forgotten together.
        namespace: nothing is found from another namespace.
        serial: the order of recording over all routers, see `Serials`.
        stamp: the weight version at the time of recording.
        start, width: the characters of the chain's text that this span covers: `start` to `start + width`.
        text: the last characters of the chain's text, up to the end of this span; they begin at `text_from`.
        parent, take: the chain goes through the first `take` tokens of that record.
        line: the complete reply that the prompt of this reply or context continued (`PrefixMatch.continues`).
        base: `parent`, `line`, or None: the record after whose whole text `text` begins.
        tail: the hidden tail, for the texts that may spell it.
        extras: names of the blobs beside this record.
        spelled: a further place for clients that send ids, if the ids do not spell its text.
        left_from: for a reply, the character after which a text that leaves its chain midway finds it, if that is before
            `start`: its context has sampled tokens of a chain that was recorded under another text.
        media: the pictures among the ids; see `TokenSpan`.
        kv_version: see `TokenSpan`.
        note: facts about the reply `parent`. A note has neither tokens nor text, and is found by `request_ids`.
    """

    id: bytes
    root: bytes
    namespace: Namespace
    serial: int
    stamp: str
    start: int
    width: int
    text: str
    ids: bytes
    parent: bytes | None = None
    take: int = 0
    line: bytes | None = None
    base: bytes | None = None
    logprobs: bytes | None = None
    versions: Versions | None = None
    flags: int = SpanFlag.NONE
    visible: int = -1
    ends: bytes | None = None
    tail: tuple[HiddenToken, ...] = ()
    request_ids: tuple[str, ...] = ()
    finish: str = ""
    extras: tuple[str, ...] = ()
    spelled: tuple[bytes, int, bytes] | None = None
    left_from: int | None = None
    note: bytes = b""
    media: tuple[tuple[int, int, str], ...] = ()
    kv_version: str | None = None

    @property
    def sampled(self) -> bool:
        """Return whether this is a reply, not a context."""
        return self.versions is not None

    @property
    def findable(self) -> bool:
        """Return whether a look-up finds it, by its text or by a name. A context is found with the reply after it."""
        return bool(self.note or (self.sampled and self.text_end))

    @property
    def count(self) -> int:
        """Return the number of tokens."""
        return len(self.ids) // ID_BYTES

    @property
    def text_end(self) -> int:
        """Return the length of the whole text, in characters."""
        return self.start + self.width

    @property
    def text_from(self) -> int:
        """Return where `text` begins: the length of the whole text of `base`."""
        return self.start + self.width - len(self.text)

    @property
    def links(self) -> tuple[bytes, ...]:
        """Return the ids of the records that this record needs."""
        if self.parent is None:
            return () if self.line is None else (self.line,)
        return (self.parent,) if self.line is None or self.line == self.parent else (self.parent, self.line)

    @property
    def files(self) -> list[bytes]:
        """Return the keys of the files of media that it names, each once."""
        tenant = self.namespace[0]
        return list(dict.fromkeys([media_key(tenant, digest) for _, _, digest in self.media]))

    @property
    def continuable(self) -> bool:
        """Return whether every text that goes on after this reply continues it (rules 1 and 6 make exceptions)."""
        return self.width > 0 and self.visible != 0 and not self.flags & SpanFlag.MISMATCH


class Blob(msgspec.Struct, frozen=True):
    """Per-token extras of a reply, in the engine's dtype."""

    record: bytes
    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Event(msgspec.Struct, frozen=True):
    """One event of an append-only log.

    Attributes:
        log: the key of the log.
        kind: what happened.
        data: the content of the event.
        number: its place in the log, from 1 without gaps. The store assigns it.
        closes: from this event on the log takes only events that close it further: 0 closes nothing (finalized: 1, deleted: 2).
        expected: to append only if the last event has this number; None: wherever the log ends. It is not kept.
    """

    log: str
    kind: str
    data: bytes = b""
    number: int = 0
    closes: int = 0
    expected: int | None = None

    def decoded(self, decoder: msgspec.msgpack.Decoder[T]) -> T:
        """Return the decoded data. Raises DamagedRecordError."""
        try:
            return decoder.decode(self.data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DamagedRecordError(
                f"event {self.number} of {self.log!r} is none that this router knows: {error}"
            ) from error


class Mark(msgspec.Struct, frozen=True):
    """The last use of a conversation (all records of one root). Marks of one root merge into the latest.

    Attributes:
        root: the `root` of the records that were hit.
        tick: the time of that, as `Serials` gives it.
        stamp: the weight version at that time.
        retrieved: whether its tokens were retrieved or exported; once is enough.
    """

    root: bytes
    tick: int
    stamp: str = ""
    retrieved: bool = False

    def merged(self, other: Mark) -> Mark:
        late = self if self.tick >= other.tick else other
        return Mark(self.root, late.tick, late.stamp, self.retrieved or other.retrieved)


class Serials:
    """Gives numbers that grow: across restarts if clocks go forward, and above all seen here. The one before each is unused."""

    def __init__(self) -> None:
        self._last = 0

    def next(self) -> int:
        self._last = max(self._last + 2, time.time_ns())
        return self._last

    def saw(self, serial: int) -> None:
        self._last = max(self._last, serial)


_random = random.Random(os.urandom(32))
os.register_at_fork(after_in_child=lambda: _random.seed(os.urandom(32)))


def new_id() -> bytes:
    """Return a unique id. It begins with the time, so that neighbours in time are neighbours on disk."""
    return ((time.time_ns() << 64) | _random.getrandbits(64)).to_bytes(16, "big")


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(SpanRecord)


def content_id(record: SpanRecord) -> bytes:
    """Return the id of a context: the hash of its content, not of the time of its recording.

    It begins like the id of the record on which it builds, so that the two are neighbours on disk.
    """
    content: tuple[object, ...] = (
        *(record.namespace, record.parent, record.take, record.line, record.base, record.start, record.width),
        *(record.text, record.ids, record.flags, record.ends),
    )
    if record.media:  # of two pictures of one length, the ids are the same
        content = (*content, record.media)
    found = blake2b(_encoder.encode(content), digest_size=ID_SIZE, person=b"tito-context").digest()
    above = record.parent or record.line
    return found if above is None else above[:_NEAR] + found[_NEAR:]


def identified(context: SpanRecord) -> SpanRecord:
    """Return a context with the id that its content gives it; without a parent it is the root of its chain."""
    found = content_id(context)
    return msgspec.structs.replace(context, id=found, root=context.root if context.links else found)


def encode(record: SpanRecord) -> bytes:
    """Return a record as bytes. Raises ValueError if its text holds half of a surrogate pair."""
    try:
        return seal(_encoder.encode(record))
    except UnicodeEncodeError as error:
        raise ValueError(f"a text with half of a surrogate pair cannot be stored: {error}") from error


def decode(data: bytes) -> SpanRecord:
    """Return the record of these bytes. Raises DamagedRecordError, and StoreMismatchError for a newer format."""
    payload = unseal(data)
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DamagedRecordError(f"a record is whole, but is no span: {error}") from error


def path_of(record: SpanRecord, given: TextPath | None) -> TextPath:
    """Return a path of the text of a record: the given path, if it is one. Raises ValueError if there is none."""
    end = record.text_end
    begin = end - len(record.text)
    if given is not None and given.namespace == record.namespace and given.text[begin:end] == record.text:
        return given
    if begin:
        raise ValueError(f"record {record.id.hex()}: there is no path of its text")
    return TextPath(record.namespace, record.text)


def places_of(record: SpanRecord, path: TextPath) -> list[Place]:
    """Return where a record is entered: a note at its names, all else nowhere if its whole text is empty.

    `path` is that of its whole text, or of a longer text, from the block where its `text` begins or before.
    """
    names = [name_place(record.namespace, name) for name in dict.fromkeys(record.request_ids)]
    if record.note or not record.text_end:
        return names if record.note else []
    if not record.sampled:
        return ways(path, record.text_from, record.text_end)
    found = places(path, record.start, record.text_end, record.left_from, continuable=record.continuable)
    if record.spelled is not None:
        found.append(Place(*record.spelled, END_ALONE))
    if record.text_from < record.start:
        found += ways(path, record.text_from, record.start)
    return found + names


def encode_event(event: Event) -> bytes:
    """Return an event as bytes, without its log and its number."""
    return seal(msgspec.msgpack.encode((event.kind, event.closes, event.data)))


def decode_event(log: str, number: int, data: bytes) -> Event:
    """Return a kept event. Raises DamagedRecordError, and StoreMismatchError for a newer format."""
    try:
        kind, closes, rest = msgspec.msgpack.decode(unseal(data), type=tuple[str, int, bytes])
    except DamagedRecordError as error:
        raise DamagedRecordError(f"event {number} of the log {log!r} is damaged{VERIFY}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DamagedRecordError(f"event {number} of the log {log!r} is whole, but is no event: {error}") from error
    return Event(log, kind, rest, number, closes)


def encode_blob(blob: Blob) -> bytes:
    """Return a blob as bytes."""
    return seal(msgspec.msgpack.encode(blob))


def decode_blob(data: bytes) -> Blob:
    """Return the blob of these bytes. Raises DamagedRecordError, and StoreMismatchError for a newer format."""
    try:
        return msgspec.msgpack.decode(unseal(data), type=Blob)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DamagedRecordError(f"a blob is whole, but is no blob: {error}") from error


class _About(msgspec.Struct, frozen=True, array_like=True):
    """All that is kept of a file of media beside its bytes and its lengths; see `MediaFile`."""

    digest: str
    mime: str
    width: int
    height: int
    upright: bool
    size: int


def encode_about(file: MediaFile) -> bytes:
    """Return all but the bytes and the lengths of a file of media, as it is stored."""
    about = _About(file.digest, file.mime, file.width, file.height, file.upright, file.size)
    return seal(_encoder.encode(about))


def decode_file(tenant: str, about: bytes, data: bytes | None, lengths: dict[str, int]) -> MediaFile:
    """Return a stored file of media; `data` is None if its bytes were not asked for.

    Raises DamagedRecordError, also if the bytes are others than its name says, and StoreMismatchError for a newer format.
    """
    try:
        found = msgspec.msgpack.decode(unseal(about), type=_About)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DamagedRecordError(f"a file of media is whole, but is none that this router knows: {error}") from error
    if data is not None and f"sha256:{sha256(data).hexdigest()}" != found.digest:
        raise DamagedRecordError(f"the bytes of {found.digest} are others than its name says{VERIFY}")
    form = found.mime, found.width, found.height, found.upright, found.size
    return MediaFile(tenant, found.digest, *form, b"" if data is None else data, lengths)


def seal(payload: bytes) -> bytes:
    """Return bytes with the format and a checksum in front."""
    return b"".join((bytes((FORMAT,)), xxh3_64_digest(payload, FORMAT), payload))


def unseal(data: bytes | memoryview) -> memoryview:
    """Return sealed bytes. Raises DamagedRecordError, and StoreMismatchError for a newer format."""
    payload = memoryview(data)[_HEAD:]
    if len(data) < _HEAD or xxh3_64_digest(payload, data[0]) != data[1:_HEAD]:
        raise DamagedRecordError(f"a record's checksum is wrong{VERIFY}")
    if data[0] != FORMAT:
        raise StoreMismatchError(f"a record has format {data[0]}, and this router knows {FORMAT}: update the router")
    return payload


def faults(record: SpanRecord, *, thorough: bool = False) -> list[str]:
    """Return the faults of a record by itself. `thorough`: also hash the content of a context, which takes longer."""
    wrong = []
    count, length = len(record.ids) // ID_BYTES, record.start + record.width
    text_from, links, logprobs, versions = length - len(record.text), record.links, record.logprobs, record.versions
    if len(record.id) != ID_SIZE or len(record.root) != ID_SIZE:
        wrong.append("an id is not 16 bytes")
    if len(record.ids) != ID_BYTES * count:
        wrong.append("the ids are not whole int32")
    if record.ends is not None and len(record.ends) != len(record.ids):
        wrong.append("there are not as many ends as ids")
    if record.start < 0 or record.width < 0 or text_from < 0:
        wrong.append("the text is longer than the chain's")
    if record.base is None:
        if text_from:
            wrong.append("there is text before it, and no base")
    elif record.base not in links:
        wrong.append("the base is neither parent nor line")
    if not links and record.root != record.id:
        wrong.append("it has no parent, and is not its own root")
    if not -1 <= record.visible <= count:
        wrong.append("more tokens are visible than there are")
    if logprobs is not None:
        if len(logprobs) not in (4 * count, 8 * count):
            wrong.append("logprobs are not one per id")
        if versions is None:
            wrong.append("a context has logprobs")
    if isinstance(versions, tuple) and (not versions or versions[-1][1] != count):
        wrong.append("the runs of versions do not end with the ids")
    if thorough and versions is None and not record.note and not _has_id_of_content(record):
        wrong.append("the id of a context is not that of its content")
    return wrong


def _has_id_of_content(record: SpanRecord) -> bool:
    """Return whether the id of a context is that of its content, or was that in an earlier version, without its pictures."""
    return record.id == content_id(record) or (
        bool(record.media) and record.id == content_id(msgspec.structs.replace(record, media=()))
    )
