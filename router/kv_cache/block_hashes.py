"""Hashes of blocks of token ids, as in the `kv_index` crate of SGLang's gateway.

A block's content hash is xxh3-64 over its ids as little-endian u32. Its prefix hash tells it apart from the same ids behind
another beginning: the first block's is its content hash, each further one's is taken over the prefix hash before it and its own
content hash, eight little-endian bytes each. All with one seed.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence

from xxhash import xxh3_64_intdigest

_SEED = 1337
_pair = struct.Struct("<QQ").pack


def content_hashes(ids: Sequence[int], block_size: int) -> Iterator[int]:
    """The hashes of the whole blocks of a prompt, computed as they are asked for; a shorter rest is no block, and blocks of
    no size are none.

    A memoryview or array of 32-bit numbers is taken as it is, which saves a third of the time. OverflowError, at once, for what
    is no u32.
    """
    data = _packed(ids)
    step = 4 * block_size
    if step <= 0:
        return iter(())
    return (xxh3_64_intdigest(data[start : start + step], _SEED) for start in range(0, len(data) - step + 1, step))


def prefix_hash(before: int | None, content: int) -> int:
    """The prefix hash of the block with this content behind the block with that prefix hash; behind None, it is the first."""
    return content if before is None else xxh3_64_intdigest(_pair(before, content), _SEED)


def prefix_hashes(contents: Iterable[int], root: int | None = None) -> Iterator[int]:
    """The prefix hashes of blocks one behind the other, computed as they are asked for. `root` stands before the first."""
    before = root
    for content in contents:
        # Written out: `prefix_hash` would cost as much again to call.
        before = content if before is None else xxh3_64_intdigest(_pair(before, content), _SEED)
        yield before


def root_of(*names: str | None) -> int | None:
    """What stands before the first block of those who share with nobody else: of an adapter, of a salt. None if all share."""
    if not any(names):
        return None
    # Lengths make ("ab", "c") and ("a", "bc") differ.
    spelled = "".join(f"{len(name)}:{name}" for name in (one or "" for one in names))
    return xxh3_64_intdigest(spelled.encode("utf-8", "surrogatepass"), _SEED)


def _packed(ids: Sequence[int]) -> bytes:
    # Native byte order, which is little-endian on every machine that this runs on.
    if isinstance(ids, (array, memoryview)) and ids.itemsize == 4:
        return ids.tobytes()
    return array("I", ids).tobytes()
