"""The life of a turn: prepare -> tokenize -> generate -> commit. Here it begins; generations end it by themselves."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.types import ASGIApp, Scope

from middleware_hub.chat.keys import setting_of
from middleware_hub.chat.messages import ChatRequest
from middleware_hub.chat.refusals import context_length_error
from middleware_hub.hub import Hub
from middleware_hub.radix import prompting
from middleware_hub.radix.tree import Namespace, RadixTree
from middleware_hub.sessions.metrics import SessionMetrics
from middleware_hub.sessions.prompt.composed_prompt import ComposedPrompt
from middleware_hub.sessions.prompt.composing import EDITED_TURN, FALLBACKS, LEFT_OUT, Composer
from middleware_hub.sessions.registry import SessionStore
from middleware_hub.sessions.session import Act, Session
from middleware_hub.sessions.trie.nodes import BranchHandle, Checkpoint, PreparedTurn
from middleware_hub.sessions.turn.exchange import Exchange, RequestKey
from middleware_hub.sessions.turn.forced_calls import structural_tag
from middleware_hub.sessions.turn.generation import Generation
from middleware_hub.sessions.turn.reasoning import Thoughts
from middleware_hub.tokenizer.tokenizer import Tokenizer
from router.engines.sglang import GenerateRequest
from router.engines.sglang.worker_request import new_rid
from router.http.asgi import header
from router.observability.tracing import Tracer

REMEMBERED = 1024
"""Sets of options that were found to be harmless: of a conversation they are the same at every turn."""


class Turns:
    """Begins exchanges.

    Args:
        app: the layers inside.
        hub: what is shared with the layers inside.
        composer: makes prompts.
        thoughts: makes parsers of replies.
        store: of sessions.
        metrics, tracer: what is told.
        call_parser: its name.
        orphan_grace: seconds that a generation goes on when its client has left.
        max_context: tokens that the model takes; None if it is for the worker to say.
        force_logprobs: whether all sampled tokens come with logprobs.
    """

    def __init__(
        self,
        app: ASGIApp,
        hub: Hub,
        composer: Composer,
        thoughts: Thoughts,
        store: SessionStore,
        metrics: SessionMetrics,
        tracer: Tracer,
        *,
        call_parser: str,
        orphan_grace: float,
        max_context: int | None,
        force_logprobs: bool,
    ) -> None:
        self._app = app
        self._hub = hub
        self._judge = hub.judge
        self._composer = composer
        self._thoughts = thoughts
        self._store = store
        self._metrics = metrics
        self._tracer = tracer
        self._call_parser = call_parser
        self._orphan_grace = orphan_grace
        self._max_context = max_context
        self._force_logprobs = force_logprobs
        self._checked: set[bytes] = set()

    def adopt(self, session: Session, key: RequestKey) -> Exchange | None:
        """What answers the same request already, and has nobody to answer it to."""
        session.require(Act.GENERATE)
        found = session.adopt(key)
        if found is not None:
            self._metrics.resent.labels("replayed" if found.over else "adopted").inc()
            found.attach()
        return found

    def begin(self, session: Session, request: ChatRequest, scope: Scope, key: RequestKey) -> Exchange:
        """Prepare a turn; from then on it is known, and goes on by itself.

        Raises SessionOverError, CapacityError: then nothing has changed. What is wrong later is the exchange's failure.
        """
        session.require(Act.GENERATE)
        session.touch()
        if session.lasting:
            self._store.require_room()
        begun = time.perf_counter()
        with self._tracer.span("prepare", messages=len(request.messages)) as span:
            turn = session.trie.prepare(setting_of(request), request.messages, parent=key.parent)
            # Held by handles from here on, while its tail is encoded.
            handles = [session.trie.open(turn, new_rid()) for _ in range(request.samples)]
            span.set(covered=turn.covered)
        self._metrics.seconds.labels("prepare").observe(time.perf_counter() - begun)
        exchange = Exchange(
            key, grace=self._orphan_grace if session.lasting else 0.0, on_over=lambda one: self._over(session, one)
        )
        session.begin(exchange)
        exchange.start(lambda: self._compose(session, request, scope, turn, handles, exchange))
        return exchange

    async def _compose(
        self,
        session: Session,
        request: ChatRequest,
        scope: Scope,
        turn: PreparedTurn,
        handles: list[BranchHandle],
        exchange: Exchange,
    ) -> list[Generation]:
        """The generations of a prepared turn. Raises BadRequestError, SessionOverError: then nothing has changed."""
        begun = time.perf_counter()
        try:
            with self._tracer.span("tokenize") as span:
                starts = self._starts(session, request, scope, turn.named)
                prompt = await self._composer.compose(turn, request, starts)
                span.set(reused=prompt.reused, encoded=prompt.tokens - prompt.reused)
            if turn.unknown_parent and ((starts is not None and starts.knew_parent) or prompt.holds(turn.named)):
                # The messages do not lead to it, and its tokens are there all the same: in a splice, an edited turn, a text.
                turn = msgspec.structs.replace(turn, unknown_parent=False)
            if turn.edited and not prompt.edited:
                prompt = msgspec.structs.replace(prompt, reasons=(EDITED_TURN, *prompt.reasons))
            session.require(Act.GENERATE)
            for handle in handles:
                # Encoded anew, what it was to go on from is the end of a branch.
                handle.goes_on_from(prompt.checkpoint, apart=prompt.apart)
            sampling = self._sampling(session, request, turn, prompt)
            exchange.notes = _notes(turn, prompt)
            generations = [
                Generation(
                    self._app,
                    scope,
                    self._judge,
                    session.trie,
                    turn,
                    handle,
                    prompt,
                    request,
                    sampling,
                    self._thoughts.parser(request, turn, prompt),
                    lasting=session.lasting,
                    routing_key=session.id or None,
                    logprobs=self._force_logprobs,
                    bell=exchange.ring,
                    tracer=self._tracer,
                    on_commit=lambda made, checkpoint: self._committed(session, made, checkpoint),
                )
                for handle in handles
            ]
        except BaseException:
            for handle in handles:
                session.trie.abandon(handle)
            raise
        self._count(turn, prompt, request, exchange.notes)
        self._metrics.seconds.labels("tokenize").observe(time.perf_counter() - begun)
        return generations

    def _starts(
        self, session: Session, request: ChatRequest, scope: Scope, parent: str | None
    ) -> _RememberedText | None:
        """Without a session, a conversation that is not known by its messages may be known by its text."""
        tree = self._hub.tree
        if session.lasting or tree is None:
            return None
        adapter = request.extra.get("lora_path")
        lora = "" if adapter is None else msgspec.json.decode(adapter)
        if not isinstance(lora, str):
            return None
        namespace = session.tenant, lora, header(scope, b"x-radix-namespace") or ""
        return _RememberedText(tree, self._hub.tokenizer, namespace, parent, self._tracer)

    def _sampling(
        self, session: Session, request: ChatRequest, turn: PreparedTurn, prompt: ComposedPrompt
    ) -> dict[str, Any]:
        """`sampling_params`: the session's, the request's over them, and a limit that fits. Raises BadRequestError."""
        sampling = {**session.sampling, **request.sampling}
        # Where a stop is shown in the text, it would stand there twice when the turn is gone on with.
        sampling.pop("no_stop_trim", None)
        if request.call_choice not in ("auto", "none"):
            sampling["structural_tag"] = structural_tag(
                self._call_parser,
                request.tools or (),
                request.call_choice,
                parallel=request.parallel_calls,
                thinking=self._thoughts.open(request, turn, prompt),
            )
        if self._thoughts.needs_special(request):
            sampling["skip_special_tokens"] = False
        self._check(request, sampling)
        asked = sampling.get("max_new_tokens")
        limit = sampling["max_new_tokens"] = self._limit(session, asked, prompt)
        least = sampling.get("min_new_tokens")
        if limit is not None and limit != asked and isinstance(least, int) and (asked is None or least <= asked):
            # A client that asked for what fits together must not be refused for what was taken from it here.
            sampling["min_new_tokens"] = min(least, limit)
        return sampling

    def _check(self, request: ChatRequest, sampling: dict[str, Any]) -> None:
        """Raises BadRequestError for options that end a worker's process, as `/generate` does."""
        asked = {"input_ids": [0], "sampling_params": sampling, "return_logprob": True}
        if request.top_logprobs:
            asked["top_logprobs_num"] = request.top_logprobs
        options = msgspec.json.encode({**request.extra, **asked})
        if options in self._checked:
            return
        prompting.check_options(self._judge.tokenizer, GenerateRequest.parse(options))
        if len(self._checked) >= REMEMBERED:
            self._checked.clear()
        self._checked.add(options)

    def _limit(self, session: Session, asked: Any, prompt: ComposedPrompt) -> int | None:
        limits = [asked] if isinstance(asked, int) else []
        if self._max_context is not None:
            room = self._max_context - prompt.tokens
            if room < 1:
                raise context_length_error(
                    f"this conversation has {prompt.tokens} tokens, and the model's context {self._max_context}: "
                    "shorten it, or condense what came first"
                )
            limits.append(room)
        if session.response_budget is not None:
            limits.append(max(0, session.response_budget - _response_tokens(prompt)))
        return min(limits, default=None)

    def _count(self, turn: PreparedTurn, prompt: ComposedPrompt, request: ChatRequest, notes: tuple[str, ...]) -> None:
        if prompt.spliced:
            made = "spliced"
            self._metrics.spliced_turns.inc(prompt.spliced)
            self._metrics.tokens.labels("spliced").inc(prompt.reused)
        elif prompt.checkpoint is not None:
            made = "continued"
        else:
            made = "first" if turn.checkpoint is None and turn.elsewhere is None else "anew"
        for reason in prompt.fallbacks:
            self._metrics.fallbacks.labels(reason).inc()
        count = self._metrics.turns.labels
        causes = tuple(reason for reason in prompt.reasons if reason != EDITED_TURN)
        why = causes[:1] if made in ("anew", "spliced") else ()
        count(made, why[0] if why else "").inc()
        for note in notes:
            if note == EDITED_TURN:
                count(note, prompt.edited or "rewritten").inc()
            elif note not in why and note not in FALLBACKS and note != "spliced":
                count(note, "").inc()
        self._metrics.tokens.labels("reused").inc(prompt.reused * request.samples)
        self._metrics.tokens.labels("encoded").inc(prompt.tokens - prompt.reused)

    def _committed(self, session: Session, prompt: ComposedPrompt, checkpoint: Checkpoint) -> None:
        added = session.committed(prompt, checkpoint)
        if session.lasting:
            self._store.held(added)
        self._composer.committed(prompt, checkpoint)
        self._metrics.tokens.labels("sampled").inc(len(checkpoint.span))

    def _over(self, session: Session, exchange: Exchange) -> None:
        for generation in exchange.generations:
            self._metrics.seconds.labels("generate").observe(generation.seconds)
            if generation.commit_seconds is not None:
                self._metrics.seconds.labels("commit").observe(generation.commit_seconds)
            verdict = generation.verdict
            if verdict is not None:
                self._metrics.replies.labels(verdict.outcome, verdict.reason).inc()
            else:
                self._metrics.replies.labels("no", "no reply").inc()
        session.settle(exchange)


class _RememberedText:
    """Encodes whole prompts of one request as the radix tree remembers their text.

    Args:
        tree, tokenizer, namespace, tracer: see `prompting.from_text`.
        parent: the reply that the request names; `knew_parent` tells whether its tokens are in the prompt.
    """

    def __init__(
        self, tree: RadixTree, tokenizer: Tokenizer, namespace: Namespace, parent: str | None, tracer: Tracer
    ) -> None:
        self._tree = tree
        self._tokenizer = tokenizer
        self._namespace = namespace
        self._parent = parent
        self._tracer = tracer
        self.knew_parent = False

    async def __call__(self, text: str) -> tuple[Sequence[int], int]:
        prompt = await prompting.from_text(
            self._tree, self._tokenizer, self._namespace, text, self._parent, self._tracer
        )
        self._tree.unpin(prompt.match)
        if self._tokenizer.spell_prompt(prompt.ids) != text:
            # A hidden end of turn stays in a text that goes on behind it; a template that writes none there means none.
            ids = await self._tokenizer.encode(text, start=True)
            if self._tokenizer.spell_prompt(ids) != self._tokenizer.spell_prompt(prompt.ids):
                return ids, 0
        self.knew_parent = self._parent is not None and not prompt.match.unknown_parent
        return prompt.ids, prompt.reused


def _notes(turn: PreparedTurn, prompt: ComposedPrompt) -> tuple[str, ...]:
    found = (
        ("ambiguous", turn.ambiguous),
        ("unknown_parent", turn.unknown_parent),
        (LEFT_OUT, prompt.left_out > 0),
    )
    return tuple(dict.fromkeys((*(name for name, holds in found if holds), *prompt.reasons)))


def _response_tokens(prompt: ComposedPrompt) -> int:
    """Tokens of a prompt behind its first one."""
    checkpoint = prompt.checkpoint
    if checkpoint is None:
        return 0
    first = list(checkpoint.lineage())[-1]
    return prompt.tokens - first.span.offset
