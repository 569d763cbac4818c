"""Hashes of blocks of token ids, as in the `kv_index` crate of SGLang's gateway.

A block's content hash is xxh3-64 over its ids as little-endian u32. Its prefix hash distinguishes it from the same ids after
another prefix: for the first block it is the content hash; for each further block it is taken over the previous prefix hash and
the block's content hash, eight little-endian bytes each. All hashes use the same seed.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence

from xxhash import xxh3_64_intdigest

_SEED = 1337
_pair = struct.Struct("<QQ").pack


def content_hashes(ids: Sequence[int], block_size: int) -> Iterator[int]:
    """Return a lazy iterator over the content hashes of a prompt's whole blocks; none for a block size below 1.

    A memoryview or array of 32-bit integers is not copied item by item, which saves a third of the time. Raises OverflowError,
    before the first hash, for an id that does not fit into u32.
    """
    data = _packed(ids)
    step = 4 * block_size
    if step <= 0:
        return iter(())
    return (xxh3_64_intdigest(data[start : start + step], _SEED) for start in range(0, len(data) - step + 1, step))


def prefix_hash(before: int | None, content: int) -> int:
    """Return the prefix hash of a block with this content hash after the prefix hash `before`; None for the first block."""
    return content if before is None else xxh3_64_intdigest(_pair(before, content), _SEED)


def prefix_hashes(contents: Iterable[int], root: int | None = None) -> Iterator[int]:
    """Yield the prefix hashes of consecutive blocks. `root` is the prefix hash in front of the first."""
    before = root
    for content in contents:
        # Inlined `prefix_hash`: calling it would double the cost.
        before = content if before is None else xxh3_64_intdigest(_pair(before, content), _SEED)
        yield before


def root_of(*names: str | None) -> int | None:
    """Return the prefix hash in front of blocks that only requests with these names share: an adapter, a salt.

    None if every name is missing: all requests share those blocks.
    """
    if not any(names):
        return None
    # The lengths make ("ab", "c") and ("a", "bc") differ.
    spelled = "".join(f"{len(name)}:{name}" for name in (one or "" for one in names))
    return xxh3_64_intdigest(spelled.encode("utf-8", "surrogatepass"), _SEED)


def _packed(ids: Sequence[int]) -> bytes:
    # Native byte order: little-endian on every supported machine.
    if isinstance(ids, (array, memoryview)) and ids.itemsize == 4:
        return ids.tobytes()
    return array("I", ids).tobytes()
