"""Parsers that are driven by a grammar, and how text and calls alternate in them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

from middleware_hub.chat.messages import Reasoning, SampledCall, Text, Tool
from middleware_hub.parsers.base import Sampled
from middleware_hub.parsers.reader import WHITE, Malformed, Reading, Tags, TextReader
from middleware_hub.parsers.schema import Schemas

NEWLINES = "\r\n"


class Pieces:
    """The pieces that were parsed, without the white space around calls. See `base` for the rule.

    White space is held back as long as a call may follow it: all of it if there was no text since the last call or the
    beginning, otherwise only newlines.
    """

    def __init__(self) -> None:
        self._done: list[Sampled] = []
        self._said: list[str] = []  # the text or reasoning of the piece after them
        self._kind: type[Text] | type[Reasoning] = Text
        self._white: list[str] = []
        self._blank = True
        self._after_call = False

    def text(self, text: str) -> None:
        if not text.strip(WHITE if self._blank else NEWLINES):
            if text:
                self._white.append(text)
            return
        self._blank = False
        self._flush()
        body = text.rstrip(NEWLINES)
        self._say(Text, body)
        if len(body) < len(text):
            self._white.append(text[len(body) :])

    def reasoning(self, text: str) -> None:
        if not self._blank:
            self._flush()
        self._say(Reasoning, text)

    def call(self, call: SampledCall) -> None:
        self._white.clear()
        self._end_piece()
        self._done.append(call)
        self._blank = self._after_call = True

    def end(self) -> None:
        if self._blank and self._after_call:
            self._white.clear()
        self._flush()

    def take(self) -> list[Sampled]:
        """Return the pieces since the last time, with equal neighbours joined."""
        self._end_piece()
        done, self._done = self._done, []
        return done

    def _say(self, kind: type[Text] | type[Reasoning], text: str) -> None:
        if kind is not self._kind:
            self._end_piece()
            self._kind = kind
        self._said.append(text)

    def _end_piece(self) -> None:
        if whole := "".join(self._said):
            self._done.append(self._kind(whole))
        self._said.clear()

    def _flush(self) -> None:
        if self._white:
            self._say(Text, "".join(self._white))
            self._white.clear()


class GrammarParser(ABC):
    """Feeds a grammar with text as it arrives, and returns the pieces that the grammar made."""

    names: ClassVar[tuple[str, ...]]
    """As in options: ours first, then SGLang's and vLLM's for `--tool-call-parser`."""
    template_tags: ClassVar[tuple[str, ...]]
    """Tags that a chat template spells if its model writes this format."""
    needs_special: ClassVar[bool] = False

    def __init__(self) -> None:
        self.reader = TextReader()
        self.pieces = Pieces()
        self._reading = self.read()

    @abstractmethod
    def read(self) -> Reading[None]:
        """Read all of `reader` into `pieces`. This is the grammar."""

    def feed(self, text: str) -> list[Sampled]:
        self.reader.feed(text)
        next(self._reading, None)
        return self.pieces.take()

    def finish(self) -> list[Sampled]:
        self.reader.end()
        next(self._reading, None)
        self.pieces.end()
        return self.pieces.take()

    def text_before(self, tags: Tags) -> Reading[str]:
        """Take as text everything before one of these tags. Return the tag, which begins `taken`; empty at the end."""
        reader = self.reader
        while True:
            before, tag = reader.ahead(tags)
            self.pieces.text(before)
            reader.begin()
            if tag:
                reader.at += len(tag)
                return tag
            if reader.ended:
                return ""
            yield


class TaggedParser(GrammarParser):
    """Text, and calls that begin with a tag. Text that only begins like a call is text too."""

    opening: ClassVar[Tags]
    trailer: Tags | None = None
    """May occur once after a call, with white space before it: both are dropped with the call."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__()
        self.tools = tools
        self.unclosed = False
        """Whether a call was just read, and no trailer after it."""

    @cached_property
    def schemas(self) -> Schemas:
        return Schemas(self.tools)

    @abstractmethod
    def call(self, opening: str) -> Reading[SampledCall]:
        """Return the call whose opening tag has been read. Raises Malformed if it is not a call."""

    def next_opening(self) -> Reading[str]:
        """Return the opening tag of the next possible call, and take everything before it as text. Empty at the end."""
        return self.text_before(self.opening)

    def read(self) -> Reading[None]:
        while opening := (yield from self.next_opening()):
            try:
                call = yield from self.call(opening)
            except Malformed:
                self.pieces.text(self.reader.taken())
                continue
            self.pieces.call(call)
            if self.trailer is not None:
                white = yield from self.reader.white()
                self.unclosed = not (yield from self.reader.maybe(self.trailer))
                if self.unclosed:
                    self.pieces.text(white)

    def feed(self, text: str) -> list[Sampled]:
        if not self.tools:
            return [Text(text)] if text else []
        return super().feed(text)


class SectionParser(TaggedParser):
    """Text, and calls in sections: a section opens with a tag, ends with its trailer, and has calls and white space inside."""

    beginning: ClassVar[Tags]
    """Begins each call of a section. Outside of one it is text."""

    def next_opening(self) -> Reading[str]:
        if self.unclosed:
            self.unclosed = False
            self.reader.begin()
            found = yield from self.reader.maybe(self.beginning)
            if found:
                return found
        return (yield from super().next_opening())

    def call(self, opening: str) -> Reading[SampledCall]:
        if opening not in self.beginning.tags:
            yield from self.reader.white()
            yield from self.reader.expect(self.beginning)
        return (yield from self.begun())

    @abstractmethod
    def begun(self) -> Reading[SampledCall]:
        """Return the call whose beginning has been read. Raises Malformed if it is not a call."""
