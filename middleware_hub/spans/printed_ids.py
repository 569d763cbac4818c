"""Packed token ids, printed as JSON.

A worker gets all ids of a conversation at every turn, and nearly all of them are old. So they are printed without a Python
object for each: a table has every number in eight bytes, and one call of numpy picks the right ones (1 ns an id, where Python
integers take 20). The blanks before a short number mean nothing in JSON.
"""

from __future__ import annotations

from functools import cache

import msgspec
import numpy as np
from numpy.typing import NDArray

from middleware_hub.spans.chain import unpack_ids

TABLE = 300_000
"""Ids below this are in the table (2.4 MB): no vocabulary is larger. A list with other ids takes longer."""


def printed_ids(packed: bytes) -> bytes:
    """Return packed ids as a JSON list."""
    try:
        numbers = _table().take(np.frombuffer(packed, np.uint32))
    except IndexError:
        return msgspec.json.encode(unpack_ids(packed))
    return b"".join((b"[", numbers.view(np.uint8)[:-1].data, b"]"))  # without the last comma


@cache
def _table() -> NDArray[np.uint64]:
    """Return the numbers from 0 on, each as eight bytes: blanks, digits and a comma."""
    table = np.empty((TABLE // 1000, 1000, 2), np.uint32)
    table[:, :, 0] = _words([b"    ", *(b"%4d" % thousands for thousands in range(1, TABLE // 1000))])[:, None]
    table[:, :, 1] = _words([b"%03d," % rest for rest in range(1000)])
    table[0, :, 1] = _words([b"%3d," % number for number in range(1000)])
    return table.view(np.uint64).ravel()


def _words(fours: list[bytes]) -> NDArray[np.uint32]:
    return np.frombuffer(b"".join(fours), np.uint32)
