"""The steps of a turn: prepare -> tokenize -> generate -> commit. A turn begins here; its generations end it by themselves."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from typing import Any, Protocol

import msgspec

from middleware_hub.chat.dialect import Dialect
from middleware_hub.chat.errors import ContextLengthError
from middleware_hub.chat.messages import REPLY_FORMS, ChatRequest
from middleware_hub.media.part import image_parts
from middleware_hub.metrics import SessionMetrics
from middleware_hub.radix.records import NO_PARENT
from middleware_hub.sessions.events import Touched
from middleware_hub.sessions.exchange import Exchange, RequestKey
from middleware_hub.sessions.prompt.composed_prompt import (
    EDITED_TURN,
    FALLBACKS,
    LEFT_OUT,
    PREFIX_CHANGED,
    REMARKS,
    REWRITTEN_TURN,
    ComposedPrompt,
)
from middleware_hub.sessions.prompt.composer import Composer
from middleware_hub.sessions.prompt.known_text import EncodeStart
from middleware_hub.sessions.registry import SessionRegistry
from middleware_hub.sessions.session import Act, Session
from middleware_hub.sessions.trie.memo import setting_in
from middleware_hub.sessions.trie.nodes import BranchHandle, Checkpoint, PreparedTurn
from middleware_hub.sessions.turn.generation import CONTRADICTORY, Generator, TurnGeneration
from middleware_hub.sessions.turn.kept_replies import KeptReply
from middleware_hub.sessions.turn.plan import TurnPlan
from middleware_hub.sessions.turn.reply_parsers import ReplyParsers
from middleware_hub.sessions.turn.written_again import reply, turns_of
from middleware_hub.spans.chain import STORE_UNREACHABLE, UNKNOWN_REPLY
from middleware_hub.tokenizer.vocabulary import Vocabulary
from router.config.sessions import SessionsConfig
from router.engines.form.request import GenerateRequest
from router.engines.form.worker_request import new_rid
from router.errors import BadRequestError
from router.http.headers import HeaderList
from router.http.request_state import RequestState
from router.observability.tracing import untraced

_REMEMBERED = 1024
"""Sets of options that were found harmless: in a conversation they are the same at every turn."""
_SHORT_OPTIONS = 1024
"""Bytes up to which options are remembered as they are. Of longer ones (a schema, a grammar) a digest is."""


class RememberedStart(EncodeStart, Protocol):
    """Encodes the prompts of a chat without a session; remembered text keeps its ids.

    Attributes:
        knew_parent: whether the tokens of the reply that the request names are in the prompt.
    """

    knew_parent: bool


RememberedStarts = Callable[[str, ChatRequest, HeaderList, str | None], RememberedStart | None]
"""Takes the tenant, the request, its headers and the parent that it names. Returns None if nothing remembers texts."""


class Turns:
    """Begins exchanges."""

    def __init__(
        self,
        generator: Generator,
        remembered: RememberedStarts,
        composer: Composer,
        parsers: ReplyParsers,
        registry: SessionRegistry,
        metrics: SessionMetrics,
        config: SessionsConfig,
    ) -> None:
        self._generator = generator
        self._remembered = remembered
        self._composer = composer
        self._parsers = parsers
        self._registry = registry
        self._metrics = metrics
        self._orphan_grace = config.orphan_grace
        self._sampling = TurnSampling(
            generator.judge.vocabulary,
            parsers,
            max_context=config.max_context,
            stream_interval=config.stream_interval,
        )

    def adopt(self, session: Session, key: RequestKey) -> Exchange[TurnGeneration] | None:
        """Return the exchange that answers the same request already and has lost its client, if there is one."""
        found = session.adopt(key)
        if found is not None:
            self._metrics.resent.labels("replayed" if found.over else "adopted").inc()
            found.attach()
        return found

    def written_again(
        self, session: Session, request: ChatRequest, key: RequestKey, dialect: Dialect, word: bytes
    ) -> KeptReply | None:
        """Return the reply to an equal request, written anew from its turns; None if there is none, or not all of it."""
        is_echo = self._composer.recognizer(session.trie.key, request)
        turn = session.trie.prepare(setting_in(request), request.messages, parent=key.parent, is_echo=is_echo)
        handle = session.trie.open(turn, new_rid())
        try:
            found = turns_of(turn.node, key.digest, request)
        finally:
            session.trie.abandon(handle)
        if not found:
            return None
        headers, body = reply(found, dialect, request, session, word, self._generator.judge.vocabulary)
        sent = time.monotonic() - (time.time() - found[-1].time)
        return KeptReply(headers, body, request.stream, tuple([one.id for one in found]), sent)

    def begin(
        self,
        session: Session,
        request: ChatRequest,
        headers: HeaderList,
        state: RequestState,
        key: RequestKey,
        *,
        unread: bool,
    ) -> Exchange[TurnGeneration]:
        """Prepare a turn and start it; from now on the session knows it.

        `headers` are those of the client's request, and `state` is what is known of that.
        `unread` says that the store may know more of the conversation, and could not be asked.

        Raises CapacityError: then nothing has changed. Later errors are the exchange's failure.
        """
        session.touch()
        if session.lasting:
            self._registry.require_room(session)
        begun, tracer = time.perf_counter(), self._generator.tracer
        with untraced if tracer is None else tracer.span("prepare", messages=len(request.messages)) as span:
            turn = session.trie.prepare(
                setting_in(request),
                request.messages,
                parent=key.parent,
                reply=request.reply,
                begun=self._parsers.begun(request) if request.continue_final else "",
                is_echo=self._composer.recognizer(session.trie.key, request),
            )
            if key.parent == NO_PARENT:  # all of the conversation is context
                turn = PreparedTurn(turn.node, None, 0, named=NO_PARENT, setting=turn.setting)
            # From here on, while the tail is encoded, handles hold what the turn may continue.
            handles = [session.trie.open(turn, new_rid()) for _ in range(request.samples)]
            if span is not None:
                span.set(covered=turn.covered)
        self._metrics.seconds.observe(("prepare",), time.perf_counter() - begun)
        exchange = Exchange(
            key,
            partial(self._compose, session, request, headers, state, turn, handles, unread=unread),
            grace=self._orphan_grace if session.lasting else 0.0,
            on_over=partial(self._over, session),
        )
        session.begin(exchange)
        return exchange

    async def _compose(
        self,
        session: Session,
        request: ChatRequest,
        headers: HeaderList,
        state: RequestState,
        turn: PreparedTurn,
        handles: list[BranchHandle],
        exchange: Exchange[TurnGeneration],
        *,
        unread: bool,
    ) -> list[TurnGeneration]:
        """Return the generations of a prepared turn. Raises BadRequestError, SessionOverError: then nothing has changed."""
        begun = time.perf_counter()
        try:
            plan = await self._plan(session, request, headers, state, turn, unread=unread or session.stale)
            session.require(Act.GENERATE)
            for handle in handles:
                # If the prompt was encoded from the start, the checkpoint that it could have continued ends a branch.
                handle.goes_on_from(plan.prompt.checkpoint, apart=plan.prompt.apart)
            plan.asked = exchange.key.digest
            plan.sampling = self._sampling.of(session, plan)
            exchange.notes = _notes(plan)
            generations, commit = [], partial(self._committed, session)
            for number, handle in enumerate(handles):
                parser, own = self._parsers.parser(plan), plan.of_sample(number) if number else plan
                generations.append(
                    TurnGeneration(self._generator, own, handle, parser, on_news=exchange.notify, on_commit=commit)
                )
        except BaseException:
            for handle in handles:
                session.trie.abandon(handle)
            raise
        self._count(plan, exchange.notes)
        self._metrics.seconds.observe(("tokenize",), time.perf_counter() - begun)
        return generations

    async def _plan(
        self,
        session: Session,
        request: ChatRequest,
        headers: HeaderList,
        state: RequestState,
        turn: PreparedTurn,
        *,
        unread: bool,
    ) -> TurnPlan:
        tracer = self._generator.tracer
        with untraced if tracer is None else tracer.span("tokenize") as span:
            shown = self._generator.media is not None and any(map(image_parts, request.messages))
            start = None
            if not (session.lasting or shown):
                start = self._remembered(session.tenant, request, headers, turn.named)
            prompt = await self._composer.compose(turn, request, start)
            if span is not None:
                span.set(reused=prompt.reused, encoded=prompt.tokens - prompt.reused)
        if turn.unknown_parent and ((start is not None and start.knew_parent) or prompt.holds(turn.named)):
            # Its messages are not on the path, but its tokens are in the prompt: by a splice, an edited turn, or a text.
            turn = msgspec.structs.replace(turn, unknown_parent=False, ambiguous=False)
        sampled = 0 if prompt.checkpoint is None else prompt.checkpoint.node.depth
        if turn.edited and turn.edited[0].at > sampled and not (prompt.edited or prompt.reply):
            prompt = msgspec.structs.replace(prompt, reasons=(REWRITTEN_TURN, *prompt.reasons))
        if turn.prefix_changed and not prompt.reply:
            prompt = msgspec.structs.replace(prompt, reasons=(PREFIX_CHANGED, *prompt.reasons))
        plan = TurnPlan(
            session_id=session.id,
            trie=session.trie,
            headers=headers,
            state=state,
            request=request,
            turn=turn,
            prompt=prompt,
            lasting=session.lasting,
            unread=unread,
            log=session.log,
            notes=session.notes,
            media=self._generator.media,
        )
        if (unread or session.lost) and plan.unsampled:  # what looks like context may have been sampled
            doubts = (STORE_UNREACHABLE,) * unread + (UNKNOWN_REPLY,) * bool(session.lost)
            plan.prompt = msgspec.structs.replace(prompt, reasons=(*prompt.reasons, *doubts))
        return plan

    def _count(self, plan: TurnPlan, notes: tuple[str, ...]) -> None:
        turn, prompt = plan.turn, plan.prompt
        turns, tokens = self._metrics.turns.counts, self._metrics.tokens.counts
        if prompt.spliced:
            kind = "spliced"
            self._metrics.spliced_turns.inc(prompt.spliced)
            tokens["spliced",] += prompt.reused
        elif prompt.checkpoint is not None:
            kind = "continued"
        else:
            kind = "first" if turn.checkpoint is None and turn.elsewhere is None else "anew"
        for reason in prompt.fallbacks:
            self._metrics.fallbacks.labels(reason).inc()
        why = ""
        if kind in ("anew", "spliced"):
            why = next((reason for reason in prompt.reasons if reason not in REMARKS), "")
        turns[kind, why] += 1
        for note in notes:
            if note in (EDITED_TURN, REWRITTEN_TURN):
                turns[EDITED_TURN, prompt.edited or "rewritten"] += 1
            elif note != why and note not in FALLBACKS and note != "spliced":
                turns[note, ""] += 1
        tokens["reused",] += prompt.reused * plan.request.samples
        tokens["encoded",] += prompt.tokens - prompt.reused

    def _committed(self, session: Session, prompt: ComposedPrompt, checkpoint: Checkpoint) -> None:
        added = session.committed(checkpoint)
        if session.lasting:
            self._registry.tokens += added
        session.prompts = self._composer.ids
        session.prompts.keep(checkpoint, prompt.ids)
        self._metrics.tokens.counts["sampled",] += checkpoint.span.count

    def _over(self, session: Session, exchange: Exchange[TurnGeneration]) -> None:
        for generation in exchange.generations:
            self._metrics.seconds.observe(("generate",), generation.seconds)
            if generation.commit_seconds is not None:
                self._metrics.seconds.observe(("commit",), generation.commit_seconds)
            verdict = generation.verdict
            outcome = ("no", "no reply") if verdict is None else (verdict.outcome, verdict.reason)
            self._metrics.replies.counts[outcome] += 1
            if session.lasting and session.log is None and generation.answer is not None and outcome in CONTRADICTORY:
                session.apply(Touched(time=time.time(), lost=generation.id))
        session.settle(exchange)


def _notes(plan: TurnPlan) -> tuple[str, ...]:
    """Return what a client and the metrics learn about a prompt, one word each."""
    turn, prompt = plan.turn, plan.prompt
    found = ("ambiguous",) * turn.ambiguous + ("unknown_parent",) * turn.unknown_parent
    found += (
        (LEFT_OUT,) * (prompt.left_out > 0 and not prompt.apart) + prompt.reasons + (STORE_UNREACHABLE,) * plan.unread
    )
    return tuple(dict.fromkeys(found))


class TurnSampling:
    """Works out the `sampling_params` of turns.

    Args:
        parsers: know what replies need to be parsed.
        max_context: the tokens that the model takes; None if the worker is to decide.
        stream_interval: after how many tokens a stream has an event, if the session does not say; None if the worker is to
            decide.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        parsers: ReplyParsers,
        *,
        max_context: int | None,
        stream_interval: int | None,
    ) -> None:
        self._vocabulary = vocabulary
        self._parsers = parsers
        self._stream_interval = stream_interval
        self._max_context = max_context
        self._checked: set[bytes] = set()

    def of(self, session: Session, plan: TurnPlan) -> dict[str, Any]:
        """Return the `sampling_params` of a turn, with those that its parsers need. Raises BadRequestError."""
        request, needed = plan.request, self._parsers.sampling(plan)
        sampling = session.defaults.sampling(request.sampling)
        # A stop string that the text shows would be there twice when the turn is continued.
        sampling.pop("no_stop_trim", None)
        # All tokens, as vLLM and Hugging Face spell it; a session's are not translated before.
        if sampling.get("top_k") == 0:
            sampling["top_k"] = -1
        if "structural_tag" in needed:  # the client's own were compared when they were read
            for other in REPLY_FORMS:
                if sampling.get(other):
                    raise BadRequestError(
                        f"`tool_choice` needs a grammar of calls, and the session's `{other}` gives replies another form",
                        param="tool_choice",
                    )
        sampling.update(needed)
        if not sampling.keys().isdisjoint(REPLY_FORMS):
            self._parsers.let_reason(plan, sampling)
        if self._stream_interval is not None and request.stream:
            sampling.setdefault("stream_interval", self._stream_interval)
        self._check(request, sampling)
        wanted = sampling.get("max_new_tokens")
        limit = sampling["max_new_tokens"] = self._limit(session, wanted, plan)
        least = sampling.get("min_new_tokens")
        if limit is not None and limit != wanted and isinstance(least, int) and (wanted is None or least <= wanted):
            # The client's two limits were consistent. A request must not be refused because one of them was lowered here.
            sampling["min_new_tokens"] = min(least, limit)
        return sampling

    def _check(self, request: ChatRequest, sampling: dict[str, Any]) -> None:
        """Raise BadRequestError for options outside of the workers' valid range, as `/generate` does."""
        fields = {"input_ids": [0], "sampling_params": sampling, "return_logprob": True}
        if request.top_logprobs:
            fields["top_logprobs_num"] = request.top_logprobs
        options = msgspec.json.encode({**request.extra, **fields})
        known = options if len(options) <= _SHORT_OPTIONS else blake2b(options).digest()
        if known in self._checked:
            return
        GenerateRequest.parse(options, vocabulary=self._vocabulary.size)
        if len(self._checked) >= _REMEMBERED:
            self._checked.clear()
        self._checked.add(known)

    def _limit(self, session: Session, wanted: Any, plan: TurnPlan) -> int | None:
        limits, prompt = [wanted] if isinstance(wanted, int) else [], plan.prompt
        if self._max_context is not None:
            tokens = prompt.tokens
            if plan.media is not None:
                tokens += plan.media.still_unknown(session.tenant, prompt.media)
            room = self._max_context - tokens
            if room < 1:
                raise ContextLengthError(self._max_context, tokens)
            limits.append(room)
        if session.response_budget is not None:
            limits.append(max(0, session.response_budget - _response_tokens(prompt)))
        return min(limits, default=None)


def _response_tokens(prompt: ComposedPrompt) -> int:
    """Return the number of tokens after the first prompt of a branch."""
    if prompt.checkpoint is None:
        return 0
    first = list(prompt.checkpoint.lineage())[-1]
    return prompt.tokens - first.span.offset
