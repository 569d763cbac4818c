"""Edited turns: a message that differs from the sampled one still keeps the tokens of everything before the edit.

Agents change replies: they cut a sentence, repair an argument, drop one of two calls. Such a message is another message, and
its conversation forks there. What stands before the edit keeps its ids (exactness.md, rule 5), spelled as the model spelled it,
with the reasoning that the client dropped:

    sampled   hm\\n</think>\\n\\n\\nI look.\\n\\n<tool_call>\\n{"name": "look", "arguments": {"path":  "/a"}}\\n</tool_call>
    written   hm\\n</think>\\n\\nI look.\\n<tool_call>\\n{"name": "look", "arguments": {"path": "/b"}}\\n</tool_call>
    sent      hm\\n</think>\\n\\n\\nI look.\\n\\n<tool_call>\\n{"name": "look", "arguments": {"path":  "/b"}}\\n</tool_call>
              `- sampled ids ----------------------------------------------------'`- encoded

The echo is compared with the turn as it was answered, segment by segment, so odd spaces and another spelling of arguments
before the edit cost nothing. The template shows how the echo would be written in the place of the turn, and a parser reads both
texts. The join of the two is sent only if the parser reads in it what the echo says.
"""

from __future__ import annotations

import logging
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, takewhile
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from middleware_hub.chat.call_ids import is_of
from middleware_hub.chat.keys import call_ids, said_by
from middleware_hub.chat.messages import ChatRequest, Message, Reasoning, SampledCall
from middleware_hub.parsers.base import Sampled, SampledParser
from middleware_hub.radix.node import common_length
from middleware_hub.sessions.prompt.echoes import (
    content_of,
    same_call,
    same_calls,
    same_text,
    sampled_text,
    schemas_of,
    shows_reasoning,
    without_reasoning,
)
from middleware_hub.sessions.prompt.join import OPENING, Codec, Join, join, join_in_place
from middleware_hub.sessions.prompt.tails import Tails
from middleware_hub.sessions.trie.nodes import Checkpoint, EditedMessage, PreparedTurn
from middleware_hub.spans.chain import SpanFlag, chain_ids, unpack_ids
from middleware_hub.spans.hidden_tail import spell_tail
from middleware_hub.templates.chat_template import ChatTemplate
from middleware_hub.templates.renderer import RenderingError
from middleware_hub.tokenizer.tokenizer import Tokenizer
from middleware_hub.tokenizer.vocabulary import Vocabulary
from router.config.sessions import History
from router.errors import BadRequestError

logger = logging.getLogger(__name__)

MakeParser = Callable[[], SampledParser]
"""Makes a parser of a turn's whole text, from behind its header on."""

_CLOSER = re.compile(r"[>\]})]")
"""The last character of a call, in all formats."""
_LONGEST_GAP = 64
"""Characters that may stand between the reasoning of a turn and its text or calls."""


class Segment(NamedTuple):
    """A piece of a turn's text: `piece`, which the text between `start` and `end` spells, without white space around it.

    The start of a call is the end of the segment before it: a format may have a text of its own between the two.
    """

    piece: Sampled
    start: int
    end: int


class Alike(NamedTuple):
    """Compares pieces of a sampled turn with pieces of an echo; its fields are arguments of `written_over`."""

    schemas: Mapping[str, Any]
    same_text: bool

    def __call__(self, one: Sampled, other: Sampled) -> bool:
        if isinstance(one, SampledCall) and isinstance(other, SampledCall):
            first, second = ({"function": {"name": call.name, "arguments": call.arguments}} for call in (one, other))
            return same_call(first, second, self.schemas)
        if isinstance(one, SampledCall) or isinstance(other, SampledCall):
            return False
        return self._texts(one.text, other.text)

    def all(self, pieces: Sequence[Sampled], wanted: Sequence[Sampled]) -> bool:
        """Whether two turns say the same but for their reasoning."""
        (text, calls), (other, called) = _told(pieces), _told(wanted)
        if len(calls) != len(called) or not self._texts(text, other):
            return False
        return all(self(one, another) for one, another in zip(calls, called, strict=True))

    def _texts(self, one: str, other: str) -> bool:
        return one.strip() == other.strip() if self.same_text else one == other


class KeptEcho(NamedTuple):
    """The part of a sampled turn that an echo keeps.

    Attributes:
        checkpoint: the turn.
        take: how many of its tokens are kept.
        text: the rest of the echo, to encode after them.
        rendered: whether `text` contains everything after the turn as well.
        all: whether everything that the client saw of the turn is kept. The text then either closes the turn or continues it.
    """

    checkpoint: Checkpoint
    take: int
    text: str
    rendered: bool
    all: bool


class EditedTurns:
    """Finds the sampled turns that a client has edited; see the top of this file.

    Args:
        make_parser: makes a parser for the whole text of a turn, from behind its header on.
        renderings: returns the whole conversation as it may be rendered (`Splicer.texts`).
        history: as of the `Composer`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        codec: Codec,
        tails: Tails,
        make_parser: Callable[[ChatRequest], SampledParser],
        renderings: Callable[[Checkpoint, ChatRequest], Sequence[str]],
        *,
        history: History,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._codec = codec
        self._tails = tails
        self._make_parser = make_parser
        self._renderings = renderings
        self._history = history

    def kept(
        self, turn: PreparedTurn, edited: EditedMessage, request: ChatRequest
    ) -> tuple[Checkpoint, Join, bool] | None:
        """Return the sampled turn that an edited echo is most like, how it is joined, and whether all of it is kept.

        None if the echo keeps no token of any turn.
        """
        vocabulary, codec, found = self._tokenizer.vocabulary, self._codec, list[KeptEcho]()
        meant = likeliest([one for one in edited.samples if usable(one)], request.messages[edited.at - 1])
        for checkpoint in meant:
            if self._history == "keep" and (text := self._written_over(checkpoint, edited.at, request)) is not None:
                found.append(keep(checkpoint, text, vocabulary))
        if not any(one.take for one in found):
            rendered = self._renderings(edited.samples[0], request)
            for checkpoint in meant:
                prompt = prompt_of(checkpoint, vocabulary)
                written = [text[len(prompt) :] for text in rendered if text.startswith(prompt)]
                found += [keep(checkpoint, text, vocabulary, rendered=True) for text in written]
        best = max(found, key=lambda one: (one.take, turn.names(one.checkpoint)), default=None)
        if best is None or not best.take:
            return None
        rest = best.text
        if not best.rendered:
            try:
                at = msgspec.structs.replace(turn, covered=edited.at)
                whole = self._template.reads(request.messages)
                rest += self._tails.text(at, request, whole=whole)
            except RenderingError as error:
                logger.info("the tail of an edited turn could not be rendered: %s", error)
                return None
        if best.all and not rest:
            return best.checkpoint, join_in_place(best.checkpoint, codec), True
        if best.all:
            opens = codec.encode_tail(rest[:OPENING])
            if not (best.rendered or best.text) or (opens and opens[0] in codec.special_ids):
                return best.checkpoint, join(best.checkpoint, rest, codec), True
            # Otherwise the text continues where the model had stopped, or behind the stop string that it spells.
            stop = tuple(takewhile(lambda token: not token.special, best.checkpoint.tail))
            taken, position = spell_tail(stop, rest, 0)
            return best.checkpoint, Join(best.take + taken, rest[position:]), False
        return best.checkpoint, Join(best.take, rest), False

    def _written_over(self, checkpoint: Checkpoint, at: int, request: ChatRequest) -> str | None:
        """Return the text of a turn in which only what an echo of it edits is written anew; None if that is unknown.

        `at`: the number of messages up to and including the echo.
        """
        messages, tools, options = request.messages, request.tools, request.template
        vocabulary, header = self._tokenizer.vocabulary, self._template.header(tools, options)
        opening = opening_of(checkpoint, header, vocabulary)
        given = messages[at - 1]
        echo = with_reasoning(checkpoint, given)
        if opening is None:
            return None
        try:
            written = self._template.turn([*messages[: at - 1], echo], tools, options)
        except (BadRequestError, RenderingError) as error:
            logger.info("an edited turn could not be written in its place: %s", error)
            return None
        if not written.startswith(header):
            return None
        said: Message = msgspec.json.decode(checkpoint.node.message)
        strips_alike = partial(self._template.strips_alike, options=options)
        return written_over(
            opening,
            sampled_text(checkpoint, vocabulary),
            written[len(header) :],
            partial(self._make_parser, request),
            schemas_of(tools),
            same_text=same_text(said, given, checkpoint, vocabulary, strips_alike),
            other_reasoning=other_reasoning(checkpoint, given),
        )


def with_reasoning(checkpoint: Checkpoint, echo: Message) -> Message:
    """Return an echo with the reasoning of its turn, which the client has dropped or moved into the content.

    Reasoning that the echo has itself is the client's: if it is not the turn's, the client has edited it.
    """
    own, content = content_of(msgspec.json.decode(checkpoint.node.message)) or "", content_of(echo)
    if not checkpoint.reasoning or other_reasoning(checkpoint, echo):
        return echo
    shown: Message = {**echo, "reasoning_content": checkpoint.reasoning}
    if content and shows_reasoning(own, checkpoint.reasoning, content):
        shown["content"] = without_reasoning(content, checkpoint.reasoning)
    return shown


def other_reasoning(checkpoint: Checkpoint, echo: Message) -> bool:
    """Whether an echo has reasoning that is not the turn's. White space in it does not count."""
    given = echo.get("reasoning_content")
    return isinstance(given, str) and bool(given.strip()) and given.split() != checkpoint.reasoning.split()


def likeliest(samples: Sequence[Checkpoint], echo: Message) -> list[Checkpoint]:
    """Return the sampled turns that a message most likely echoes, edited.

    The tokens that it would keep do not say so: it would keep the most of a turn with long reasoning, if the client has dropped
    its own.
    """
    found = [(_likeness(one, echo), one) for one in samples]
    most = max((like for like, _ in found), default=None)
    return [one for like, one in found if like == most]


def _likeness(checkpoint: Checkpoint, echo: Message) -> tuple[bool, bool, int]:
    """Return whether the ids of an echo's calls are of a turn, whether its reasoning is, and how many characters are."""
    said: Message = msgspec.json.decode(checkpoint.node.message)
    own, content = content_of(said) or "", content_of(echo) or ""
    thought = checkpoint.reasoning.split()
    alike = bool(thought) and not other_reasoning(checkpoint, echo)
    alike = alike and (bool(echo.get("reasoning_content")) or shows_reasoning(own, checkpoint.reasoning, content))
    if alike:
        content = without_reasoning(content, checkpoint.reasoning)
    common = common_length(own.strip(), content.strip(), 0)
    calls = [said_by(one) for one in said.get("tool_calls") or ()]
    common += sum(len(str(one)) for one in map(said_by, echo.get("tool_calls") or ()) if one in calls)
    return any(is_of(name, checkpoint.id) for name in call_ids(echo)), alike, common


def written_over(
    opening: str,
    sampled: str,
    written: str,
    make_parser: MakeParser,
    schemas: Mapping[str, Any],
    *,
    same_text: bool,
    other_reasoning: bool = False,
) -> str | None:
    """Return the text of a turn with everything that an echo leaves unedited as it was sampled; None if that is unknown.

    Args:
        opening: the beginning of the turn that the prompt has already, behind the header (`<think>\\n`).
        sampled: the text of the turn as it was sampled.
        written: the text of the echo as the template writes it, from behind the header on.
        schemas: of the tools' arguments, by name.
        same_text: whether the echo has the text of the turn (`echoes.same_text`): then no white space in it is an edit.
        other_reasoning: whether the client has edited the reasoning, before all else.
    """
    ours, alike = opening + sampled, Alike(schemas, same_text)
    wanted = _pieces(written, make_parser)
    other_reasoning = other_reasoning or _written_as_reasoning(ours, wanted, make_parser)
    cuts = [_aligned(ours, written, 0, 0)] if other_reasoning else _cuts(ours, written, make_parser, alike)
    for kept, rest in cuts:
        if kept < len(opening):
            continue
        text = ours[:kept] + written[rest:]
        if text == written or alike.all(_pieces(text, make_parser), wanted):
            return text[len(opening) :]
    return written[len(opening) :] if written.startswith(opening) else None


def _written_as_reasoning(ours: str, wanted: Sequence[Sampled], make_parser: MakeParser) -> bool:
    """Whether a template writes reasoning that a turn does not have: gpt-oss's writes the text beside calls so."""
    shown, own = (
        [one for one in pieces if isinstance(one, Reasoning)] for pieces in (wanted, _pieces(ours, make_parser))
    )
    return bool(shown) and [one.text.split() for one in shown] != [one.text.split() for one in own]


def _cuts(ours: str, written: str, make_parser: MakeParser, alike: Alike) -> Iterator[tuple[int, int]]:
    """Yield how much of a sampled text may be kept, and from where on the written one follows: the most first."""
    sampled, echoed = segments(ours, make_parser), segments(written, make_parser)
    equal: list[tuple[int, int]] = []
    thought = next((one for one in sampled if isinstance(one.piece, Reasoning)), None)
    shown = next((one for one in echoed if isinstance(one.piece, Reasoning)), None)
    gap: list[tuple[int, int]] = []
    if thought is not None:
        if shown is not None and alike(thought.piece, shown.piece):
            equal.append((thought.end, shown.end))
        else:  # the template writes no reasoning: what closes it is the model's own
            begin = echoed[0].start if echoed else 0
            ends = range(thought.end, min(len(ours), thought.end + _LONGEST_GAP) + 1)
            gap = [
                (end, begin)
                for end in reversed(ends)
                if end == len(ours) or ours[end - 1].isspace() or ours[end - 1] in ">]"
            ]
    told = [one for one in sampled if not isinstance(one.piece, Reasoning)]
    said = [one for one in echoed if not isinstance(one.piece, Reasoning)]
    for one, other in zip(told, said, strict=False):
        if not isinstance(one.piece, SampledCall) and not isinstance(other.piece, SampledCall):
            equal.append((one.start, other.start))
        if not alike(one.piece, other.piece):
            break
        equal.append((one.end, other.end))
    for kept, rest in reversed(equal):
        yield _aligned(ours, written, kept, rest)
        yield kept, rest
    yield from gap
    yield _aligned(ours, written, 0, 0)


def _aligned(ours: str, written: str, kept: int, rest: int) -> tuple[int, int]:
    """Return how far two texts go on alike from a place, whatever white space one of them has and the other has not."""
    while kept < len(ours) and rest < len(written):
        if ours[kept] == written[rest]:
            kept, rest = kept + 1, rest + 1
        elif ours[kept].isspace():
            kept += 1
        elif written[rest].isspace():
            rest += 1
        else:
            break
    return kept, rest


def segments(text: str, make_parser: MakeParser) -> list[Segment]:
    """Return the segments of a turn's text, as far as their places are certain."""
    found: list[Segment] = []
    pieces, ends, at = _pieces(text, make_parser), _ends_of_calls(text, make_parser), 0
    for piece in pieces:
        if isinstance(piece, SampledCall):
            end = next(ends)
            found.append(Segment(piece, at, end))
        else:
            body = piece.text.strip()
            start = text.find(body, at)
            if start < 0:
                break
            end = start + len(body)
            found.append(Segment(piece, start, end))
        at = end
    return found


def _ends_of_calls(text: str, make_parser: MakeParser) -> Iterator[int]:
    """Yield where each call of a text ends. A parser yields a call with its last character, but for one in open reasoning."""
    parser, at, count = make_parser(), 0, 0
    for closer in _CLOSER.finditer(text):
        for piece in parser.feed(text[at : closer.end()]):
            if isinstance(piece, SampledCall):
                count += 1
                yield closer.end()
        at = closer.end()
    while True:
        count += 1

        def has_call(end: int, number: int = count) -> bool:
            return sum(isinstance(piece, SampledCall) for piece in _pieces(text[:end], make_parser)) >= number

        yield bisect_left(range(len(text)), True, key=has_call)


def _pieces(text: str, make_parser: MakeParser) -> list[Sampled]:
    """Return the pieces of a turn's text that are not white space, neighbours of a kind joined."""
    parser = make_parser()
    found: list[Sampled] = []
    for kind, alike in groupby([*parser.feed(text), *parser.finish()], type):
        if kind is SampledCall:
            found += alike
        elif (joined := "".join(map(attrgetter("text"), alike))).strip():
            found.append(kind(joined))
    return found


def _told(pieces: Sequence[Sampled]) -> tuple[str, list[SampledCall]]:
    """Return the text and the calls of a turn."""
    text = "".join([one.text for one in pieces if not isinstance(one, SampledCall | Reasoning)])
    return text, [one for one in pieces if isinstance(one, SampledCall)]


def keep(checkpoint: Checkpoint, echo: str, vocabulary: Vocabulary, *, rendered: bool = False) -> KeptEcho:
    """Return the tokens of a sampled turn that lie wholly in the text that an echo shares with it.

    `echo`: as it may be written after the turn's prompt; with everything after it if the template `rendered` all of it.
    """
    span = checkpoint.span
    ids = unpack_ids(span.ids)[: span.visible]
    sampled = vocabulary.spell(ids)
    common: int | None = common_length(sampled, echo, 0)
    ends, take = vocabulary.counted(ids), 0
    while common is not None:
        take = int(ends.searchsorted(common, side="right"))
        while 0 < take < len(ids) and not vocabulary.piece(ids[take - 1]):
            take -= 1
        # Do not cut inside an added token that the echo spells: its rest would be encoded as something else.
        common = vocabulary.straddled(echo, int(ends[take - 1])) if take else None
    rest = echo[int(ends[take - 1]) if take else 0 :]
    return KeptEcho(checkpoint, take, rest, rendered, take == len(ids) and not checkpoint.shown)


def manner(checkpoint: Checkpoint, echo: Message) -> str:
    """Return how an echo differs from the sampled turn, as a word for a counter."""
    said: Message = msgspec.json.decode(checkpoint.node.message)
    content, own = content_of(echo), content_of(said)
    if content and own is not None and shows_reasoning(own, checkpoint.reasoning, content):
        return "reasoning"
    if not same_calls(said, echo, {}):
        return "calls"
    if content is not None and own is not None and content.strip() == own.strip():
        return "stripped"
    return "edited"


def usable(checkpoint: Checkpoint) -> bool:
    """Whether it is known which ids spell a turn's text."""
    return not checkpoint.span.flags & SpanFlag.MISMATCH


def prompt_of(checkpoint: Checkpoint, vocabulary: Vocabulary) -> str:
    span = checkpoint.span
    return vocabulary.spell(unpack_ids(chain_ids(span.parent, span.take)))


def opening_of(checkpoint: Checkpoint, header: str, vocabulary: Vocabulary) -> str | None:
    """Return the end of a turn's prompt, behind the header of the turn; None if it does not have the header."""
    if header and checkpoint.scaffold.startswith(header):
        return checkpoint.scaffold[len(header) :]
    prompt = prompt_of(checkpoint, vocabulary)
    return prompt[prompt.rfind(header) + len(header) :] if header and header in prompt else None
