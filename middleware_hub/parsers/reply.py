"""A sampled text, separated into reasoning, text and calls.

A call inside reasoning is a draft, and stays reasoning, if the reasoning is closed behind it. If the text ends inside the
reasoning, the first call ended it: models forget the end tag, and engines read their calls all the same. Text behind such a
call is text.

    I look. <tool_call>...</tool_call> Done.                            end     reasoning, call, text
    I look. <tool_call>...</tool_call> No: </think> It rains.                   reasoning, text
            ^ from here on a stream holds back what it reads, until one of the two shows
"""

from __future__ import annotations

from collections.abc import Callable

from middleware_hub.chat.messages import Reasoning, SampledCall, Text
from middleware_hub.parsers.base import CallParser, ReasoningParser, Sampled


class ReplyParser:
    """Separates reasoning first, then calls from the rest; see the top of this file.

    Args:
        calls: makes a parser of calls; one reads the text, and one the reasoning as long as it is open.
        reasoning: the parser of reasoning.
    """

    def __init__(self, calls: Callable[[], CallParser], reasoning: ReasoningParser) -> None:
        self._calls = calls()
        self._reasoning = reasoning
        self._unclosed = _UnclosedReasoning(calls())
        self._over = False  # whether the reasoning is, so that all the rest is for the parser of calls

    @property
    def needs_special(self) -> bool:
        """Return whether to ask the worker with `skip_special_tokens: false`."""
        return self._calls.needs_special or self._reasoning.needs_special

    def feed(self, text: str) -> list[Sampled]:
        if self._over:
            return self._calls.feed(text)
        found = self._read(self._reasoning.feed(text))
        self._over = getattr(self._reasoning, "over", False)  # as with `inside`
        return found

    def finish(self) -> list[Sampled]:
        found = self._read(self._reasoning.finish())
        return found + self._unclosed.finish() + self._calls.finish()

    def _read(self, pieces: list[Text | Reasoning]) -> list[Sampled]:
        found: list[Sampled] = []
        # Parsers of others may lack the attribute, see `ReasoningParser`.
        inside = getattr(self._reasoning, "inside", False)
        for piece in pieces:
            if isinstance(piece, Reasoning):
                found += self._unclosed.feed(piece.text)
            else:
                found += self._unclosed.close() + self._calls.feed(piece.text)
        return found if inside else found + self._unclosed.close()


class _UnclosedReasoning:
    """Reasoning in which calls are looked for, because it may never be closed.

    Text for the parser of calls is reasoning and goes on at once. From the first call on everything is held back.
    """

    def __init__(self, calls: CallParser) -> None:
        self._calls: CallParser | None = calls
        """None as soon as the reasoning is closed."""
        self._begun = False
        self._held: list[str] = []
        """The text that has been read and not been passed on."""
        self._found: list[Sampled] = []
        """The first call and everything after it."""

    def feed(self, text: str) -> list[Sampled]:
        if self._calls is None:
            return [Reasoning(text)]
        self._begun = True
        self._held.append(text)
        return self._passed_on(self._calls.feed(text))

    def close(self) -> list[Sampled]:
        """Return the rest of reasoning that is closed, if there was any: all of it is reasoning."""
        if not self._begun:
            return []
        held = "".join(self._held)
        self._calls = None
        self._held.clear()
        return [Reasoning(held)] if held else []

    def finish(self) -> list[Sampled]:
        """Return the rest of reasoning that was never closed, with its calls."""
        if self._calls is None:
            return []
        return self._passed_on(self._calls.finish()) + self._found

    def _passed_on(self, pieces: list[Sampled]) -> list[Sampled]:
        passed: list[Sampled] = []
        for piece in pieces:
            if self._found or isinstance(piece, SampledCall):
                self._found.append(piece)
            else:
                passed.append(Reasoning(piece.text))
        if said := sum(len(piece.text) for piece in passed if isinstance(piece, Reasoning)):
            self._held[:] = ["".join(self._held)[said:]]
        return passed
