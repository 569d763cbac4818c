"""Where records are found by text: hashes of a text's prefixes, and the places under which records are entered.

A text is cut into blocks of `BLOCK` characters. The digest at the end of a block chains the one before it, and the first one is
salted with the namespace: without the namespace nothing can be found, counted or timed.

    text      |  block 0  |  block 1  |  block 2  |  bl
    digest  salt         d1          d2          d3          d(i+1) = blake2b(d(i) + the characters of block i)

A record is entered in few places, because each of them costs time when it is written:

    START    where the prompt of a reply ends: (block end at or before it, length, hash of the whole text)
    END      where a reply ends, in the same way
    PASS     every `STEP`-th block's end that a reply passes: a text may leave it midway
    WAY      every `STEP`-th block's end that a context passes. Without a WAY or a PASS there, no longer text is recorded.
    NAME     a request id of a reply, under a separate key

The key of a block end is the digest, but its first four bytes are those of the digest at the last `GROUP`-th block: places
that are written together lie together on disk.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import Final, NamedTuple

import msgspec
from xxhash import xxh3_64_digest

Namespace = tuple[str, ...]
"""(tenant, lora path, x-radix-namespace)."""

BLOCK: Final = 256
"""Characters of a block (measured: 64, 128, 256, 512). Part of the format: another value finds nothing."""
STEP: Final = 4
"""Blocks between two places of a record that passes them."""
GROUP: Final = 16
_SIZE: Final = 16
_NEAR: Final = 4
KEY: Final = 12
"""Bytes of a key."""
HASH: Final = 8
"""Bytes of the hash of a text: a collision costs time, since texts are compared."""

_EMPTY: Final = blake2b(digest_size=_SIZE)

START: Final = 0
END: Final = 1
END_ALONE: Final = 2
"""The end of a reply that longer texts may not continue (see `SpanRecord.continuable`)."""
PASS: Final = 3
WAY: Final = 4
NAME: Final = 5


class PathState(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The hashes of a text up to a `STEP`-th block's end: enough to go on from there without the earlier text."""

    blocks: int
    digest: bytes
    group: bytes


class TextEnd(msgspec.Struct, frozen=True, gc=False):
    """The end of a text, from which its hashes go on without the earlier text: `rest` follows the blocks of `state`."""

    state: PathState
    rest: str

    @property
    def length(self) -> int:
        """Return the number of characters of the whole text."""
        return BLOCK * self.state.blocks + len(self.rest)

    def longer(self, more: str) -> TextEnd:
        """Return the end of the text continued by `more`."""
        state, rest = self.state, self.rest + more
        digests, groups = _hashes(state, rest, 0)
        new = len(digests) - 1
        return TextEnd(PathState(state.blocks + new, digests[-1], groups[-1]), rest[BLOCK * new :])

    def place(self) -> tuple[bytes, int, bytes]:
        """Return the first three fields of the `Place` of a reply whose whole text ends here; `rest` is less than a block."""
        state, rest = self.state, self.rest.encode("utf-8", "surrogatepass")
        key = state.group + state.digest[_NEAR:KEY]
        return key, self.length, xxh3_64_digest(state.digest + rest)


class Place(NamedTuple):
    """A place where a record is entered."""

    key: bytes
    """The key of the block end at or before the place."""
    length: int
    """The length of the text, in characters; 0 except for START and END."""
    hash: bytes
    """The hash of the whole text; empty except for START and END."""
    kind: int


class TextPath:
    """The hashes of one text's prefixes. They cost about 1 us for each block.

    Args:
        namespace: the salt.
        text: the whole text, from its first character.
        state: the state of a prefix of this text in this namespace (`TextPath.state`); then only the text after it is hashed,
            and nothing before it can be asked for. The caller guarantees that it fits.
    """

    __slots__ = ("_digests", "_groups", "first", "namespace", "text")

    def __init__(self, namespace: Namespace, text: str, state: PathState | None = None) -> None:
        if state is None:
            salt = _salt(namespace)
            state = PathState(0, salt, salt[:_NEAR])
        self.namespace = namespace
        self.text = text
        self.first = state.blocks
        """The block from which on the path is known, a multiple of `STEP`."""
        self._digests, self._groups = _hashes(state, text, BLOCK * state.blocks)

    def __repr__(self) -> str:
        return f"<TextPath {len(self.text)} characters, blocks {self.first} to {self.last}>"

    @property
    def last(self) -> int:
        """Return the number of whole blocks."""
        return self.first + len(self._digests) - 1

    def state(self, at: int) -> PathState:
        """Return the state at the last `STEP`-th block end at or before a character."""
        block = at // BLOCK // STEP * STEP
        at = self._index(block)
        return PathState(block, self._digests[at], self._groups[at])

    def end(self) -> TextEnd:
        """Return the end of the whole text."""
        last = self.last
        return TextEnd(PathState(last, self._digests[-1], self._groups[-1]), self.text[BLOCK * last :])

    def longer(self, text: str) -> TextPath:
        """Return the path of a text that begins with this one: only what follows the last whole block is hashed."""
        last = PathState(self.last, self._digests[-1], self._groups[-1])
        found = TextPath(self.namespace, text, last)
        found.first = self.first
        found._digests = self._digests[:-1] + found._digests
        found._groups = self._groups[:-1] + found._groups
        return found

    def key(self, block: int) -> bytes:
        """Return the key of the end of the first `block` blocks."""
        at = self._index(block)
        return self._groups[at] + self._digests[at][_NEAR:KEY]

    def keys(self, blocks: range) -> list[bytes]:
        """Return the keys of the ends of these blocks, one after the other."""
        begin, end = self._index(blocks.start), self._index(blocks.stop)
        pairs = zip(self._groups[begin:end], self._digests[begin:end], strict=True)
        return [group + digest[_NEAR:KEY] for group, digest in pairs]

    def digest(self, block: int) -> bytes:
        """Return the digest at the end of the first `block` blocks: that of the whole text up to there."""
        return self._digests[self._index(block)]

    def digests(self) -> list[bytes]:
        """Return the digests at all `STEP`-th block ends from `first` on."""
        return self._digests[::STEP]

    def place(self, length: int, kind: int) -> Place:
        """Return where a record is entered that starts or ends after these characters."""
        block = length // BLOCK
        at = self._index(block)
        digest = self._digests[at]
        rest = self.text[block * BLOCK : length].encode("utf-8", "surrogatepass")
        return Place(self._groups[at] + digest[_NEAR:KEY], length, xxh3_64_digest(digest + rest), kind)

    def passing(self, start: int, end: int, kind: int) -> list[Place]:
        """Return where a record is entered that passes these characters."""
        return [Place(self.key(block), 0, b"", kind) for block in steps(start, end)]

    def _index(self, block: int) -> int:
        if block < self.first:
            raise ValueError(f"a path that is known from block {self.first} on was asked for block {block}")
        return block - self.first

    def hash(self, length: int) -> bytes:
        """Return the hash of the first `length` characters."""
        block = length // BLOCK
        rest = self.text[block * BLOCK : length].encode("utf-8", "surrogatepass")
        return xxh3_64_digest(self._digests[self._index(block)] + rest)


def steps(start: int, end: int) -> range:
    """Return the `STEP`-th block ends after one character and up to another."""
    return range((start // BLOCK // STEP + 1) * STEP, end // BLOCK + 1, STEP)


def places(path: TextPath, start: int, end: int, left_from: int | None = None, *, continuable: bool) -> list[Place]:
    """Return where a reply is entered that covers these characters of a text.

    The path has to be known from the block of `start`, or of `left_from`. Both and `continuable` are those of the `SpanRecord`.
    """
    begin = start if left_from is None else left_from
    found = [path.place(begin, START), path.place(end, END if continuable else END_ALONE)]
    if begin != start:
        found.insert(1, path.place(start, START))
    found += path.passing(begin, end, PASS)
    return found


def ways(path: TextPath, start: int, end: int) -> list[Place]:
    """Return where a context is entered whose text these characters are."""
    return path.passing(start, end, WAY)


def name_place(namespace: Namespace, name: str) -> Place:
    """Return where a reply is entered by its name (a request id)."""
    data = _salt(namespace) + name.encode("utf-8", "surrogatepass")
    return Place(blake2b(data, digest_size=KEY, person=b"name").digest(), 0, b"", NAME)


@lru_cache(1024)
def _salt(namespace: Namespace) -> bytes:
    parts = (part.encode("utf-8", "surrogatepass") for part in namespace)
    return blake2b(b"".join(len(part).to_bytes(8, "big") + part for part in parts), digest_size=_SIZE).digest()


def _hashes(state: PathState, text: str, at: int) -> tuple[list[bytes], list[bytes]]:
    """Return the digests and groups at the block ends from `state` on, which is at character `at` of a text."""
    block, digest, group = state.blocks, state.digest, state.group
    digests, groups = [digest], [group]
    for begin in range(at, len(text) - BLOCK + 1, BLOCK):
        block += 1
        hashed = _EMPTY.copy()  # half the time of making a new one
        hashed.update(digest + text[begin : begin + BLOCK].encode("utf-8", "surrogatepass"))
        digest = hashed.digest()
        if block % GROUP == 0:
            group = digest[:_NEAR]
        digests.append(digest)
        groups.append(group)
    return digests, groups
