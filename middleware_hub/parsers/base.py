"""What a parser of sampled text is: the contract, and what all of them agree on.

Parsing never touches tokens; it only decides what a client is shown of a text whose ids are kept as they were sampled.

*A call is yielded whole*, when its last character has come, never a half. What cannot be (the start of) a call any more is
text, character for character, and goes out at once: held back are only what may still become a call, and white space before it.

*How the text is cut into pieces does not matter*: joined, the result is that of one `feed` of all of it.

*Each character is read once.* A call that turns out to be malformed is text up to the character that showed it, and reading
goes on from there: a call within what was read as a string or value of a broken one is not found, and nothing is quadratic.

*White space around calls* is nobody's content: a client sends a turn back as content and calls, and a template puts its own
white space between them. Text around a call that is only white space is dropped, and so are newlines directly before one.

*Without tools there are no calls*: everything is text. With tools, a call of a name that is not among them is a call all
the same; clients answer it with an error that the model can read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

from middleware_hub.chat.messages import Call, Reasoning, Text, Tool

Sampled = Text | Reasoning | Call
"""What sampled text is made of. Reasoning comes from call parsers only where a format marks both alike (`harmony`)."""


class CallParser(Protocol):
    """Tells calls from text, in one sampled text. A new one is made for each.

    Attributes:
        needs_special: whether it has to see special tokens: then the worker is asked with `skip_special_tokens: false`.
    """

    needs_special: ClassVar[bool]

    def __init__(self, tools: Sequence[Tool]) -> None: ...

    def feed(self, text: str) -> list[Sampled]:
        """What is certain by now, in order."""
        ...

    def finish(self) -> list[Sampled]:
        """The rest: the text is over."""
        ...


class ReasoningParser(Protocol):
    """Tells thought from speech, in one sampled text. A new one is made for each.

    Attributes:
        needs_special: as of `CallParser`.
    """

    needs_special: ClassVar[bool]

    def __init__(self, *, starts_inside: bool) -> None:
        """`starts_inside`: the prompt ended within a thought that it opened."""
        ...

    @classmethod
    def is_open(cls, prompt: str) -> bool:
        """Whether a rendered prompt ends within a thought."""
        ...

    @classmethod
    def last_opening(cls, text: str) -> int:
        """Where the last thought in a text begins, behind its tag; -1 if there is none. It may have ended since."""
        ...

    def feed(self, text: str) -> list[Text | Reasoning]:
        """What is certain by now, in order."""
        ...

    def finish(self) -> list[Text | Reasoning]:
        """The rest: the text is over."""
        ...
