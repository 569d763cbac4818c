"""Reads the spool files of earlier versions, which had a format of their own; nothing writes them any more.

    head | batch | batch | done up to here | batch | batch | zeros          each: length (4 bytes) | seal of (kind | data)

The data of a batch begins with the number of its replies (4 bytes).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from middleware_hub.store.errors import DamagedRecordError
from middleware_hub.store.records import FORMAT, unseal

_HEAD: Final = b"H"
_DONE: Final = b"D"
_NUMBER: Final = 4


class EarlierFile:
    """Reads a file of earlier versions.

    Attributes:
        head: the owner, as JSON; None if it cannot be read.
        batches: offset, replies and content of each batch that waits.
        torn_bytes, damaged: unreadable bytes at its end, and unreadable batches within.
    """

    def __init__(self, descriptor: int) -> None:
        self._size = os.fstat(descriptor).st_size
        self._data = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) if self._size else b""
        self._view = memoryview(self._data)
        self.head: memoryview | None = None
        self.batches: list[tuple[int, int, memoryview]] = []
        self.damaged = at = 0
        for begin, end, data in self._frames():
            self.damaged += begin > at
            at = end
            kind = bytes(data[:1])
            if kind == _HEAD and not begin:
                self.head = data[1:]
            elif kind == _DONE:
                before = int.from_bytes(data[1:], "big")
                self.batches = [batch for batch in self.batches if batch[0] >= before]
            else:
                self.batches.append((begin, int.from_bytes(data[1 : 1 + _NUMBER], "big"), data[1 + _NUMBER :]))
        self.torn_bytes = len(bytes(self._view[at:]).rstrip(b"\0"))

    def _frames(self) -> Iterator[tuple[int, int, memoryview]]:
        """Yield where whole frames begin and end, and their data; what is between two of them is damaged."""
        at = 0
        while at >= 0:
            end = at + _NUMBER + int.from_bytes(self._view[at : at + _NUMBER], "big")
            with suppress(DamagedRecordError):
                if at + _NUMBER < end <= self._size:
                    yield at, end, unseal(self._view[at + _NUMBER : end])
                    at = end
                    continue
            # The format follows the length of each frame.
            at = max(self._data.find(bytes((FORMAT,)), at + _NUMBER + 1) - _NUMBER, -1)
