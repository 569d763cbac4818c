"""Names of prefixes as replicas of a router send them to each other: eight bytes instead of a prompt.

The hashes are those of SGLang's gateway, so that both can be read side by side: the first eight bytes of blake3, little-endian,
of the text as UTF-8 or of the ids as 32-bit little-endian numbers.
"""

from __future__ import annotations

import array
import struct
import sys
from collections.abc import Sequence

import blake3

GLOBAL_EVICTION_HASH = 0
"""In place of a hash: "this tenant, everywhere". No prefix has it."""

WORDS = "iIlL"
"""Formats of arrays and memoryviews that are taken as they are, where their items have four bytes."""


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as 32-bit little-endian numbers.

    A list takes about 10 ns an id; an array or a memoryview of 32-bit numbers is copied as it is, and `bytes` are taken to be
    packed already.

    Raises:
        ValueError: an id that has no place in 32 bits, or bytes that are no whole ids.
    """
    if isinstance(ids, bytes):
        if len(ids) % 4:
            raise ValueError(f"{len(ids)} bytes are no whole 32-bit ids")
        return ids
    if isinstance(ids, memoryview | array.array) and ids.itemsize == 4 and sys.byteorder == "little":
        kind = ids.format if isinstance(ids, memoryview) else ids.typecode
        if kind in WORDS:
            return ids.tobytes()
    try:
        return struct.pack(f"<{len(ids)}i", *ids)
    except struct.error as error:
        raise ValueError(f"token ids have 32 bits: {error}") from None


def unpack_ids(packed: bytes) -> list[int]:
    """The opposite of `pack_ids`."""
    return list(struct.unpack(f"<{len(packed) // 4}i", packed))


def hash_node_path(text: str) -> int:
    """The name of a text. Half of a surrogate pair, which JSON can spell, is encoded as if it were a character."""
    return _name(blake3.blake3(text.encode("utf-8", "surrogatepass")).digest(8))


def hash_token_path(ids: Sequence[int]) -> int:
    """The name of token ids, as `pack_ids` takes them.

    Raises:
        ValueError: an id that has no place in 32 bits.
    """
    return _name(blake3.blake3(pack_ids(ids)).digest(8))


def _name(digest: bytes) -> int:
    return int.from_bytes(digest, "little") or 1
