"""Where records are found by text: hashes of a text's prefixes, and the places under which records are entered.

A text is cut into blocks of `BLOCK` characters. The digest at the end of a block chains the one before it, and the first one
is salted with the namespace: who does not know the namespace finds, counts and times nothing.

    text      |  block 0  |  block 1  |  block 2  |  bl
    digest  salt         d1          d2          d3          d(i+1) = blake2b(d(i) + the characters of block i)

A record is entered in few places, since each of them costs time when it is written:

    START    where the prompt of a reply ends: (block end at or before it, length, hash of all of the text)
    END      where a reply ends, in the same way
    PASS     every `STEP`-th block's end that a reply passes: a text may leave it midway
    WAY      every `STEP`-th block's end that a context passes. Where there is none, and no PASS, nothing goes on.
    NAME     a request id of a reply, under a key of its own

The key of a block end is the digest, but its first four bytes are those of the digest at the last `GROUP`-th block: places
that are written together lie together on disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from hashlib import blake2b
from typing import Final, NamedTuple

from xxhash import xxh3_64_digest

Namespace = tuple[str, ...]
"""(tenant, lora path, x-radix-namespace)."""

BLOCK: Final = 256
"""Characters of a block (measured: 64, 128, 256, 512). Part of the format: another value finds nothing."""
STEP: Final = 4
"""Blocks between two places of a record that goes on."""
GROUP: Final = 16
_SIZE: Final = 16
_NEAR: Final = 4
_KEY: Final = 12
"""Bytes of a key. Hashes of texts have 8: their collisions cost time, since texts are compared."""

START: Final = 0
END: Final = 1
END_ALONE: Final = 2
"""The end of a reply that texts which go on behind it may not continue (see `SpanRecord.continuable`)."""
PASS: Final = 3
WAY: Final = 4
NAME: Final = 5


class PathState(NamedTuple):
    """The hashes of a text up to a `STEP`-th block's end: enough to go on from there without the text before it."""

    blocks: int
    digest: bytes
    group: bytes


class Place(NamedTuple):
    """Where a record is entered."""

    key: bytes
    """Of the block end at or before the place."""
    length: int
    """Of the text, in characters; 0 but for START and END."""
    hash: bytes
    """Of all of the text; empty but for START and END."""
    kind: int


class TextPath:
    """The hashes of one text's prefixes. They cost about 1 us for each block.

    Args:
        namespace: the salt.
        text: all of it, from its first character.
        state: of a prefix of this very text in this namespace (`TextPath.state`); then only what is behind it is hashed, and
            nothing can be asked that lies before it. The caller vouches for it.
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
        digest, group = state.digest, state.group
        digests, groups = [digest], [group]
        for block, data in enumerate(_blocks(text, state.blocks), state.blocks + 1):
            digest = blake2b(digest + data, digest_size=_SIZE).digest()
            if block % GROUP == 0:
                group = digest[:_NEAR]
            digests.append(digest)
            groups.append(group)
        self._digests = digests
        self._groups = groups

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

    def longer(self, text: str) -> TextPath:
        """Return the path of a text that begins with this one: only what is behind the last whole block is hashed."""
        last = PathState(self.last, self._digests[-1], self._groups[-1])
        found = TextPath(self.namespace, text, last)
        found.first = self.first
        found._digests = self._digests[:-1] + found._digests
        found._groups = self._groups[:-1] + found._groups
        return found

    def key(self, block: int) -> bytes:
        """Return the key of the end of the first `block` blocks."""
        at = self._index(block)
        return self._groups[at] + self._digests[at][_NEAR:_KEY]

    def digest(self, block: int) -> bytes:
        """Return the digest at the end of the first `block` blocks: that of all of the text up to there."""
        return self._digests[self._index(block)]

    def digests(self) -> list[bytes]:
        """Return the digests at all `STEP`-th block ends from `first` on."""
        return self._digests[::STEP]

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
    """Return the `STEP`-th block ends behind one character, and not behind another one."""
    return range((start // BLOCK // STEP + 1) * STEP, end // BLOCK + 1, STEP)


def places(path: TextPath, start: int, end: int, left_from: int | None = None, *, continuable: bool) -> list[Place]:
    """Return where a reply is entered that covers these characters of a text.

    The path has to be known from the block of `start`, or of `left_from`. That and `continuable` are the `SpanRecord`'s.
    """
    begins = [start] if left_from is None else [left_from, start]
    kind = END if continuable else END_ALONE
    return [
        *(Place(path.key(begin // BLOCK), begin, path.hash(begin), START) for begin in begins),
        Place(path.key(end // BLOCK), end, path.hash(end), kind),
        *(Place(path.key(block), 0, b"", PASS) for block in steps(begins[0], end)),
    ]


def ways(path: TextPath, start: int, end: int) -> list[Place]:
    """Return where a context is entered whose text these characters are."""
    return [Place(path.key(block), 0, b"", WAY) for block in steps(start, end)]


def name_place(namespace: Namespace, name: str) -> Place:
    """Return where a reply is entered by its name (a request id)."""
    data = _salt(namespace) + name.encode("utf-8", "surrogatepass")
    return Place(blake2b(data, digest_size=_KEY, person=b"name").digest(), 0, b"", NAME)


@lru_cache(1024)
def _salt(namespace: Namespace) -> bytes:
    parts = (part.encode("utf-8", "surrogatepass") for part in namespace)
    return blake2b(b"".join(len(part).to_bytes(8, "big") + part for part in parts), digest_size=_SIZE).digest()


def _blocks(text: str, first: int) -> Iterator[bytes]:
    """Yield the whole blocks behind the first ones, as bytes."""
    for at in range(first * BLOCK, len(text) - BLOCK + 1, BLOCK):
        yield text[at : at + BLOCK].encode("utf-8", "surrogatepass")
