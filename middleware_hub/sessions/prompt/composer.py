"""From a prepared turn to the ids that a worker receives. The first way that can be gone is taken:

edited    a message is an edited echo of a sampled turn: the tokens before the edit stay, the rest is encoded (`edited_turns`)
append    only what follows the checkpoint is rendered (`tails`), joined to it (`join`), and encoded
splice    everything is rendered, and earlier turns keep their ids as far as the text between them is unchanged (`splice`);
          so do turns that were sampled under other tools or options
text      everything is encoded, earlier turns as well; this is counted

A share of the continued prompts is compared with a rendering of the whole (`verifier`).
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from functools import cached_property, partial

import msgspec

from middleware_hub.chat import keys
from middleware_hub.chat.keys import KeyFunction
from middleware_hub.chat.messages import ChatRequest
from middleware_hub.media.media import Media
from middleware_hub.parsers.base import SampledParser
from middleware_hub.sessions.prompt.composed_prompt import EDITED_TURN, LEFT_OUT, ComposedPrompt, PromptIdsCache
from middleware_hub.sessions.prompt.echoes import is_echo
from middleware_hub.sessions.prompt.edited_turns import EditedTurns, manner
from middleware_hub.sessions.prompt.join import Join, join, join_in_place
from middleware_hub.sessions.prompt.known_text import EncodeStart, KnownText, known_behind
from middleware_hub.sessions.prompt.splice import Resident, Splicer
from middleware_hub.sessions.prompt.tails import Tails, offload_rendering
from middleware_hub.sessions.prompt.verifier import PromptVerifier
from middleware_hub.sessions.trie.nodes import Checkpoint, IsEcho, PreparedTurn
from middleware_hub.spans.chain import ID_BYTES, SpanFlag, TokenSpan, pack_ids, unpack_ids
from middleware_hub.spans.media import MediaSpan, chain_media, digests_in
from middleware_hub.templates.chat_template import ChatTemplate
from middleware_hub.templates.renderer import RenderingError
from middleware_hub.tokenizer.tokenizer import Tokenizer
from router.config.sessions import History
from router.errors import BadRequestError

logger = logging.getLogger(__name__)

_SCAFFOLD_TOKENS = 64
"""More than any generation prompt has."""
MANY_TOKENS = 1024
"""Reading a sampled turn of this many tokens again takes some milliseconds."""


class Composer:
    """Composes prompts.

    Args:
        history: with `keep` the chain is what the model saw; with `template`, what the template makes of it.
        verify_rate: the share of continued prompts that is compared with a rendering of the whole, 0 to 1.
        shares: whether equal requests share a prompt. A user's own keys may be equal for different messages.
        media: what is known of pictures; None if the model reads none.
        make_parser: makes a parser for the whole text of a turn, from behind its header on.

    Attributes:
        ids: of the prompts that turns may continue; whoever commits a turn keeps those of its prompt there.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        make_parser: Callable[[ChatRequest], SampledParser],
        *,
        history: History = "keep",
        verify_rate: float = 0.0,
        shares: bool = True,
        media: Media | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._make_parser = make_parser
        self._tails = Tails(template)
        self._history = history
        self._verify_rate = verify_rate
        self._shares = shares
        self._media = media
        self.ids = PromptIdsCache()
        self._dice = random.Random(0)

    def warm(self) -> None:
        """Do now the work that the first turn would wait for. May take a second; runs in a thread while no turn is composed."""
        self._template.warm()
        _ = self._verifier

    @cached_property
    def _splicer(self) -> Splicer:
        return Splicer(self._tokenizer, self._template)

    @cached_property
    def _verifier(self) -> PromptVerifier:
        return PromptVerifier(self._tokenizer, self._template, self._splicer)

    @cached_property
    def _edits(self) -> EditedTurns:
        return EditedTurns(
            self._tokenizer,
            self._template,
            self._splicer.codec,
            self._tails,
            self._make_parser,
            self._splicer.texts,
            history=self._history,
        )

    def recognizer(self, key: KeyFunction, request: ChatRequest) -> IsEcho | None:
        """Return what recognizes echoes of sampled messages in a request; None if its session compares nothing but keys."""
        if key is not keys.canonical and key is not keys.calls:
            return None
        return partial(
            is_echo,
            calls_alone=key is keys.calls,
            tools=request.tools,
            vocabulary=self._tokenizer.vocabulary,
            strips_alike=partial(self._template.strips_alike, options=request.template),
        )

    async def compose(
        self, turn: PreparedTurn, request: ChatRequest, start: EncodeStart | None = None
    ) -> ComposedPrompt:
        """Return the prompt of a turn. Raises BadRequestError if the template refuses the conversation.

        `start` encodes whole prompts; without it, no part of them is remembered.
        """
        beside = turn.elsewhere is not None or turn.edited
        prompt = await (self._beside if beside else self._own)(turn, request, start)
        known = 0 if prompt.checkpoint is None else prompt.checkpoint.node.depth
        remarks = self._template.remarks(request.messages, known)
        return msgspec.structs.replace(prompt, reasons=(*prompt.reasons, *remarks)) if remarks else prompt

    async def _beside(self, turn: PreparedTurn, request: ChatRequest, start: EncodeStart | None) -> ComposedPrompt:
        """Return the prompt of a turn that may continue a turn sampled for other messages, or under other settings."""
        found = None if turn.elsewhere is None else await self._residents(turn.elsewhere, request)
        reach = 0 if found is None or found.last is None else found.last.node.depth
        own, reply, replied = None, "", 0
        if turn.edited and found is None and start is not None:
            own = await self._own(turn, request, start)  # what looks like an edited echo may be a reply to a text
            if own.reply or own.checkpoint is None:
                reply, replied = start.reply, start.replied
        for echo in turn.edited:
            if echo.at <= reach:
                break  # other options write a whole turn there, not only its beginning
            heavy = max(one.span.count for one in echo.samples) > MANY_TOKENS
            kept = await offload_rendering(request, partial(self._edits.kept, turn, echo, request), heavy=heavy)
            if kept is not None:
                edited, joined, all_kept = kept
                at = msgspec.structs.replace(turn, checkpoint=edited, covered=echo.at)
                prompt = await self._behind(edited, joined, at, request, verify=None if all_kept else False)
                if own is not None and replied > prompt.reused:
                    return msgspec.structs.replace(own, reply=reply)
                how = manner(edited, request.messages[echo.at - 1])
                apart = prompt.apart or not (all_kept or joined.take == edited.span.count)
                return msgspec.structs.replace(prompt, reasons=(EDITED_TURN, *prompt.reasons), apart=apart, edited=how)
        if found is None:
            return own or await self._own(turn, request, start)
        if turn.checkpoint is None or reach > turn.covered or (found.last is not None and turn.names(found.last)):
            return await self._spliced(found, turn, request, "setting", start)
        return _without(await self._own(turn, request, start), "setting", found.reason)

    async def _own(self, turn: PreparedTurn, request: ChatRequest, start: EncodeStart | None) -> ComposedPrompt:
        """Return the prompt of a turn that continues nothing under other settings."""
        checkpoint = turn.checkpoint
        if checkpoint is None:
            return await self._started(turn, request, (), start)
        if checkpoint.span.flags & SpanFlag.MISMATCH:
            # It is unknown where the turn's text ends in its ids, so the text that the client saw is encoded.
            why = "engine_mismatch"
        elif self._history == "template" and not await offload_rendering(
            request, partial(self._verifier.extends, checkpoint, request)
        ):
            why = "rewritten"
        else:
            found = turn.node.contexts if self._shares else None
            span = _shared(turn, request, checkpoint.span) if found else None
            if span is not None:
                scaffold = await self._scaffold_at(span, request)
                return self._composed(checkpoint, span, span.count, scaffold)
            try:
                return await self._appended(checkpoint, turn, request, start)
            except RenderingError as error:
                logger.warning("the tail of a turn could not be rendered: %s", error)
            why = "template_error"
        return await self._spliced(await self._residents(checkpoint, request), turn, request, why, start)

    async def _appended(
        self, checkpoint: Checkpoint, turn: PreparedTurn, request: ChatRequest, start: EncodeStart | None
    ) -> ComposedPrompt:
        """Return a checkpoint's chain and what the template writes after it. Raises RenderingError."""
        if request.continue_final and turn.covered == len(request.messages):
            joined = join_in_place(checkpoint, self._splicer.codec)
            prompt = await self._behind(checkpoint, joined, turn, request)
            # Only a trajectory of all checkpoints contains the token with which the turn had stopped.
            return _with_reason(prompt, LEFT_OUT) if joined.left_out and not joined.recut else prompt
        tail = await self._tails.of(turn, request)
        joined = join(checkpoint, tail.text, self._splicer.codec)
        if joined.take == 0 and checkpoint.span.parent is None:
            return await self._started(turn, request, ("template_error",), start)
        known = None
        if start is not None:
            known = await known_behind(checkpoint, joined, tail.text, turn, request, start, self._tokenizer)
        verify = True if tail.new else None
        prompt = await self._behind(checkpoint, joined, turn, request, verify=verify, known=known)
        return _with_reason(prompt, "rendered_whole") if tail.healed else prompt

    async def _behind(
        self,
        checkpoint: Checkpoint,
        joined: Join,
        turn: PreparedTurn,
        request: ChatRequest,
        *,
        verify: bool | None = None,
        known: KnownText | None = None,
    ) -> ComposedPrompt:
        """Return a checkpoint's chain with a text after it, whose ids may be `known`.

        `verify` says whether to compare it with a rendering of the whole; None stands for the given rate.
        """
        span, take = checkpoint.span, joined.take
        if joined.text:
            before = ID_BYTES * (span.offset + take)
            ids, media = (known.ids[before:], ()) if known else await self._encoded(joined.text, request, (span, take))
            flags = SpanFlag.WHOLE | (SpanFlag.RECUT if joined.recut else SpanFlag.NONE)
            span = share(turn, request, TokenSpan(span, take, 0, ids, 0, flags=flags, media=media))
            if self._verify_rate and self._dice.random() < self._verify_rate if verify is None else verify:
                await offload_rendering(
                    request, partial(self._verifier.verify, span, span.count, request, checkpoint, joined)
                )
        scaffold = await self._scaffold(joined.text, request)
        # A generation of an equal prompt may have learned meanwhile how long the pictures of a shared context are.
        prompt = self._composed(checkpoint, span, span.count if joined.text else take, scaffold)
        return msgspec.structs.replace(prompt, reused=known.reused, reply=known.reply) if known else prompt

    async def _spliced(
        self, found: Resident, turn: PreparedTurn, request: ChatRequest, why: str, start: EncodeStart | None
    ) -> ComposedPrompt:
        """Render everything again, with the ids of the resident turns. `why` says why the chain is not appended to."""
        last, tail = found.last, found.tail
        if last is None:
            return _without(await self._started(turn, request, (), start), why, found.reason)
        # Nothing follows a turn that is continued in place, not even the token that ended it.
        joined = join(last, tail, self._splicer.codec) if tail else join_in_place(last, self._splicer.codec)
        prompt = await self._behind(last, joined, turn, request)
        fallbacks = (found.reason,) if found.reason else ()
        return msgspec.structs.replace(
            prompt,
            reasons=(why, "spliced", *fallbacks, *prompt.reasons),
            # A template that cannot write a tail by itself has not rewritten anything: the branch goes on.
            apart=prompt.apart or why != "template_error" or bool(found.reason),
            spliced=found.messages,
            fallbacks=fallbacks,
        )

    async def _residents(self, checkpoint: Checkpoint, request: ChatRequest) -> Resident:
        return await offload_rendering(request, partial(self._splicer.residents, checkpoint, request))

    async def _started(
        self, turn: PreparedTurn, request: ChatRequest, reasons: tuple[str, ...], start: EncodeStart | None
    ) -> ComposedPrompt:
        span = _shared(turn, request, None) if start is None and self._shares else None
        if span is not None:
            scaffold = await self._scaffold_at(span, request)
            return self._composed(None, span, span.count, scaffold, reasons)
        try:
            text = await offload_rendering(request, partial(self._template.conversation, request))
        except RenderingError as error:
            raise BadRequestError(f"the chat template cannot write this conversation: {error}") from error
        media: tuple[MediaSpan, ...] = ()
        if start is None:
            (packed, media), known = await self._encoded(text, request), 0
        else:
            ids, known = await start(text)
            packed = pack_ids(ids)
        if not packed:
            raise BadRequestError(
                "the chat template makes nothing of these messages: there is nothing to send to a worker"
            )
        span = share(turn, request, TokenSpan(None, 0, 0, packed, 0, flags=SpanFlag.WHOLE, media=media))
        scaffold = await self._scaffold(text, request)
        prompt = self._composed(None, span, span.count, scaffold, reasons)
        return msgspec.structs.replace(prompt, reused=known)

    async def _encoded(
        self, text: str, request: ChatRequest, behind: tuple[TokenSpan, int] | None = None
    ) -> tuple[bytes, tuple[MediaSpan, ...]]:
        """Return the packed ids of a text, with its pictures as long as is known, and their media spans.

        `behind` is the chain that it continues, up to a token: what that shows has the same length again.
        """
        start = behind is None
        if self._media is None or not digests_in(text):
            return await self._tokenizer.encode_packed(text, start=start), ()
        encoded = await self._tokenizer.encode_keyed(text, self._media.family.placeholder, start=start)
        shown = {} if behind is None else {one.digest: one.length for one in chain_media(*behind)}
        ids, _, media = encoded.expanded({**request.lengths, **shown})
        return ids, media

    def _composed(
        self, checkpoint: Checkpoint | None, span: TokenSpan, take: int, scaffold: str, reasons: tuple[str, ...] = ()
    ) -> ComposedPrompt:
        tokens = span.offset + take
        media = () if self._media is None else tuple(chain_media(span, take))
        if checkpoint is None:
            ids = self.ids.of(span, take, None)
            return ComposedPrompt(None, span, take, ids, tokens, 0, reasons, scaffold=scaffold, media=media)
        if span.flags & SpanFlag.UNLIKE:
            reasons = (*reasons, "template_mismatch")
        kept, sampled = take if span is checkpoint.span else span.take, checkpoint.span.count
        ids = self.ids.of(span, take, checkpoint if kept == sampled else None)
        reused = checkpoint.span.offset + kept
        left_out, apart = sampled - kept, not kept  # no later trajectory contains a turn without a kept token
        return ComposedPrompt(
            checkpoint,
            span,
            take,
            ids,
            tokens,
            reused,
            reasons,
            left_out,
            apart=apart,
            scaffold=scaffold,
            media=media,
        )

    async def _scaffold(self, text: str, request: ChatRequest) -> str:
        """Return the generation prompt at the end of a text: it is kept as it was sent, whatever other renderings write."""
        if request.continue_final:
            return ""
        known = self._template.asked_with(text, request.messages, request.tools, request.template)
        if known is not None:
            return known
        here = partial(self._template.asked_here, text, request.messages, request.tools, request.template)
        return await offload_rendering(request, here)

    async def _scaffold_at(self, span: TokenSpan, request: ChatRequest) -> str:
        """Return the generation prompt at the end of another request's context."""
        ends = unpack_ids(span.ids[-ID_BYTES * _SCAFFOLD_TOKENS :])
        return await self._scaffold(self._tokenizer.vocabulary.spell(ends), request)


_KEYED = {"role", "content", "name", "tool_call_id"}
"""The fields of a message that its key covers."""


def _shared(turn: PreparedTurn, request: ChatRequest, parent: TokenSpan | None) -> TokenSpan | None:
    """Return the context that an equal request was given after `parent`; None stands for the start of a prompt."""
    for span in turn.node.contexts or ():
        if span.parent is parent and _shareable(turn, request, parent):
            return span
    return None


def share(turn: PreparedTurn, request: ChatRequest, span: TokenSpan) -> TokenSpan:
    """Return the context that all generations of one prompt use: `span`, or an equal context that exists already."""
    if not _shareable(turn, request, span.parent):
        return span
    contexts = turn.node.contexts
    if contexts is None:
        contexts = turn.node.contexts = []
    for other in contexts:
        same_place = other.parent is span.parent and other.take == span.take
        if same_place and other.ids == span.ids and other.media == span.media:
            return other
    contexts.append(span)
    return span


def _shareable(turn: PreparedTurn, request: ChatRequest, parent: TokenSpan | None) -> bool:
    """Whether equal keys mean equal renderings: whether the keys cover everything that a template could write."""
    if request.continue_final:
        return False
    for message in request.messages[0 if parent is None else turn.covered :]:
        if message["role"] == "assistant" or not message.keys() <= _KEYED:
            return False
    return True


def _with_reason(prompt: ComposedPrompt, reason: str) -> ComposedPrompt:
    return msgspec.structs.replace(prompt, reasons=(reason, *prompt.reasons))


def _without(prompt: ComposedPrompt, why: str, reason: str) -> ComposedPrompt:
    """Return a prompt in which turns did not keep their ids: `why` a splice was needed, and the `reason` it failed."""
    new = tuple(one for one in dict.fromkeys((why, reason)) if one and one not in prompt.reasons)
    fallbacks = (*prompt.fallbacks, reason) if reason else prompt.fallbacks
    return msgspec.structs.replace(prompt, reasons=(*prompt.reasons, *new), fallbacks=fallbacks)
