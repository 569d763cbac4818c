"""What the ids of a chain spell, where that is not the text it was recorded under.

A client that goes on with ids (a partial rollout, resumed from what was retrieved) asks for the chain that they begin with. The
tree finds it by the ids; a store finds by text only, so such a chain is entered there under its spelling, too:

    text    "What is 2+2?"  "4"              "And 3+3?"  "6"
    ids      What is 2+2?    4<|im_end|>      And 3+3?    6<|im_end|>      the first end of turn has no text
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from middleware_hub.radix.node import Generation
from middleware_hub.spans.chain import ID_BYTES, SpanFlag, TokenSpan, chain_ids

_ODD = SpanFlag.WHOLE | SpanFlag.MISMATCH | SpanFlag.SPLIT | SpanFlag.RECUT | SpanFlag.FOREIGN


class Spelling:
    """Spells chains.

    Args:
        spell: returns the text of a client's ids.
        special: the ids that a worker may leave out of a text.
    """

    def __init__(self, spell: Callable[[Sequence[int]], str], special: Collection[int]) -> None:
        self._spell = spell
        self._special = frozenset(special)

    def apart(self, reply: TokenSpan, text: str) -> str | None:
        """Return what the chain of a reply spells without its hidden tail, if that is not its whole text; else None.

        The replies before it are stored. Where nothing is odd, the ids are only looked at, and not spelled.
        """
        if self._plain(reply):
            return None
        spelled = self._spell(memoryview(chain_ids(reply, reply.visible)).cast("i").tolist())
        return None if spelled == text else spelled

    def _plain(self, reply: TokenSpan) -> bool:
        if reply.flags & _ODD or reply.ends is not None:
            return False
        if not self._special.isdisjoint(memoryview(reply.ids[: ID_BYTES * reply.visible]).cast("i")):
            return False
        below = reply
        while below.parent is not None and not below.parent.sampled:
            if below.parent.flags & _ODD or below.parent.ends is not None or below.take < below.parent.count:
                return False
            below = below.parent
        span, take, start = below.parent, below.take, below.start
        if span is None:
            return True
        owner = span.owner
        if not isinstance(owner, Generation) or span.stored is None or not span.stored.plain or take < span.visible:
            return False
        kept, shown = take - span.visible, ""
        for token in owner.tail:
            if kept <= 0:
                break
            shown += token.text
            kept -= token.tokens
        return start - span.text_end == len(shown)
