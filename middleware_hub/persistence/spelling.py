"""The decoded ids of a chain, where they differ from the text under which it was recorded.

A client that continues with ids (a partial rollout, resumed from a retrieval) asks for the chain with which they begin. The
tree finds it by the ids; a store finds by text only, so such a chain is also entered there under its spelling:

    text    "What is 2+2?"  "4"              "And 3+3?"  "6"
    ids      What is 2+2?    4<|im_end|>      And 3+3?    6<|im_end|>      the first end of turn has no text

The spelling of a chain continues the spelling of the reply before it. Only the end of that is kept (`TextEnd`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Sequence
from typing import Final

import numpy as np

from middleware_hub.radix.node import Generation
from middleware_hub.spans.chain import ID_BYTES, SpanFlag, TokenSpan, chain_ids, links
from middleware_hub.store.paths import BLOCK, TextEnd, TextPath

_ODD: Final = SpanFlag.WHOLE | SpanFlag.MISMATCH | SpanFlag.SPLIT | SpanFlag.RECUT | SpanFlag.FOREIGN
_BROKEN: Final = "\ufffd"
"""Stands for half a character, whose other half may follow."""


class Spelling:
    """Spells chains.

    Args:
        spell: returns the text of a client's ids.
        spell_on: returns the text of ids that follow others.
        special: the ids that a worker may leave out of a text.
    """

    start = 16
    """Tokens after which a chain is not spelled like a start any more: a BOS, and the space after it."""

    def __init__(
        self, spell: Callable[[Sequence[int]], str], spell_on: Callable[[Sequence[int]], str], special: Collection[int]
    ) -> None:
        self._spell = spell
        self._spell_on = spell_on
        ids = [i for i in special if i >= 0]
        self._special = np.zeros(max(ids, default=-1) + 2, bool)  # the last one stands for all ids after it
        self._special[ids] = True

    def apart(self, reply: TokenSpan, path: TextPath, line: TokenSpan | None) -> tuple[bool, TextEnd | None]:
        """Return whether the chain of a reply spells its whole text without its hidden tail; if not, where that ends.

        The replies before it are stored. If the end of the last one is known, only what follows it is checked.

        Args:
            path: of the whole text of the reply.
            line: the complete reply that its prompt continued.
        """
        if path.text.endswith(_BROKEN) and (end := self._completed(reply, path)) is not None:
            return False, end
        straight, first = self._straight(reply), reply
        while first.parent is not None and not first.parent.sampled:
            straight = straight and first.take == first.parent.count and self._straight(first.parent)
            first = first.parent
        if straight and (self._begins(first) if first.parent is None else self._goes_on(first)):
            return True, None
        end = self._end_before(first, path, line)
        if end is not None:
            assert first.parent is not None
            new = self._tail(first.parent, first.take)
            new += (
                path.text[first.start : reply.text_end] if straight else self._spell_on(_ids_from(reply, first.offset))
            )
        else:
            end, at = self._earlier_end(first)
            new = "" if end is None else self._spell_on(_ids_from(reply, at))
        if end is not None:
            end = None if _BROKEN in new else end.longer(new)
        if end is None:
            whole = self._joined(reply, path.text) or self._spell(_numbers(chain_ids(reply, reply.visible)))
            end = TextPath(path.namespace, whole).end()
        same = end.length == len(path.text) and end.place() == path.end().place()
        return (True, None) if same else (False, end)

    def _completed(self, reply: TokenSpan, path: TextPath) -> TextEnd | None:
        """Return where the chain of a reply ends if its hidden tail completes the character with which its text ends.

        No text goes on from such an end by the spelling of that tail alone, which begins in the middle of the character.
        """
        shown = self._spell(_numbers(chain_ids(reply, reply.visible)))
        for take in range(reply.visible + 1, reply.count + 1):
            whole = self._spell(_numbers(chain_ids(reply, take)))
            if not whole.startswith(shown) and not whole.endswith(_BROKEN):
                return TextPath(path.namespace, whole).end()
        return None

    def _straight(self, span: TokenSpan) -> bool:
        """Return whether the ids of a span spell its text; False if that is unknown."""
        if span.flags & _ODD or span.ends is not None:
            return False
        if not span.sampled:
            return True
        if span.flags & SpanFlag.DUMMY:  # the text lacks the first space of the reply
            return False
        ids = np.frombuffer(span.ids, np.int32, span.visible)
        return not np.count_nonzero(self._special.take(ids, mode="clip"))

    def _begins(self, first: TokenSpan) -> bool:
        """Return whether a chain's spelling begins where its text does: not if the text has a BOS, or the space after it."""
        ids = _numbers(chain_ids(first, min(len(first), self.start)))
        left_out = len(self._spell_on(ids)) - len(self._spell(ids))
        bos = len(self._spell_on(ids[:1])) if first.flags & SpanFlag.BOS else 0
        return left_out == bos + bool(first.flags & SpanFlag.DUMMY)

    @staticmethod
    def _goes_on(first: TokenSpan) -> bool:
        """Return whether the chain before a span spells its text, up to the beginning of the span."""
        span = first.parent
        assert span is not None
        if span.stored is None or not span.stored.plain or first.take < span.visible:
            return False
        if not isinstance(span.owner, Generation):
            return False
        kept, shown = first.take - span.visible, 0
        for token in span.owner.tail:
            if kept <= 0:
                break
            shown += len(token.text)
            kept -= token.tokens
        return first.start - span.text_end == shown

    def _joined(self, reply: TokenSpan, text: str) -> str | None:
        """Return the spelling of a reply's chain, given its text: in a tenth of the time of spelling all ids.

        The spans have the characters of the text, and the hidden tails between them are spelled. None if that is not all.
        """
        parts: list[str] = []
        for span, take in links(reply, reply.visible):
            if span.offset < self.start:
                parts.append(self._spell(_numbers(chain_ids(span, take))))
                break
            if take < span.visible or not self._straight(span):
                return None
            parts += (self._tail(span, take), text[span.start : span.text_end])
        spelled = "".join(reversed(parts))
        return None if _BROKEN in spelled else spelled

    def _tail(self, span: TokenSpan, take: int) -> str:
        """Return the spelling of a span's hidden tail, of which a chain has so many tokens."""
        kept, owner = take - span.visible, span.owner
        if not kept:
            return ""
        if isinstance(owner, Generation) and len(owner.tail) == kept == 1 and owner.tail[0].special:
            return owner.tail[0].text
        return self._spell_on(_numbers(span.ids[ID_BYTES * span.visible : ID_BYTES * take]))

    def _end_before(self, first: TokenSpan, path: TextPath, line: TokenSpan | None) -> TextEnd | None:
        """Return where the spelling of the reply before a span ends, if that is known and more text may be joined to it.

        More text may be joined if the spelling does not end in a broken character, which the next token would complete.
        """
        span = first.parent
        if span is None or span.stored is None or first.take < span.visible or span.offset + span.visible < self.start:
            return None
        end: TextEnd | None = span.stored.spelled
        state = span.stored.state
        if end is None and span.stored.plain and span is line and state is not None:
            end = TextEnd(state, path.text[BLOCK * state.blocks : span.text_end])
        return end if _goes_on_after(end) else None

    def _earlier_end(self, first: TokenSpan) -> tuple[TextEnd | None, int]:
        """Return the last known end of a chain's spelling before a span, and the number of tokens up to it.

        The reply just before the span came from the store, which does not say where its spelling ends; one before it was
        recorded here.
        """
        for span, take in links(first.parent, first.take):
            end = None if span.stored is None or take < span.visible else span.stored.spelled
            if _goes_on_after(end) and span.offset + span.visible >= self.start:
                return end, span.offset + span.visible
        return None, 0


def _goes_on_after(end: TextEnd | None) -> bool:
    """Return whether an end is known to which more text may be joined."""
    return end is not None and end.rest[-1:] not in ("", _BROKEN)


def _ids_from(reply: TokenSpan, at: int) -> array[int]:
    """Return the ids of a chain from a token on, without its hidden tail."""
    return _numbers(chain_ids(reply, reply.visible)[ID_BYTES * at :])


def _numbers(ids: bytes) -> array[int]:
    return array("i", ids)
