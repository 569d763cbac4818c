"""The ids of whole prompts, packed and as JSON, kept for the next turn.

A worker receives all ids of a conversation at every turn. Nearly all of them are old, and gathering and printing 10,000 ids
takes longer than everything else in a turn. So the prompt of each checkpoint is kept as long as there is room; the least
recently used one is dropped first. A dropped prompt is gathered from its spans and printed again.
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


class PromptIds(NamedTuple):
    """The same ids twice: packed as spans keep them, and written as a JSON list."""

    packed: bytes
    written: bytes

    @classmethod
    def of(cls, packed: bytes) -> PromptIds:
        return cls(packed, _encode(unpack_ids(packed)))

    def then(self, packed: bytes) -> PromptIds:
        if not packed:
            return self
        if not self.packed:
            return PromptIds.of(packed)
        # One copy of what may be megabytes: `join` knows the length of its result, and `%` does not.
        written = b",".join((memoryview(self.written)[:-1], memoryview(_encode(unpack_ids(packed)))[1:]))
        return PromptIds(self.packed + packed, written)


class PromptIdsCache:
    """The ids of checkpoints' prompts. A turn that continues a checkpoint appends what was sampled after its prompt."""

    def __init__(self, room: int = ROOM) -> None:
        self._room = room
        self._kept: OrderedDict[str, PromptIds] = OrderedDict()
        self._size = 0

    def of(self, span: TokenSpan, take: int, checkpoint: Checkpoint | None) -> PromptIds:
        """Return the ids of a chain, which may begin with all of a checkpoint's chain."""
        prompt = None if checkpoint is None else self._kept.get(checkpoint.id)
        if prompt is None or checkpoint is None:
            return PromptIds.of(chain_ids(span, take))
        self._kept.move_to_end(checkpoint.id)
        sampled = checkpoint.span.ids
        return prompt.then(sampled if span is checkpoint.span else sampled + span.ids[: ID_BYTES * take])

    def keep(self, checkpoint: Checkpoint, prompt: PromptIds) -> None:
        """Remember the prompt of a new checkpoint in place of its parent's: most conversations only grow."""
        if checkpoint.parent is not None:
            gone = self._kept.pop(checkpoint.parent.id, None)
            if gone is not None:
                self._size -= len(gone.packed) + len(gone.written)
        self._kept[checkpoint.id] = prompt
        self._size += len(prompt.packed) + len(prompt.written)
        while self._size > self._room:
            _, gone = self._kept.popitem(last=False)
            self._size -= len(gone.packed) + len(gone.written)
