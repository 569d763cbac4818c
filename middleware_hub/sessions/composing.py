"""From a prepared turn to the ids that a worker gets: first append, then splice, then (counted) text.

*Append*: only what follows the checkpoint is rendered and encoded. *Splice*: all is rendered, and earlier turns keep their ids
as far as what stands between them is what it was (see `segments`). *Text*: all is encoded, earlier turns as well.

Reasons, counted and kept with the turn (see docs/sessions.md):

    spliced             earlier turns kept their ids in a new rendering
    template_error      the tail could not be found in the template's rendering
    rewritten           `--history template`, and the template writes earlier turns in another way than they were
    setting             tools or template options are others than they were
    divergence          what is rendered between earlier turns is not what was sent
    sentinel_collision  a turn is not there exactly once in the rendering
    scaffold            a turn is opened in a way that is not known
    unfaithful          what was sampled is not surely what the client was shown
    edited_turn         a message is not quite what was sampled: the chain goes as far as it is
    rendered_whole      the short rendering of a tail was not what the template writes for these messages: now all is rendered
    template_mismatch   the verifier found that the ids and a full rendering differ in more than sampled text
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, TypeVar

import msgspec

from middleware_hub.sessions.chat import ChatRequest, Message
from middleware_hub.sessions.edited_turns import Echo, Kept, echoes, keep, manner, prompt_of, usable
from middleware_hub.sessions.message_nodes import Checkpoint, PreparedTurn
from middleware_hub.sessions.renderer import RenderingError
from middleware_hub.sessions.rendering import ChatTemplate
from middleware_hub.sessions.seam import OPENING, Codec, Seam, cut, seam
from middleware_hub.sessions.segments import sampled_messages, splice
from middleware_hub.sessions.tails import Tails
from middleware_hub.sessions.verifier import Part, differences
from middleware_hub.sessions.written_ids import Ids, WrittenIds
from middleware_hub.spans import ID_BYTES, SpanFlag, TokenSpan, links, pack_ids, unpack_ids
from middleware_hub.tokenizer import Tokenizer
from router.config import History
from router.errors import BadRequestError

logger = logging.getLogger(__name__)

EDITED_TURN = "edited_turn"
FALLBACKS = frozenset({"divergence", "sentinel_collision", "scaffold", "unfaithful", "template_error"})
"""Why earlier turns did not keep their ids, or not all of them."""

Starts = Callable[[str], Awaitable[tuple[Sequence[int], int]]]
"""Encodes a whole prompt, and says how many of its tokens were remembered."""

T = TypeVar("T")
_ASKED_TOKENS = 64
"""More than any generation prompt has."""
MANY_MESSAGES = 64
"""So many take some milliseconds to render."""


class ComposedPrompt(msgspec.Struct, frozen=True, gc=False):
    """A prompt as a chain, and what there is to know about it.

    Attributes:
        checkpoint: what it goes on from; None if it was encoded as a whole.
        span, take: the chain: the first `take` tokens of `span`, behind all that is before it.
        ids: all of them.
        reused: how many of them were in the checkpoint's chain.
        reasons: see the top of this file.
        apart: it is a branch of its own, though it goes on from the checkpoint's chain.
        spliced: so many earlier turns kept their ids in a new rendering.
        left_out: sampled tokens at the end of the checkpoint that are not in the prompt.
        edited: how the client edited the checkpoint's message (see `edited_turns`); empty if it did not.
        scaffold: the generation prompt at its end; empty if that is not known.
        fallbacks: why earlier turns did not keep their ids, or not all of them: one of `FALLBACKS` for each attempt.
    """

    checkpoint: Checkpoint | None
    span: TokenSpan
    take: int
    ids: Ids
    reused: int
    reasons: tuple[str, ...] = ()
    left_out: int = 0
    apart: bool = False
    spliced: int = 0
    scaffold: str = ""
    fallbacks: tuple[str, ...] = ()
    edited: str = ""

    @property
    def parent(self) -> str | None:
        """The last generation whose tokens are all in it, as far as its client saw them."""
        checkpoint = self.checkpoint
        if checkpoint is not None and self.edited and self.apart:
            checkpoint = checkpoint.parent
        return None if checkpoint is None else checkpoint.id

    @property
    def tokens(self) -> int:
        """How long it is."""
        return len(self.ids.packed) // ID_BYTES


class _Resident(NamedTuple):
    """The turns of a lineage that stand in a new rendering where they stood: what a worker has in its cache.

    Attributes:
        messages: how many messages these are.
        last: the last of these turns.
        tail: what is rendered behind it.
        reason: why these are not all; empty if they are.
    """

    messages: int
    last: Checkpoint | None
    tail: str
    reason: str


class Composer:
    """Makes prompts.

    Args:
        tokenizer: encodes.
        template: renders.
        history: `keep`: the chain is what the model saw; `template`: what the template makes of it is.
        verify_rate: the share of continued prompts that is compared with a rendering of the whole, 0 to 1.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, *, history: History = "keep", verify_rate: float = 0.0
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._tails = Tails(template)
        self._history = history
        self._verify_rate = verify_rate
        self._written = WrittenIds()
        self._dice = random.Random(0)
        vocabulary = tokenizer.vocabulary
        self._codec = codec_of(tokenizer, template.stop_literals({}))
        literals = sorted((vocabulary.literal(i) for i in vocabulary.special_ids), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, filter(None, literals))) or r"(?!)")

    async def compose(self, turn: PreparedTurn, request: ChatRequest, starts: Starts | None = None) -> ComposedPrompt:
        """The prompt of a turn. Raises BadRequestError where the template refuses the conversation.

        `starts` encodes what is encoded as a whole; without it nothing of that is remembered.
        """
        if turn.edited:
            kept = await _apart(request, partial(self._edited, turn, request))
            if kept is not None:
                edited, place, all_kept = kept
                at = msgspec.structs.replace(turn, checkpoint=edited, covered=turn.edited_at)
                made = await self._behind(edited, place, at, request, verify=None if all_kept else False)
                how = manner(edited, request.messages[turn.edited_at - 1])
                reasons = (EDITED_TURN, *made.reasons)
                return msgspec.structs.replace(made, reasons=reasons, apart=not all_kept, edited=how)
        if turn.elsewhere is None:
            return await self._own(turn, request, starts)
        found = await self._resident(turn.elsewhere, request)
        if turn.checkpoint is None or (found.last is not None and found.last.node.depth > turn.covered):
            return await self._spliced(found, turn, request, "setting", starts)
        made = await self._own(turn, request, starts)
        return _without(made, "setting", found.reason)

    async def _own(self, turn: PreparedTurn, request: ChatRequest, starts: Starts | None) -> ComposedPrompt:
        """The prompt of a turn that has nothing to do with other settings."""
        checkpoint = turn.checkpoint
        if checkpoint is None:
            return await self._anew(turn, request, (), starts)
        if checkpoint.span.flags & SpanFlag.MISMATCH:
            # Nobody knows where its text ends in its ids: what the client saw is encoded instead.
            return await self._spliced(
                await self._resident(checkpoint, request), turn, request, "engine_mismatch", starts
            )
        if self._history == "template" and not await _apart(request, partial(self._append_only, checkpoint, request)):
            return await self._spliced(await self._resident(checkpoint, request), turn, request, "rewritten", starts)
        known = await self._known(turn, checkpoint, request)
        if known is not None:
            return known
        try:
            return await self._appended(checkpoint, turn, request, starts)
        except RenderingError as error:
            logger.warning("the tail of a turn could not be rendered: %s", error)
            return await self._spliced(
                await self._resident(checkpoint, request), turn, request, "template_error", starts
            )

    async def _appended(
        self, checkpoint: Checkpoint, turn: PreparedTurn, request: ChatRequest, starts: Starts | None
    ) -> ComposedPrompt:
        """A checkpoint's chain, and what the template writes behind it. Raises RenderingError."""
        if request.continue_final and turn.covered == len(request.messages):
            return await self._behind(checkpoint, cut(checkpoint, self._codec), turn, request)
        whole, new = self._tails.whole(request), self._tails.new(turn, request)
        compare = new or self._tails.grown(turn, request)
        render = partial(self._tails.of, turn, request, whole=whole, compare=compare)
        tail = await _apart(request, render) if whole or compare else render()
        if new and tail.known:
            self._tails.compared(turn, request)
        place = seam(checkpoint, tail.text, self._codec)
        if place.take == 0 and checkpoint.span.parent is None:
            return await self._anew(turn, request, ("template_error",), starts)
        made = await self._behind(checkpoint, place, turn, request, verify=True if new else None)
        return msgspec.structs.replace(made, reasons=("rendered_whole", *made.reasons)) if tail.healed else made

    async def _behind(
        self,
        checkpoint: Checkpoint,
        place: Seam,
        turn: PreparedTurn,
        request: ChatRequest,
        *,
        verify: bool | None = None,
    ) -> ComposedPrompt:
        """A checkpoint's chain, and a text behind it; `verify`: against a rendering of the whole, None: at the given rate."""
        span, take = checkpoint.span, place.take
        if place.text:
            ids = await self._tokenizer.encode(place.text, start=False)
            flags = SpanFlag.WHOLE | (SpanFlag.RECUT if place.recut else SpanFlag.NONE)
            span = self._shared(turn, TokenSpan(span, take, 0, pack_ids(ids), 0, flags=flags), request)
            take = len(span)
            if self._verify_rate and self._dice.random() < self._verify_rate if verify is None else verify:
                await _apart(request, partial(self._verify, span, take, request, checkpoint, place))
        return self._composed(checkpoint, span, take, _reasons(span), await self._asked_with(place.text, request))

    def _edited(self, turn: PreparedTurn, request: ChatRequest) -> tuple[Checkpoint, Seam, bool] | None:
        """The sampled turn of which an edited echo keeps the most, where the rest begins, and whether all of it is kept.

        None if the echo keeps no token of any.
        """
        vocabulary, echo = self._tokenizer.vocabulary, request.messages[turn.edited_at - 1]
        whole = ""
        with suppress(RenderingError, BadRequestError):
            whole = self._whole(request)
        found: list[Kept] = []
        for checkpoint in filter(usable, turn.edited):
            prompt = prompt_of(checkpoint, vocabulary)
            written = [Echo(whole[len(prompt) :], rendered=True)] if whole.startswith(prompt) else []
            if self._history == "keep":
                written += echoes(checkpoint, echo, vocabulary)
            found += [keep(checkpoint, one, vocabulary) for one in written]
        best = max(found, key=lambda one: one.take, default=None)
        if best is None or not best.take:
            return None
        rest = best.text
        if not best.rendered:
            try:
                at = msgspec.structs.replace(turn, covered=turn.edited_at)
                rest += self._tails.of(at, request, whole=self._tails.whole(request), compare=False).text
            except RenderingError as error:
                logger.info("the tail of an edited turn could not be rendered: %s", error)
                return None
        if not best.all:
            return best.checkpoint, Seam(best.take, rest), False
        if not rest:
            return best.checkpoint, cut(best.checkpoint, self._codec), True
        opens = self._codec.encode_tail(rest[:OPENING])
        if (best.rendered or best.text) and not (opens and opens[0] in self._codec.special_ids):
            return best.checkpoint, Seam(best.take, rest), False  # it goes on where the model had stopped
        return best.checkpoint, seam(best.checkpoint, rest, self._codec), True

    async def _spliced(
        self, found: _Resident, turn: PreparedTurn, request: ChatRequest, why: str, starts: Starts | None
    ) -> ComposedPrompt:
        """All is rendered anew, with the ids of the turns that are resident.

        Args:
            why: the chain is not appended to, in one word.
        """
        last, tail = found.last, found.tail
        if last is None:
            return _without(await self._anew(turn, request, (), starts), why, found.reason)
        # Nothing stands behind a turn that is gone on with, not even the token that ended it.
        place = seam(last, tail, self._codec) if tail else cut(last, self._codec)
        made = await self._behind(last, place, turn, request)
        reasons = (why, "spliced", *((found.reason,) if found.reason else ()), *made.reasons)
        # A template that cannot write a tail by itself has not rewritten anything: the branch goes on.
        apart = why != "template_error" or bool(found.reason)
        fallbacks = (found.reason,) if found.reason else ()
        return msgspec.structs.replace(made, reasons=reasons, apart=apart, spliced=found.messages, fallbacks=fallbacks)

    async def _resident(self, checkpoint: Checkpoint, request: ChatRequest) -> _Resident:
        return await _apart(request, partial(self._find_resident, checkpoint, request))

    def _find_resident(self, checkpoint: Checkpoint, request: ChatRequest) -> _Resident:
        """Those of a lineage that stand where they stood, when all is rendered anew."""
        messages = sampled_messages(_unedited(checkpoint))
        reason = ""
        while messages:
            marked = [turns[-1].node.depth - 1 for turns in messages]
            try:
                pieces, tail = self._template.transcript(
                    request.messages, marked, request.tools, request.template, continue_final=request.continue_final
                )
            except BadRequestError as error:  # with other words in the place of these turns
                logger.info("earlier turns are not spliced: %s", error)
                return _Resident(0, None, "", "template_error")
            except RenderingError as error:
                logger.info("earlier turns are not spliced: %s", error)
                messages, reason = messages[: error.turns], error.reason
                continue
            turns = [turn for one in messages for turn in one]
            found = splice(pieces, turns, self._template.every_scaffold, self._codec)
            if not found.reason:
                read = self._read_tail(request, marked, tail)
                if read is None:
                    return _Resident(0, None, "", "divergence")
                return _Resident(len(messages), messages[-1][-1], read, reason)
            messages, reason = messages[: found.messages], found.reason
        return _Resident(0, None, "", reason)

    def _read_tail(self, request: ChatRequest, marked: Sequence[int], tail: str) -> str | None:
        """What is rendered behind these turns themselves, if the template reads them: `tail` stands behind sentinels. None
        if it cannot be told from them."""
        messages, last = request.messages, marked[-1]
        if not tail or not self._template.reads([messages[at] for at in marked]):
            return tail
        try:
            whole = self._whole(request)
            if not whole.endswith(tail):
                tail = self._template.tail(
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

    async def _known(self, turn: PreparedTurn, checkpoint: Checkpoint, request: ChatRequest) -> ComposedPrompt | None:
        """What an equal request was given."""
        if _shareable(request, turn.covered):
            for span in turn.node.contexts or ():
                if span.parent is checkpoint.span:
                    return self._composed(
                        checkpoint, span, len(span), _reasons(span), await self._asked_at(span, request)
                    )
        return None

    def committed(self, prompt: ComposedPrompt, checkpoint: Checkpoint) -> None:
        """A turn was sampled behind a prompt: the next one will go on from there."""
        self._written.keep(checkpoint, prompt.ids)

    async def _anew(
        self, turn: PreparedTurn, request: ChatRequest, reasons: tuple[str, ...], starts: Starts | None
    ) -> ComposedPrompt:
        if starts is None and _shareable(request, 0):
            for span in turn.node.contexts or ():
                if span.parent is None:
                    return self._composed(None, span, len(span), reasons, await self._asked_at(span, request))
        try:
            text = await _apart(request, partial(self._whole, request))
        except RenderingError as error:
            raise BadRequestError(f"the chat template cannot write this conversation: {error}") from error
        ids, known = (await self._tokenizer.encode(text, start=True), 0) if starts is None else await starts(text)
        if not ids:
            raise BadRequestError(
                "the chat template makes nothing of these messages: there is nothing to send to a worker"
            )
        span = self._shared(turn, TokenSpan(None, 0, 0, pack_ids(ids), 0, flags=SpanFlag.WHOLE), request)
        made = self._composed(None, span, len(span), reasons, await self._asked_with(text, request))
        return msgspec.structs.replace(made, reused=known)

    def _composed(
        self, checkpoint: Checkpoint | None, span: TokenSpan, take: int, reasons: tuple[str, ...], scaffold: str
    ) -> ComposedPrompt:
        kept = 0 if checkpoint is None else take if span is checkpoint.span else span.take
        all_of_it = checkpoint is not None and kept == len(checkpoint.span)
        return ComposedPrompt(
            checkpoint,
            span,
            take,
            self._written.of(span, take, checkpoint if all_of_it else None),
            0 if checkpoint is None else checkpoint.span.offset + kept,
            reasons,
            0 if checkpoint is None else len(checkpoint.span) - kept,
            scaffold=scaffold,
        )

    @staticmethod
    def _shared(turn: PreparedTurn, span: TokenSpan, request: ChatRequest) -> TokenSpan:
        """One context for all generations of one prompt."""
        if not _shareable(request, 0 if span.parent is None else turn.covered):
            return span
        contexts = turn.node.contexts
        if contexts is None:
            contexts = turn.node.contexts = []
        for other in contexts:
            if other.parent is span.parent and other.take == span.take and other.ids == span.ids:
                return other
        contexts.append(span)
        return span

    async def _asked_with(self, text: str, request: ChatRequest) -> str:
        """The generation prompt at the end of a text: remembered as it was sent, whatever other renderings make of it."""
        if request.continue_final:
            return ""
        known = self._template.asked_with(text, request.messages, request.tools, request.template)
        if known is not None:
            return known
        here = partial(self._template.asked_here, text, request.messages, request.tools, request.template)
        return await _apart(request, here)

    async def _asked_at(self, span: TokenSpan, request: ChatRequest) -> str:
        """The same of a context that another request has left."""
        ends = unpack_ids(span.ids[-ID_BYTES * _ASKED_TOKENS :])
        return await self._asked_with(self._tokenizer.vocabulary.spell(ends), request)

    def _whole(self, request: ChatRequest) -> str:
        return self._template.whole(
            request.messages, request.tools, request.template, continue_final=request.continue_final
        )

    # Against a rendering of the whole ----------------------------------------------------------------------------------

    def _append_only(self, checkpoint: Checkpoint, request: ChatRequest) -> bool:
        """Whether a rendering of the whole begins with what the chain spells."""
        spell = self._tokenizer.vocabulary.spell
        parts = [spell(unpack_ids(part.ids)[:count]) for part, count in links(checkpoint.span, checkpoint.span.visible)]
        try:
            whole = self._whole(request)
        except RenderingError:  # what is to be gone on with is not there
            return False
        spelled = "".join(reversed(parts))
        return whole.startswith(spelled) or self._tokenizer.spell_prompt(
            self._tokenizer.encode_start(whole)
        ).startswith(spelled)

    def _verify(self, span: TokenSpan, take: int, request: ChatRequest, checkpoint: Checkpoint, place: Seam) -> None:
        """Mark a context if the ids are not what a rendering of the whole would be, but for sampled text."""
        try:
            expected = self._whole(request)
        except (BadRequestError, RenderingError) as error:
            logger.warning("a turn could not be verified: %s", error)
            return
        found = differences(
            expected,
            self._parts(span, take),
            self._special,
            header=self._template.header(request.tools, request.template),
            asked=not request.continue_final,
        )
        found = [one for one in found if one.hard]
        # A template that drops thoughts may drop special tokens with them: all around the turns may be what it was.
        if found and not self._stands(checkpoint, place, request):
            told = "; ".join(map(str, found[:3]))
            logger.warning("a turn is not what the chat template makes of its messages: %s", told)
            span.flags |= SpanFlag.UNLIKE

    def _stands(self, checkpoint: Checkpoint, place: Seam, request: ChatRequest) -> bool:
        """Whether every sampled turn could be spliced into a rendering of the whole, and the same text stands behind."""
        found = self._find_resident(checkpoint, request)
        return found.last is checkpoint and bool(found.tail) and seam(checkpoint, found.tail, self._codec) == place

    def _parts(self, span: TokenSpan, take: int) -> Sequence[Part]:
        spell = self._tokenizer.vocabulary.spell
        parts = [Part(spell(unpack_ids(part.ids)[:count]), part.sampled) for part, count in links(span, take)]
        parts.reverse()
        return parts


def _without(made: ComposedPrompt, why: str, reason: str) -> ComposedPrompt:
    """A prompt in which turns did not keep their ids: `why` they had to be spliced, and the `reason` they were not."""
    told = tuple(one for one in dict.fromkeys((why, reason)) if one and one not in made.reasons)
    fallbacks = (*made.fallbacks, reason) if reason else made.fallbacks
    return msgspec.structs.replace(made, reasons=(*made.reasons, *told), fallbacks=fallbacks)


def codec_of(tokenizer: Tokenizer, stop_literals: Sequence[str] = ()) -> Codec:
    """What seams and splices need of a tokenizer, and of what a template ends turns with."""
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
    """The turns of a lineage, first one first, up to the first that the client has edited since."""
    turns: list[Checkpoint] = []
    for turn in list(checkpoint.lineage())[::-1]:
        if turn.edited and turn.apart:
            return turns[:-1]
        turns.append(turn)
    return turns


_KEYED = {"role", "content", "name", "tool_call_id"}


def _shareable(request: ChatRequest, covered: int) -> bool:
    """Whether equal keys mean an equal rendering: nothing that a template could write of them is left out of a key."""
    if request.continue_final:
        return False
    return all(message["role"] != "assistant" and message.keys() <= _KEYED for message in request.messages[covered:])


def _reasons(span: TokenSpan) -> tuple[str, ...]:
    return ("template_mismatch",) if span.flags & SpanFlag.UNLIKE else ()


async def _apart(request: ChatRequest, rendering: Callable[[], T]) -> T:
    """What renders all messages, in a thread if there are many: others go on meanwhile."""
    if len(request.messages) < MANY_MESSAGES:
        return rendering()
    return await asyncio.to_thread(rendering)


def spoken(request: ChatRequest, turn: PreparedTurn, content: str) -> tuple[Message, bool]:
    """The assistant's message, and whether it takes the place of the prompt's last one, which it goes on with."""
    message: Message = {"role": "assistant", "content": content}
    if not request.continue_final:
        return message, False
    before = request.messages[-1].get("content")
    return {**message, "content": (before if isinstance(before, str) else "") + content}, True
