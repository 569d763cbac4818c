"""The contract of a parser of sampled text, the rules that all of them keep, and the parser that finds nothing.

Parsing never touches tokens; it only decides how a client sees a text whose ids are kept as they were sampled.

*A call is yielded whole*, when its last character has arrived. Text that can no longer be (the start of) a call is passed on at
once, character for character: only what may still become a call is held back, with the white space before it.

*How the text is cut into pieces does not matter*: joined, the result is that of one `feed` of the whole text.

*Each character is read once.* A malformed call is text up to the character that showed it, and reading goes on from there:
a call inside a string or value of a broken one is not found, and nothing is quadratic.

*White space around calls* belongs to neither side: a client sends a turn back as content and calls, and a template puts its
own white space between them. Text around a call that is only white space is dropped, and so are newlines directly before one.

*Without tools there are no calls*: everything is text. With tools, a call of an unknown name is still a call: clients answer it
with an error that the model can read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol

from middleware_hub.chat.messages import Reasoning, SampledCall, Text, Tool

Sampled = Text | Reasoning | SampledCall
"""The pieces of sampled text. Parsers of calls yield reasoning only where a format marks both alike (`harmony`)."""


class SampledParser(Protocol):
    """Separates one sampled text. Each text needs a new one."""

    def feed(self, text: str) -> list[Sampled]:
        """Return the pieces that are certain by now, in order."""
        ...

    def finish(self) -> list[Sampled]:
        """Return the rest at the end of the text."""
        ...


class CallParser(SampledParser, Protocol):
    """Separates calls from text.

    Attributes:
        needs_special: whether it has to see special tokens, so that the worker is asked with `skip_special_tokens: false`.
    """

    needs_special: ClassVar[bool]

    def __init__(self, tools: Sequence[Tool]) -> None: ...


class CallParsing(NamedTuple):
    """How calls are parsed: by which class, and whether it is given the tools. Without any it finds no calls."""

    parser: type[CallParser]
    finds: bool

    def of(self, tools: Sequence[Tool] | None) -> CallParser:
        """Return a parser for one sampled text; `tools`: the tools that the model was offered."""
        return self.parser((tools or ()) if self.finds else ())


class ReasoningParser(Protocol):
    """Separates reasoning from the reply, in one sampled text. Each text needs a new one.

    Attributes:
        needs_special: as for `CallParser`.
        inside: whether the text so far ends inside reasoning. Calls in reasoning that ends with the text are calls. A class
            without this attribute keeps all of them as reasoning.
        over: whether all that follows is text, as it comes: then it need not be fed. A class may lack this attribute.
    """

    needs_special: ClassVar[bool]

    def __init__(self, *, starts_inside: bool) -> None:
        """Make a parser; `starts_inside` says that the prompt ended inside reasoning that it opened."""
        ...

    @property
    def inside(self) -> bool: ...

    @classmethod
    def is_open(cls, prompt: str) -> bool:
        """Return whether a rendered prompt ends inside reasoning."""
        ...

    @classmethod
    def last_opening(cls, text: str) -> int:
        """Return where the last reasoning in a text begins, after its tag; -1 if there is none. It may have ended since."""
        ...

    def feed(self, text: str) -> list[Text | Reasoning]:
        """Return the pieces that are certain by now, in order."""
        ...

    def finish(self) -> list[Text | Reasoning]:
        """Return the rest at the end of the text."""
        ...


class Plain:
    """`none`: everything is text."""

    names: ClassVar[tuple[str, ...]] = ("none",)
    template_tags: ClassVar[tuple[str, ...]] = ()
    needs_special: ClassVar[bool] = False

    def __init__(self, tools: Sequence[Tool]) -> None:
        pass

    def feed(self, text: str) -> list[Sampled]:
        return [Text(text)] if text else []

    def finish(self) -> list[Sampled]:
        return []
