"""The ids of whole prompts, packed and as JSON, kept for the next turn.

A worker is sent all ids of a conversation at every turn. Nearly all of them are old, and to gather and print 10,000 takes
longer than all else that is done for a turn. So the prompt of a checkpoint is kept for as long as there is room, least
recently used ones go first; where it is gone, it is gathered from the spans, and printed anew.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import msgspec

from middleware_hub.sessions.trie.nodes import Checkpoint
from middleware_hub.spans.chain import ID_BYTES, TokenSpan, chain_ids, unpack_ids

ROOM = 64 * 1024 * 1024
"""Bytes, for all sessions together."""

_encode = msgspec.json.Encoder().encode


class Ids(NamedTuple):
    """The same ids twice: as spans keep them, and as a JSON list."""

    packed: bytes
    written: bytes

    @classmethod
    def of(cls, packed: bytes) -> Ids:
        """Print them."""
        return cls(packed, _encode(unpack_ids(packed)))

    def then(self, packed: bytes) -> Ids:
        """These, and further ones."""
        if not packed:
            return self
        if not self.packed:
            return Ids.of(packed)
        return Ids(self.packed + packed, b"%b,%b" % (self.written[:-1], _encode(unpack_ids(packed))[1:]))

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.packed) + len(self.written)


class WrittenIds:
    """The ids of checkpoints' prompts; what was sampled behind one is put to it when a turn goes on from there."""

    def __init__(self, room: int = ROOM) -> None:
        self._room = room
        self._kept: OrderedDict[str, Ids] = OrderedDict()
        self._size = 0

    def of(self, span: TokenSpan, take: int, checkpoint: Checkpoint | None) -> Ids:
        """The ids of a chain, which may be one that begins with all of a checkpoint's."""
        prompt = None if checkpoint is None else self._kept.get(checkpoint.id)
        if prompt is None or checkpoint is None:
            return Ids.of(chain_ids(span, take))
        self._kept.move_to_end(checkpoint.id)
        sampled = checkpoint.span.ids
        return prompt.then(sampled if span is checkpoint.span else sampled + span.ids[: ID_BYTES * take])

    def keep(self, checkpoint: Checkpoint, prompt: Ids) -> None:
        """Remember those of a new checkpoint, in the place of the one that it goes on from: most conversations only go on."""
        if checkpoint.parent is not None:
            gone = self._kept.pop(checkpoint.parent.id, None)
            self._size -= 0 if gone is None else gone.size
        self._kept[checkpoint.id] = prompt
        self._size += prompt.size
        while self._size > self._room:
            self._size -= self._kept.popitem(last=False)[1].size
