"""Token ids as a prefix tree keeps them: unsigned 32-bit integers, little-endian."""

from __future__ import annotations

import array
import struct
import sys
from collections.abc import Sequence

WORDS = "iIlL"
"""Formats of arrays and memoryviews that are copied as they are if their items have four bytes."""


def pack_ids(ids: Sequence[int]) -> bytes:
    """Pack token ids.

    A list takes about 10 ns an id. An array or a memoryview of 32-bit integers is copied as it is, and `bytes` count as packed.

    Raises:
        ValueError: an id is negative or needs more than 32 bits, or the length of `bytes` is no multiple of four.
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
        return struct.pack(f"<{len(ids)}I", *ids)
    except struct.error as error:
        raise ValueError(f"a token id is a number from 0 to 2^32 - 1: {error}") from None


def unpack_ids(packed: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(packed) // 4}I", packed))
