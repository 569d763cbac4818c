"""A rendering of a whole conversation: which turns of a chain it contains, and whether a chain agrees with it."""

from __future__ import annotations

import logging
import re
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from middleware_hub.chat.messages import ChatRequest
from middleware_hub.sessions.prompt.join import Codec, Join, join
from middleware_hub.sessions.prompt.splice import sampled_messages, splice
from middleware_hub.sessions.prompt.verifier import ChainPart, Difference, differences
from middleware_hub.sessions.trie.nodes import Checkpoint
from middleware_hub.spans.chain import ID_BYTES, SpanFlag, TokenSpan, links
from middleware_hub.templates.chat_template import ChatTemplate
from middleware_hub.templates.renderer import RenderingError
from middleware_hub.tokenizer.tokenizer import Tokenizer
from router.engines.form.limits import TextTooLongError
from router.errors import BadRequestError

logger = logging.getLogger(__name__)

LONG_TURN = 3600
"""Seconds that a turn may take."""


class Resident(NamedTuple):
    """The turns of a lineage that have kept their place in a new rendering: what a worker has in its cache.

    Attributes:
        messages: the number of their messages.
        last: the last of these turns.
        tail: what is rendered after it.
        reason: why these are not all turns; empty if they are.
    """

    messages: int
    last: Checkpoint | None
    tail: str
    reason: str


class WholeRendering:
    """Renders whole conversations, and compares chains with them."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, codec: Codec) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._codec = codec
        vocabulary = tokenizer.vocabulary
        literals = sorted((vocabulary.literal(i) for i in vocabulary.special_ids), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, filter(None, literals))) or r"(?!)")

    def text(self, request: ChatRequest, template: ChatTemplate | None = None) -> str:
        """Render a conversation. Raises BadRequestError, RenderingError."""
        return (template or self._template).whole(
            request.messages, request.tools, request.template, continue_final=request.continue_final
        )

    def texts(self, checkpoint: Checkpoint, request: ChatRequest) -> list[str]:
        """Render a conversation that contains a checkpoint: with today's date, and with those of its beginning.

        Empty if the template cannot write it, or refuses it.
        """
        with suppress(BadRequestError, RenderingError):
            return [self.text(request, template) for template in (self._template, *self._other_days(checkpoint))]
        return []

    def extends(self, checkpoint: Checkpoint, request: ChatRequest) -> bool:
        """Whether the rendering begins with what a checkpoint's chain spells."""
        spelled = "".join([part.text for part in self._parts(checkpoint.span, checkpoint.span.visible)])
        return any(
            whole.startswith(spelled)
            or self._tokenizer.spell_prompt(self._tokenizer.encode_start(whole)).startswith(spelled)
            for whole in self.texts(checkpoint, request)
        )

    def residents(self, checkpoint: Checkpoint, request: ChatRequest) -> Resident:
        """Return the turns of a lineage that keep their place when everything is rendered again."""
        found: list[Resident] = []
        for template in (self._template, *self._other_days(checkpoint)):
            found.append(self._residents(template, checkpoint, request))
            if found[-1].last is checkpoint:
                return found[-1]
        return max(found, key=lambda one: one.messages)

    def _residents(self, template: ChatTemplate, checkpoint: Checkpoint, request: ChatRequest) -> Resident:
        messages = sampled_messages(_unedited(checkpoint))
        reason = ""
        while messages:
            marked = [turns[-1].node.depth - 1 for turns in messages]
            try:
                pieces, tail = template.transcript(
                    request.messages, marked, request.tools, request.template, continue_final=request.continue_final
                )
            except BadRequestError as error:  # the template refuses sentinels in the place of these turns
                logger.info("earlier turns are not spliced: %s", error)
                return Resident(0, None, "", "template_error")
            except RenderingError as error:
                logger.info("earlier turns are not spliced: %s", error)
                messages, reason = messages[: error.turns], error.reason
                continue
            turns = [turn for one in messages for turn in one]
            found = splice(pieces, turns, self._template.scaffolds(request.tools, request.template), self._codec)
            if not found.reason:
                read = self._tail_behind(template, request, marked, tail)
                if read is None:
                    return Resident(0, None, "", "divergence")
                return Resident(len(messages), messages[-1][-1], read, reason)
            messages, reason = messages[: found.messages], found.reason
        return Resident(0, None, "", reason)

    def verify(self, span: TokenSpan, take: int, request: ChatRequest, checkpoint: Checkpoint, joined: Join) -> None:
        """Mark a context if the ids differ from a rendering of the whole in more than sampled text."""
        parts = self._parts(span, take)
        try:
            expected = self.text(request)
            found = self._hard_differences(expected, parts, request)
            if not found:
                return
            dated = [self.text(request, template) for template in self._other_days(checkpoint)]
        except (BadRequestError, RenderingError) as error:
            logger.warning("a turn could not be verified: %s", error)
            return
        if not all(self._hard_differences(text, parts, request) for text in dated):
            return
        # A template that drops reasoning may drop special tokens with it, while everything around the turns is unchanged.
        if self._stands(checkpoint, joined, request):
            return
        # A tokenizer that normalizes (NFC) spells its own ids differently from the text that it was given.
        with suppress(TextTooLongError):
            for text in (expected, *dated):
                spelled = self._tokenizer.vocabulary.spell(self._tokenizer.encode_start(text))
                if not self._hard_differences(spelled, parts, request):
                    return
        shown = "; ".join(map(str, found[:3]))
        logger.warning("a turn is not what the chat template makes of its messages: %s", shown)
        span.flags |= SpanFlag.UNLIKE

    def _hard_differences(self, expected: str, parts: Sequence[ChainPart], request: ChatRequest) -> list[Difference]:
        header = self._template.header(request.tools, request.template)
        found = differences(expected, parts, self._special, header=header, asked=not request.continue_final)
        return [one for one in found if one.hard]

    def _tail_behind(
        self, template: ChatTemplate, request: ChatRequest, marked: Sequence[int], tail: str
    ) -> str | None:
        """Return what is rendered after the turns themselves, if the template reads them: `tail` follows sentinels.

        None if it cannot be told apart from the turns.
        """
        messages, last = request.messages, marked[-1]
        if not tail or not template.reads([messages[at] for at in marked]):
            return tail
        try:
            whole = self.text(request, template)
            if not whole.endswith(tail):
                tail = template.tail(
                    messages[last],
                    messages[last + 1 :],
                    request.tools,
                    request.template,
                    earlier=messages[:last],
                    continue_final=request.continue_final,
                    whole=True,
                )
            return tail if whole.endswith(tail) else None
        except (BadRequestError, RenderingError):
            return None

    def _stands(self, checkpoint: Checkpoint, joined: Join, request: ChatRequest) -> bool:
        """Whether every sampled turn can be spliced into a rendering of the whole, with the same text after it.

        Behind an edited turn only the text after the last one counts: no rendering has the edited turn as it was sampled, and
        what precedes it was compared when it was sent.
        """
        if len(_unedited(checkpoint)) == sum(1 for _ in checkpoint.lineage()):
            found = self.residents(checkpoint, request)
            tail = found.tail if found.last is checkpoint else ""
        else:
            marked = [checkpoint.node.depth - 1]
            try:
                _, behind = self._template.transcript(
                    request.messages, marked, request.tools, request.template, continue_final=request.continue_final
                )
            except (BadRequestError, RenderingError):
                return False
            tail = self._tail_behind(self._template, request, marked, behind) or ""
        return bool(tail) and join(checkpoint, tail, self._codec) == joined

    def _other_days(self, checkpoint: Checkpoint) -> Iterator[ChatTemplate]:
        """Yield the template as it was when the conversation began, if it writes the date and that was another one.

        A checkpoint has the time of its commit. Its prompt may have been rendered the day before.
        """
        *_, first = checkpoint.lineage()
        return self._template.on_other_days((first.time, first.time - LONG_TURN))

    def _parts(self, span: TokenSpan, take: int) -> Sequence[ChainPart]:
        spell = self._tokenizer.vocabulary.spell
        parts = [
            ChainPart(spell(array("i", part.ids[: ID_BYTES * count])), part.versions is not None)
            for part, count in links(span, take)
        ]
        parts.reverse()
        return parts


def codec_of(tokenizer: Tokenizer, stop_literals: Sequence[str] = ()) -> Codec:
    """Return what joins and splices need of a tokenizer. `stop_literals` are those that end a template's turns."""
    spell, start = tokenizer.vocabulary.spell, tokenizer.encode_start("x")
    literals = {*stop_literals, tokenizer.special_tokens_map.get("eos_token")}
    stops = [i for i in tokenizer.vocabulary.special_ids if tokenizer.vocabulary.literal(i) in literals]
    return Codec(
        tokenizer.encode_start,
        tokenizer.encode_tail,
        spell,
        tokenizer.vocabulary.special_ids,
        frozenset(stops),
        plain_starts=tokenizer.encode_start(spell(start)) == start,
    )


def _unedited(checkpoint: Checkpoint) -> list[Checkpoint]:
    """Return the turns of a lineage, first turn first, up to the first one that the client has edited since."""
    turns: list[Checkpoint] = []
    for turn in list(checkpoint.lineage())[::-1]:
        if turn.edited and turn.apart:
            return turns[:-1]
        turns.append(turn)
    return turns
