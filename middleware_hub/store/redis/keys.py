"""The names of all keys. The part between braces decides where a key is in a cluster."""

from __future__ import annotations

from binascii import b2a_base64
from typing import Final

from xxhash import xxh3_64_intdigest

from middleware_hub.store.paths import NAME, Place, name_place

KINDS: Final = b"SEAP"
"""The first character of a field, by kind of place: START, END, END_ALONE, PASS."""
CROWD: Final = 64
"""Texts of one block that are kept in one hash. Further texts have separate keys."""


class Keys:
    """Names the keys of one store.

    Args:
        shards: how many parts the sets of roots and of logs have.
    """

    def __init__(self, prefix: str, shards: int = 1) -> None:
        self.prefix = before = prefix.encode()
        self.shards = shards
        self.meta = before + b"meta"
        self.counters = before + b"count"
        self.announced = before + b"announced"
        self.returned = before + b"returned"
        self._root, self._blobs, self._place = before + b"r:{", before + b"b:{", before + b"p:{"
        self._name, self._log = before + b"n:", before + b"l:"
        self._media, self._named = before + b"m:{", before + b"w:{"
        self.orders = [before + b"o:%d" % shard for shard in range(shards)]
        self.indexes = [before + b"i:%d" % shard for shard in range(shards)]
        self.deads = [before + b"d:%d" % shard for shard in range(shards)]

    def root(self, root: bytes) -> bytes:
        return b"%b%b}" % (self._root, root.hex().encode())

    def blobs(self, root: bytes) -> bytes:
        return b"%b%b}" % (self._blobs, root.hex().encode())

    def media(self, key: bytes) -> bytes:
        """Return the key of a file of media, given the key that every store has for it."""
        return b"%b%b}" % (self._media, key.hex().encode())

    def named(self, key: bytes) -> bytes:
        """Return the key of the names of a file of media, beside it."""
        return b"%b%b}" % (self._named, key.hex().encode())

    def order(self, root: bytes) -> bytes:
        return self.orders[root[-1] % self.shards]

    def block(self, key: bytes) -> bytes:
        return b"%b%b}" % (self._place, b2a_base64(key, newline=False))

    def places(self, place: Place) -> tuple[bytes, bytes, bytes]:
        """Return the key of a place, its key in a crowded block, and its field. A name has no field."""
        if place.kind == NAME:
            key = self._name + place.key
            return key, key, b""
        block, field = self.block(place.key), field_of(place)
        return block, block + field, field

    def name(self, namespace: tuple[str, ...], name: str) -> bytes:
        return self._name + name_place(namespace, name).key

    def log(self, log: str) -> bytes:
        return self._log + encoded(log)

    def index(self, log: str) -> bytes:
        return self.indexes[xxh3_64_intdigest(encoded(log)) % self.shards]

    def dead(self, log: str) -> bytes:
        return self.deads[xxh3_64_intdigest(encoded(log)) % self.shards]

    def kind_of(self, key: bytes) -> bytes:
        """Return the letter of a key of this store, or nothing."""
        rest = key[len(self.prefix) :]
        return rest[:1] if rest[1:2] == b":" else b""


def field_of(place: Place) -> bytes:
    kind = KINDS[place.kind : place.kind + 1]
    return kind if kind == b"P" else kind + bytes((place.length % 256,)) + place.hash


def encoded(name: str) -> bytes:
    return name.encode("utf-8", "surrogatepass")
