"""A sampled text, separated into reasoning, text and calls."""

from __future__ import annotations

from collections.abc import Sequence

from middleware_hub.chat.messages import Reasoning, Text
from middleware_hub.parsers.base import CallParser, ReasoningParser, Sampled


class ReplyParser:
    """Separates reasoning first, then calls from the rest. A call inside reasoning is reasoning."""

    def __init__(self, calls: CallParser, reasoning: ReasoningParser) -> None:
        self._calls = calls
        self._reasoning = reasoning

    @property
    def needs_special(self) -> bool:
        """Return whether to ask the worker with `skip_special_tokens: false`."""
        return self._calls.needs_special or self._reasoning.needs_special

    def feed(self, text: str) -> list[Sampled]:
        """Return what is certain by now, in order."""
        return self._without_reasoning(self._reasoning.feed(text))

    def finish(self) -> list[Sampled]:
        """Return the rest at the end of the text."""
        return self._without_reasoning(self._reasoning.finish()) + self._calls.finish()

    def _without_reasoning(self, pieces: Sequence[Text | Reasoning]) -> list[Sampled]:
        found: list[Sampled] = []
        for piece in pieces:
            if isinstance(piece, Text):
                found += self._calls.feed(piece.text)
            else:
                found.append(piece)
        return found
