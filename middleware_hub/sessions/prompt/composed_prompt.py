"""A prompt as a chain, and the reasons that are counted and kept with its turn (see docs/sessions.md).

spliced             earlier turns kept their ids in a new rendering
template_error      the tail could not be found in the template's rendering
rewritten           `--history template`, and the template writes earlier turns differently from what was sent
setting             the tools or template options have changed
divergence          the text rendered between earlier turns is not what was sent
sentinel_collision  a turn does not occur exactly once in the rendering
scaffold            a turn is opened in an unknown way
unfaithful          the sampled tokens may not be what the client was shown
left_out            a turn that had stopped is continued in place, without the token that it stopped with
edited_turn         a message is an edited echo of a sampled one: the chain covers what they have in common
rewritten_turn      the same, and they have nothing in common
prefix_changed      a message was sampled in this session behind other messages: it is context here
rendered_whole      the short rendering of a tail was not what the template writes for these messages: all is rendered now
system_in_place     a system message is written where it stands, as a marked message of the user's
arguments_text      arguments of a call that was not sampled here are no JSON object, and the template writes objects
template_mismatch   the verifier found that the ids and a full rendering differ in more than sampled text
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from middleware_hub.sessions.trie.nodes import Checkpoint
from middleware_hub.spans.chain import ID_BYTES, TokenSpan, chain_ids, links, unpack_ids
from middleware_hub.spans.media import MediaSpan

EDITED_TURN = "edited_turn"
REWRITTEN_TURN = "rewritten_turn"
PREFIX_CHANGED = "prefix_changed"
LEFT_OUT = "left_out"
REMARKS = frozenset({EDITED_TURN, REWRITTEN_TURN, PREFIX_CHANGED, "system_in_place", "arguments_text"})
"""Reasons that do not say why a prompt was rendered anew."""
FALLBACKS = frozenset({"divergence", "sentinel_collision", "scaffold", "unfaithful", "template_error"})
"""Why earlier turns did not keep their ids, or not all of them."""
ROOM = 64 * 1024 * 1024
"""Bytes of the prompts that are kept, for all sessions together."""
_OVERHEAD = 320
"""Bytes that a kept prompt takes besides its ids: its objects, its name, and its place."""

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


class ComposedPrompt(msgspec.Struct, frozen=True, gc=False):
    """The prompt that a worker is sent for a turn.

    Attributes:
        checkpoint: the sampled turn that it continues; None if it was encoded as a whole.
        span, take: the chain: all spans before `span`, then the first `take` tokens of `span`.
        ids: all of them, and in `tokens` how many.
        reused: how many of the ids are from the checkpoint's chain.
        reasons: see the top of this file.
        left_out: the number of sampled tokens at the end of the checkpoint that the prompt does not contain.
        apart: whether it begins a branch although it continues the checkpoint's chain.
        spliced: how many earlier turns kept their ids in a new rendering.
        scaffold: the generation prompt at its end; empty if unknown.
        fallbacks: why earlier turns did not keep their ids, or not all of them: one of `FALLBACKS` for each attempt.
        edited: how the client edited the checkpoint's message (see `edited_turns`); empty if it did not.
        media: the media spans among the ids; a picture whose length no engine has told yet has one id.
        reply: the reply that it continues, if that was sampled for a text after the checkpoint (see `KnownText`).
    """

    checkpoint: Checkpoint | None
    span: TokenSpan
    take: int
    ids: PromptIds
    tokens: int
    reused: int
    reasons: tuple[str, ...] = ()
    left_out: int = 0
    apart: bool = False
    spliced: int = 0
    scaffold: str = ""
    fallbacks: tuple[str, ...] = ()
    edited: str = ""
    reply: str = ""
    media: tuple[MediaSpan, ...] = ()

    @property
    def parent(self) -> str | None:
        """The last generation whose tokens are all in the prompt, up to where its client saw them."""
        checkpoint = self.checkpoint
        if self.reply:
            return self.reply
        if checkpoint is not None and self.edited and self.apart:
            checkpoint = checkpoint.parent
        return None if checkpoint is None else checkpoint.id

    def holds(self, generation_id: str | None) -> bool:
        """Whether the prompt contains tokens of a generation as they were sampled."""
        return generation_id is not None and any(span.named(generation_id) for span, _ in links(self.span, self.take))


class PromptIdsCache:
    """The ids of checkpoints' prompts. A turn that continues a checkpoint appends what was sampled after its prompt.

    A worker receives all ids of a conversation at every turn. Nearly all of them are old, and gathering and printing 10,000
    ids takes longer than everything else in a turn. So the prompt of each checkpoint is kept as long as there is room; the
    least recently used one is dropped first. A dropped prompt is gathered from its spans and printed again. `size` and `room`
    are in bytes.
    """

    def __init__(self, room: int = ROOM) -> None:
        self._room = room
        self._kept: OrderedDict[str, PromptIds] = OrderedDict()
        self.size = 0

    def __len__(self) -> int:
        return len(self._kept)

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
                self.size -= len(gone.packed) + len(gone.written) + _OVERHEAD
        self._kept[checkpoint.id] = prompt
        self.size += len(prompt.packed) + len(prompt.written) + _OVERHEAD
        while self.size > self._room:
            _, gone = self._kept.popitem(last=False)
            self.size -= len(gone.packed) + len(gone.written) + _OVERHEAD

    def forget(self, checkpoints: Iterable[Checkpoint]) -> None:
        """Forget the prompts of checkpoints that nothing will continue."""
        for checkpoint in checkpoints:
            gone = self._kept.pop(checkpoint.id, None)
            if gone is not None:
                self.size -= len(gone.packed) + len(gone.written) + _OVERHEAD
