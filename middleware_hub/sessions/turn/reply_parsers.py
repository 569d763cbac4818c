"""The parser of each reply, which must know where the reply begins: inside reasoning or outside.

Usually the template says so: it opens reasoning in the generation prompt, or does not. A turn that continues the last message
begins where that message ended, and a turn that was cut inside its reasoning ends there:

    <|im_start|>assistant\\n<think>\\nFirst I              cut: `reasoning_content` is "First I", `content` is empty
    <|im_start|>assistant\\n<think>\\nFirst I| look.\\n</think>\\n\\nHere.
                                     `-- the beginning -'`-- sampled now: " look." is reasoning too

So the parser reads the beginning of the turn before anything new. The text that it holds back of the beginning (newlines in
front of a possible end tag, half a tag) was sent to the client when the turn was cut, and is not sent again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

from middleware_hub import parsers
from middleware_hub.chat.messages import ChatRequest, Reasoning, SampledCall
from middleware_hub.parsers.base import CallParser, CallParsing, ReasoningParser, Sampled, SampledParser
from middleware_hub.parsers.formats.harmony import Harmony
from middleware_hub.parsers.reply import ReplyParser
from middleware_hub.sessions.turn.forced_calls import XGRAMMAR_FIELDS, after_reasoning, structural_tag
from middleware_hub.sessions.turn.plan import TurnPlan
from middleware_hub.spans.chain import ID_BYTES, unpack_ids
from middleware_hub.tokenizer.vocabulary import Vocabulary
from router.errors import BadRequestError

_TOKENS_A_CHARACTER = 4
"""The most tokens that one character needs: one for each byte of UTF-8."""
_MARKERS = 64
"""More tokens than any template writes around reasoning."""


class _Beginning(NamedTuple):
    """The beginning of a turn, and whether it is inside reasoning that was opened before it."""

    inside: bool
    text: str


class ReplyParsers:
    """Makes parsers for replies.

    Args:
        call_parser, reasoning_parser: their names. Raises BadRequestError for unknown names.
    """

    def __init__(self, vocabulary: Vocabulary, *, call_parser: str, reasoning_parser: str) -> None:
        self._vocabulary = vocabulary
        self._call_parser = call_parser
        self._calls, self._no_calls = (parsers.calls_beside(name, reasoning_parser) for name in (call_parser, "none"))
        self._reader = parsers.reasoning_parser(reasoning_parser)

    def sampling(self, plan: TurnPlan) -> dict[str, Any]:
        """Return the `sampling_params` that the parsers need: a grammar that forces calls, and special tokens in the text.

        Raises BadRequestError if the calls of this parser cannot be forced, or if reasoning cannot stay in the text.
        """
        request = plan.request
        if not request.separate_reasoning and self._calls.parser is Harmony:
            raise BadRequestError(
                "`separate_reasoning` cannot be false for this model: it writes reasoning, text and calls as messages in"
                " channels, and not as one text",
                param="separate_reasoning",
            )
        found: dict[str, Any] = {}
        if request.call_choice not in ("auto", "none") or request.allowed:
            found["structural_tag"] = structural_tag(
                self._call_parser,
                request.callable_tools,
                request.call_choice,
                request.allowed,
                parallel=request.parallel_calls,
                reasoning=self._opens_reasoning(plan),
            )
        if self._of(request).parser.needs_special or (self._reader is not None and self._reader.needs_special):
            found["skip_special_tokens"] = False
        return found

    def parser(self, plan: TurnPlan) -> SampledParser:
        request = plan.request
        parsing, tools = self._of(request), request.callable_tools
        if self._reader is None or not request.separate_reasoning:
            calls = parsing.of(tools)
            return self._resumed(calls, plan) if request.continue_final else calls
        beginning = self._beginning(plan)
        reader: ReasoningParser = self._reader(starts_inside=beginning.inside)
        if beginning.text:
            reader = ResumedParser(reader, self._reader(starts_inside=beginning.inside), beginning.text)
        return ReplyParser(partial(parsing.of, tools), reader)

    def let_reason(self, plan: TurnPlan, sampling: dict[str, Any]) -> None:
        """Have a grammar for the reply wait for the end of reasoning that the prompt opens, if the model writes it as text."""
        name = next((name for name in XGRAMMAR_FIELDS if sampling.get(name)), None)
        if name is None or self._reader is None or self._reader.needs_special or not self._opens_reasoning(plan):
            return
        behind = after_reasoning(name, sampling[name])
        if behind is not None:
            del sampling[name]
            sampling["structural_tag"] = behind

    def begun(self, request: ChatRequest) -> str:
        """Return the content of the last message, which is to be continued, if it begins a thought without its end; else ""."""
        if self._reader is None or not request.separate_reasoning:
            return ""
        content = request.messages[-1].get("content")
        if not isinstance(content, str) or self._reader.last_opening(content) < 0:
            return ""
        reader = self._reader(starts_inside=False)
        reader.feed(content)
        return content if reader.inside else ""

    def of_turn(self, request: ChatRequest) -> SampledParser:
        """Return a parser for the whole text of a turn, from behind its header on: with what the prompt has opened of it."""
        calls = partial(self._of(request).of, request.tools)
        if self._reader is None or not request.separate_reasoning:
            return calls()
        return ReplyParser(calls, self._reader(starts_inside=False))

    def _resumed(self, calls: CallParser, plan: TurnPlan) -> SampledParser:
        """Return a parser of calls that has read the beginning of its message, if its format has messages within a turn."""
        if not isinstance(calls, Harmony):
            return calls
        spelled = self._end_of(plan, _TOKENS_A_CHARACTER * (len(_said(plan)) + len(plan.reasoning_before())) + _MARKERS)
        at = spelled.rfind(Harmony.opening)
        other = self._of(plan.request).of(plan.request.callable_tools)
        return ResumedParser(calls, other, spelled[at:]) if at >= 0 else calls

    def _opens_reasoning(self, plan: TurnPlan) -> bool:
        if self._reader is None:
            return False
        beginning = self._beginning(plan)
        reader = self._reader(starts_inside=beginning.inside)
        reader.feed(beginning.text)
        found = [*reader.feed("x"), *reader.finish()]
        return bool(found) and isinstance(found[-1], Reasoning)

    def _of(self, request: ChatRequest) -> CallParsing:
        return (
            self._no_calls if request.call_choice == "none" or not (request.tools or request.deferred) else self._calls
        )

    def _beginning(self, plan: TurnPlan) -> _Beginning:
        assert self._reader is not None
        if not plan.request.continue_final:
            # Read from this prompt: a template may end it differently after a tool's answer than after a greeting.
            return _Beginning(self._reader.is_open(self._end_of(plan, _MARKERS)), "")
        said = _said(plan)
        spelled = self._end_of(plan, _TOKENS_A_CHARACTER * (len(said) + len(plan.reasoning_before())) + _MARKERS)
        front = spelled.removesuffix(said)
        if self._reader.last_opening(said) >= 0:
            return _Beginning(self._reader.is_open(front), said)  # the message itself opens its reasoning
        # The tokens decide: a template may leave the same reasoning open in one prompt and close it in another.
        at = self._reader.last_opening(front)
        return _Beginning(True, spelled[at:]) if at >= 0 else _Beginning(False, said)

    def _end_of(self, plan: TurnPlan, tokens: int) -> str:
        return self._vocabulary.lossy(unpack_ids(plan.prompt.ids.packed[-tokens * ID_BYTES :]))


def _said(plan: TurnPlan) -> str:
    """Return the content of the message that the turn continues."""
    content = plan.request.messages[-1].get("content")
    return content if isinstance(content, str) else ""


class ResumedParser:
    """A parser that has read the beginning of its text and yields only what comes after it."""

    needs_special: ClassVar[bool] = False
    """Part of the interface; never asked, because the resumed parser was asked instead."""

    def __init__(
        self, reader: SampledParser | ReasoningParser, other: SampledParser | ReasoningParser, text: str
    ) -> None:
        """`other` is a second parser in the same state as `reader`, used to find out what `reader` holds back."""
        self._reader = reader
        reader.feed(text)
        other.feed(text)
        self._sent = "".join([piece.text for piece in other.finish() if not isinstance(piece, SampledCall)])

    @property
    def inside(self) -> bool:
        return getattr(self._reader, "inside", False)

    @classmethod
    def is_open(cls, prompt: str) -> bool:
        return False

    @classmethod
    def last_opening(cls, text: str) -> int:
        return -1

    def feed(self, text: str) -> list[Any]:
        """Return what is certain by now, in the pieces of the reader."""
        return self._new(self._reader.feed(text))

    def finish(self) -> list[Any]:
        """Return the rest."""
        return self._new(self._reader.finish())

    def _new(self, found: Sequence[Sampled]) -> list[Sampled]:
        new: list[Sampled] = []
        for piece in found:
            if isinstance(piece, SampledCall):
                new.append(piece)
                continue
            text = piece.text
            if text.startswith(self._sent):
                text, self._sent = text[len(self._sent) :], ""
            elif self._sent.startswith(text):
                text, self._sent = "", self._sent[len(text) :]
            else:
                self._sent = ""  # the text differs from what was held back
            if text:
                new.append(type(piece)(text))
        return new
