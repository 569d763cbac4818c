"""A prompt as a chain, and what there is to know about it."""

from __future__ import annotations

import msgspec

from middleware_hub.sessions.prompt.written_ids import Ids
from middleware_hub.sessions.trie.nodes import Checkpoint
from middleware_hub.spans.chain import ID_BYTES, TokenSpan, links


class ComposedPrompt(msgspec.Struct, frozen=True, gc=False):
    """What a worker is sent for a turn.

    Attributes:
        checkpoint: what it goes on from; None if it was encoded as a whole.
        span, take: the chain: the first `take` tokens of `span`, behind all that is before it.
        ids: all of them.
        reused: how many of them were in the checkpoint's chain.
        reasons: see the top of `composing`.
        apart: it is a branch of its own, though it goes on from the checkpoint's chain.
        spliced: so many earlier turns kept their ids in a new rendering.
        left_out: sampled tokens at the end of the checkpoint that are not in the prompt.
        edited: how the client edited the checkpoint's message (see `edited_turns`); empty if it did not.
        scaffold: the generation prompt at its end; empty if that is not known.
        fallbacks: why earlier turns did not keep their ids, or not all of them: one of `FALLBACKS` for each attempt.
    """

    checkpoint: Checkpoint | None
    span: TokenSpan
    take: int
    ids: Ids
    reused: int
    reasons: tuple[str, ...] = ()
    left_out: int = 0
    apart: bool = False
    spliced: int = 0
    scaffold: str = ""
    fallbacks: tuple[str, ...] = ()
    edited: str = ""

    @property
    def parent(self) -> str | None:
        """The last generation whose tokens are all in it, as far as its client saw them."""
        checkpoint = self.checkpoint
        if checkpoint is not None and self.edited and self.apart:
            checkpoint = checkpoint.parent
        return None if checkpoint is None else checkpoint.id

    def holds(self, generation_id: str | None) -> bool:
        """Whether tokens of a generation are in it, as they were sampled."""
        return generation_id is not None and any(span.named(generation_id) for span, _ in links(self.span, self.take))

    @property
    def tokens(self) -> int:
        """How long it is."""
        return len(self.ids.packed) // ID_BYTES
