"""Where a reply begins: within a thought, or outside of it. Its parser has to know, for it sees only what is sampled.

Mostly the template says so: it opens a thought in the generation prompt, or does not. A turn that goes on with the last message
goes on with whatever that ended in, and a turn that was cut within its thought ends in it:

    <|im_start|>assistant\\n<think>\\nFirst I              cut: `reasoning_content` is "First I", `content` is empty
    <|im_start|>assistant\\n<think>\\nFirst I| look.\\n</think>\\n\\nHere.
                                     `-- the beginning -'`-- sampled now: " look." is a thought, too

So the parser is shown the beginning of the turn before it is given anything new. What it holds back of it (newlines in front of
what may be the end tag, half a tag) was told when the turn was cut, and is not told again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from middleware_hub import parsers
from middleware_hub.chat.messages import ChatRequest, Reasoning, Text
from middleware_hub.parsers.base import ReasoningParser
from middleware_hub.parsers.reply import ReplyParser
from middleware_hub.sessions.prompt.composed_prompt import ComposedPrompt
from middleware_hub.sessions.trie.nodes import PreparedTurn
from middleware_hub.spans.chain import ID_BYTES, unpack_ids
from middleware_hub.tokenizer.vocabulary import Vocabulary

_TOKENS_A_CHARACTER = 4
"""At most: one for each byte of UTF-8."""
_MARKERS = 64
"""Tokens that a template writes around a thought; more than any does."""


class _Beginning(NamedTuple):
    """The beginning of a turn, and whether it stands within a thought that was opened in front of it."""

    inside: bool
    text: str


class Thoughts:
    """Makes parsers for replies.

    Args:
        vocabulary: spells prompts.
        call_parser, reasoning_parser: their names.
    """

    def __init__(self, vocabulary: Vocabulary, *, call_parser: str, reasoning_parser: str) -> None:
        self._vocabulary = vocabulary
        self._call_parser = call_parser
        self._reasoning_parser = reasoning_parser
        self._reader = parsers.reasoning_parser(reasoning_parser)

    def needs_special(self, request: ChatRequest) -> bool:
        """Whether a parser has to see special tokens."""
        return self._plain(request).needs_special

    def _plain(self, request: ChatRequest) -> ReplyParser:
        return parsers.create(self._calls(request), self._reasoning_parser, request.tools, starts_inside=False)

    def _calls(self, request: ChatRequest) -> str:
        return "none" if request.call_choice == "none" or not request.tools else self._call_parser

    def parser(self, request: ChatRequest, turn: PreparedTurn, prompt: ComposedPrompt) -> ReplyParser:
        """For one sample of a prompt."""
        if self._reader is None:
            return self._plain(request)
        beginning = self._beginning(request, turn, prompt)
        reader: ReasoningParser = self._reader(starts_inside=beginning.inside)
        if beginning.text:
            reader = Resumed(reader, self._reader(starts_inside=beginning.inside), beginning.text)
        return ReplyParser(parsers.call_parser(self._calls(request))(request.tools or ()), reader)

    def open(self, request: ChatRequest, turn: PreparedTurn, prompt: ComposedPrompt) -> bool:
        """Whether the prompt ends within a thought."""
        if self._reader is None:
            return False
        beginning = self._beginning(request, turn, prompt)
        reader = self._reader(starts_inside=beginning.inside)
        reader.feed(beginning.text)
        found = [*reader.feed("x"), *reader.finish()]
        return bool(found) and isinstance(found[-1], Reasoning)

    def _beginning(self, request: ChatRequest, turn: PreparedTurn, prompt: ComposedPrompt) -> _Beginning:
        assert self._reader is not None
        if not request.continue_final:
            # Of this very prompt: behind a tool's answer a template may write another end than behind a greeting.
            return _Beginning(self._reader.is_open(self._end_of(prompt, _MARKERS)), "")
        content = request.messages[-1].get("content")
        said = content if isinstance(content, str) else ""
        thought = thought_before(request, turn, prompt)
        spelled = self._end_of(prompt, _TOKENS_A_CHARACTER * (len(said) + len(thought)) + _MARKERS)
        front = spelled.removesuffix(said)
        if self._reader.last_opening(said) >= 0:
            return _Beginning(self._reader.is_open(front), said)  # it opens its thought by itself
        # What the tokens say counts: the same thought is open in one prompt, and closed by the template in another.
        at = self._reader.last_opening(front)
        return _Beginning(True, spelled[at:]) if at >= 0 else _Beginning(False, said)

    def _end_of(self, prompt: ComposedPrompt, tokens: int) -> str:
        return self._vocabulary.lossy(unpack_ids(prompt.ids.packed[-tokens * ID_BYTES :]))


def thought_before(request: ChatRequest, turn: PreparedTurn, prompt: ComposedPrompt) -> str:
    """What was thought in the message that a turn goes on with: as it was sampled, else as the client has it."""
    checkpoint = prompt.checkpoint
    if checkpoint is not None and checkpoint.node is turn.node:
        return checkpoint.reasoning
    found = request.messages[-1].get("reasoning_content")
    return found if isinstance(found, str) else ""


class Resumed:
    """A parser that has read the beginning of its text, and says nothing of that any more."""

    needs_special: ClassVar[bool] = False
    """Nobody asks it: what it resumes has been asked."""

    def __init__(self, reader: ReasoningParser, other: ReasoningParser, text: str) -> None:
        """`other` is a second one, in the same state as `reader`, to find out what `reader` holds back."""
        self._reader = reader
        reader.feed(text)
        other.feed(text)
        self._told = "".join([piece.text for piece in other.finish()])

    @classmethod
    def is_open(cls, prompt: str) -> bool:
        """Nobody asks it, either."""
        return False

    @classmethod
    def last_opening(cls, text: str) -> int:
        """Nor this."""
        return -1

    def feed(self, text: str) -> list[Text | Reasoning]:
        """See `ReasoningParser`."""
        return self._new(self._reader.feed(text))

    def finish(self) -> list[Text | Reasoning]:
        """See `ReasoningParser`."""
        return self._new(self._reader.finish())

    def _new(self, found: Sequence[Text | Reasoning]) -> list[Text | Reasoning]:
        new: list[Text | Reasoning] = []
        for piece in found:
            text = piece.text
            if text.startswith(self._told):
                text, self._told = text[len(self._told) :], ""
            elif self._told.startswith(text):
                text, self._told = "", self._told[len(text) :]
            else:
                self._told = ""  # it was no part of what is told
            if text:
                new.append(type(piece)(text))
        return new
