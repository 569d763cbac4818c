"""A sampled text, taken apart: what is thought, what is said, what is called."""

from __future__ import annotations

from collections.abc import Sequence

from middleware_hub.chat.messages import Reasoning, Text
from middleware_hub.parsers.base import CallParser, ReasoningParser, Sampled


class ReplyParser:
    """Tells reasoning from speech first, then calls from text in the speech. A call within a thought is a thought."""

    def __init__(self, calls: CallParser, reasoning: ReasoningParser | None = None) -> None:
        self._calls = calls
        self._reasoning = reasoning

    @property
    def needs_special(self) -> bool:
        """Whether the worker is to be asked with `skip_special_tokens: false`."""
        return self._calls.needs_special or (self._reasoning is not None and self._reasoning.needs_special)

    def feed(self, text: str) -> list[Sampled]:
        """What is certain by now, in order."""
        if self._reasoning is None:
            return self._calls.feed(text)
        return self._without_reasoning(self._reasoning.feed(text))

    def finish(self) -> list[Sampled]:
        """The rest: the text is over."""
        rest = [] if self._reasoning is None else self._without_reasoning(self._reasoning.finish())
        return rest + self._calls.finish()

    def _without_reasoning(self, pieces: Sequence[Text | Reasoning]) -> list[Sampled]:
        found: list[Sampled] = []
        for piece in pieces:
            if isinstance(piece, Text):
                found += self._calls.feed(piece.text)
            else:
                found.append(piece)
        return found
