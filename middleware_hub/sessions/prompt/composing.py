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
    left_out            a turn that had stopped is gone on with in place, without the token that it stopped with
    edited_turn         a message is not quite what was sampled: the chain goes as far as it is
    rendered_whole      the short rendering of a tail was not what the template writes for these messages: now all is rendered
    template_mismatch   the verifier found that the ids and a full rendering differ in more than sampled text
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

import msgspec

from middleware_hub.chat.messages import ChatRequest, Message
from middleware_hub.sessions.prompt.composed_prompt import ComposedPrompt
from middleware_hub.sessions.prompt.edited_turns import Echo, Kept, echoes, keep, manner, prompt_of, usable
from middleware_hub.sessions.prompt.join import OPENING, Seam, cut, seam
from middleware_hub.sessions.prompt.tails import Tails
from middleware_hub.sessions.prompt.whole_rendering import Resident, WholeRendering, codec_of
from middleware_hub.sessions.prompt.written_ids import WrittenIds
from middleware_hub.sessions.trie.nodes import Checkpoint, EditedMessage, PreparedTurn
from middleware_hub.spans.chain import ID_BYTES, SpanFlag, TokenSpan, pack_ids, unpack_ids
from middleware_hub.templates.chat_template import ChatTemplate
from middleware_hub.templates.renderer import RenderingError
from middleware_hub.tokenizer.tokenizer import Tokenizer
from router.config import History
from router.errors import BadRequestError

logger = logging.getLogger(__name__)

EDITED_TURN = "edited_turn"
LEFT_OUT = "left_out"
FALLBACKS = frozenset({"divergence", "sentinel_collision", "scaffold", "unfaithful", "template_error"})
"""Why earlier turns did not keep their ids, or not all of them."""

Starts = Callable[[str], Awaitable[tuple[Sequence[int], int]]]
"""Encodes a whole prompt, and says how many of its tokens were remembered."""

T = TypeVar("T")
_ASKED_TOKENS = 64
"""More than any generation prompt has."""
MANY_MESSAGES = 64
"""So many take some milliseconds to render."""


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
        self._codec = codec_of(tokenizer, template.stop_literals({}))
        self._whole = WholeRendering(tokenizer, template, self._codec)

    async def compose(self, turn: PreparedTurn, request: ChatRequest, starts: Starts | None = None) -> ComposedPrompt:
        """The prompt of a turn. Raises BadRequestError where the template refuses the conversation.

        `starts` encodes what is encoded as a whole; without it nothing of that is remembered.
        """
        for echo in turn.edited:
            kept = await _apart(request, partial(self._edited, turn, echo, request))
            if kept is not None:
                edited, place, all_kept = kept
                at = msgspec.structs.replace(turn, checkpoint=edited, covered=echo.at)
                made = await self._behind(edited, place, at, request, verify=None if all_kept else False)
                how = manner(edited, request.messages[echo.at - 1])
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
        if self._history == "template" and not await _apart(request, partial(self._whole.extends, checkpoint, request)):
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
            place = cut(checkpoint, self._codec)
            made = await self._behind(checkpoint, place, turn, request)
            # No trajectory but one of all checkpoints has the token that the turn had stopped with.
            lost = place.left_out and not place.recut
            return msgspec.structs.replace(made, reasons=(LEFT_OUT, *made.reasons)) if lost else made
        whole, new = self._tails.whole(request), self._tails.new(turn, request)
        render = partial(self._tails.of, turn, request, whole=whole, compare=new)
        tail = await _apart(request, render) if whole or new else render()
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
                await _apart(request, partial(self._whole.verify, span, take, request, checkpoint, place))
        return self._composed(checkpoint, span, take, _reasons(span), await self._asked_with(place.text, request))

    def _edited(
        self, turn: PreparedTurn, edited: EditedMessage, request: ChatRequest
    ) -> tuple[Checkpoint, Seam, bool] | None:
        """The sampled turn of which an edited echo keeps the most, where the rest begins, and whether all of it is kept.

        None if the echo keeps no token of any.
        """
        vocabulary, echo = self._tokenizer.vocabulary, request.messages[edited.at - 1]
        whole = ""
        with suppress(RenderingError, BadRequestError):
            whole = self._whole.text(request)
        found: list[Kept] = []
        for checkpoint in filter(usable, edited.samples):
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
                at = msgspec.structs.replace(turn, covered=edited.at)
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
        self, found: Resident, turn: PreparedTurn, request: ChatRequest, why: str, starts: Starts | None
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

    async def _resident(self, checkpoint: Checkpoint, request: ChatRequest) -> Resident:
        return await _apart(request, partial(self._whole.residents, checkpoint, request))

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
            text = await _apart(request, partial(self._whole.text, request))
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


def _without(made: ComposedPrompt, why: str, reason: str) -> ComposedPrompt:
    """A prompt in which turns did not keep their ids: `why` they had to be spliced, and the `reason` they were not."""
    told = tuple(one for one in dict.fromkeys((why, reason)) if one and one not in made.reasons)
    fallbacks = (*made.fallbacks, reason) if reason else made.fallbacks
    return msgspec.structs.replace(made, reasons=(*made.reasons, *told), fallbacks=fallbacks)


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
