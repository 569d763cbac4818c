"""Token ids as JSON, kept for the next turn: a worker is sent all ids of a conversation at every turn, and most are old.

Printing 10,000 ids takes longer than all else that is done for a turn. So the text of what a checkpoint's chain ends with is
kept for as long as there is room, least recently used ones go first; where it is gone, it is printed anew.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from middleware_hub.spans import ID_BYTES, unpack_ids

ROOM = 64 * 1024 * 1024
"""Bytes, for all sessions together."""

_encode = msgspec.json.Encoder().encode


class WrittenIds:
    """The JSON lists of chains, by the id of the checkpoint that they end with."""

    def __init__(self, room: int = ROOM) -> None:
        self._room = room
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._size = 0

    def write(self, packed: bytes, checkpoint: str | None, tokens: int) -> bytes:
        """All ids as a JSON list. The first `tokens` of them are a checkpoint's whole chain, if it is given."""
        known = None if checkpoint is None else self._kept.get(checkpoint)
        if known is None or checkpoint is None:
            return _encode(unpack_ids(packed))
        self._kept.move_to_end(checkpoint)
        return longer(known, packed[ID_BYTES * tokens :])

    def keep(self, checkpoint: str, written: bytes, parent: str | None) -> None:
        """Remember the list of a new checkpoint, in the place of the one that it goes on from: most conversations only go on."""
        if parent is not None:
            self._size -= len(self._kept.pop(parent, b""))
        self._kept[checkpoint] = written
        self._size += len(written)
        while self._size > self._room:
            _, gone = self._kept.popitem(last=False)
            self._size -= len(gone)


def longer(written: bytes, packed: bytes) -> bytes:
    """A (non-empty) JSON list with further ids."""
    return b"%b,%b" % (written[:-1], _encode(unpack_ids(packed))[1:]) if packed else written
