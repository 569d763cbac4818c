"""`RadixTreeMiddleware`: text in, exact tokens out, as pure ASGI around the router's proxy.

A `/generate` is read and parsed once. Its text is matched and the tail encoded, and the body goes onward with ids in place of
the prompt. On the way back the same bytes go to the client and into the recorder. A request that cannot be recorded passes
through as it is, and its reply says so in `x-radix-recorded`.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Raw
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from middleware_hub.hub import Hub, unrecorded
from middleware_hub.metrics import RadixMetrics
from middleware_hub.persistence import metrics
from middleware_hub.persistence.memory import Memory
from middleware_hub.persistence.spelling import Spelling
from middleware_hub.radix import prompting, retrieval
from middleware_hub.radix.judge import Verdict
from middleware_hub.radix.prompting import Prompt
from middleware_hub.radix.records import Namespace
from middleware_hub.radix.responder import Recorder, Responder
from middleware_hub.radix.retrieval import MANY_TOKENS, RetrievalRequest
from middleware_hub.spans.chain import printed_ids
from middleware_hub.tokenizer import id_checks
from router.engines.sglang.limits import PromptLimits
from router.engines.sglang.request import GenerateRequest, new_weight_version
from router.errors import BadRequestError
from router.http.bodies import read_json, replay, with_body
from router.http.handlers import ByMethod
from router.http.headers import first_values, header
from router.http.json_cost import LIGHT
from router.http.offload import offload
from router.http.reply import EditedReply
from router.http.request_state import RouteHint, request_state
from router.http.responses import send_json
from router.plugins import MiddlewareContext

logger = logging.getLogger(__name__)

VERSION_CALLS = (
    "/update_weight_version",
    "/update_weights_from_disk",
    "/update_weights_from_tensor",
    "/update_weights_from_distributed",
    "/update_weights_from_ipc",
)
"""Paths that give workers another weight version."""

COLLECT_SECONDS = 0.002
"""How long a step of the collection may hold up the event loop."""


class RadixTreeMiddleware:
    """Serves `/generate`, `/retrieve_from_text`, `/radix_tree/explain` and `/radix_tree/stats`; the rest passes untouched.

    Raises BadRequestError when made without a usable `--tokenizer-path`.
    """

    def __init__(self, app: ASGIApp, context: MiddlewareContext) -> None:
        config = context.config.radix
        self._hub = hub = Hub.of(context)
        self.app = app
        self.tokenizer = hub.tokenizer
        self.tree = hub.open_tree(config)
        self.memory = self._open_memory(hub, context)
        self.recorder = Recorder(self.tree, hub.judge, context.tracer, self.memory)
        self.metrics = RadixMetrics(context.registry, self.tree)
        self.force_logprobs = config.force_logprobs
        self._tracer = context.tracer
        self._max_body_bytes = context.config.server.max_body_bytes
        self._limits = PromptLimits(context.config.server.max_batch, config.max_text_tokens)
        self._max_context = context.config.sessions.max_context
        self._collecting = False
        self._routes: dict[str, ASGIApp] = {
            # SGLang takes PUT, too.
            "/generate": ByMethod({"POST": self._generate, "PUT": self._generate}),
            "/retrieve_from_text": ByMethod({"POST": self._retrieve}),
            "/radix_tree/explain": ByMethod({"POST": self._explain}),
            "/radix_tree/stats": ByMethod({"GET": self._stats}),
            **dict.fromkeys(VERSION_CALLS, self._new_version),
        }

    def _open_memory(self, hub: Hub, context: MiddlewareContext) -> Memory | None:
        """Return what fills the tree from the store; None without a store."""
        if hub.store is None or hub.versions is None:
            return None
        spelling = Spelling(hub.tokenizer.spell_prompt, hub.tokenizer.vocabulary.special_ids)
        max_bytes = context.config.store.max_bytes
        hub.memory = memory = Memory(self.tree, hub.store, hub.serials, hub.versions, spelling, max_bytes)
        metrics.register(context.registry, memory)
        return memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._hub.live(self.app, scope, receive, send)
            self.tree.clear()
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        inside = self._routes.get(scope["path"], self.app)
        if inside is not self.app and request_state(scope).kept:
            inside = self.app
        if isinstance(inside, ByMethod):
            inside = inside.handler(scope)
        await inside(scope, receive, send)

    # /generate -----------------------------------------------------------------------------------------------------------

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_json(scope, receive, self._max_body_bytes, ids=True)
        request = self._parsed(body) if len(body) <= LIGHT else await offload(True, self._parsed, body)
        encoded: list[list[range]] = []
        if request.segments is not None:
            assembled = await prompting.assemble(
                self.tokenizer,
                request.segments,
                batch=request.batch,
                max_context=self._max_context,
                tracer=self._tracer,
            )
            request = request.assembled([one.ids for one in assembled])
            encoded = [one.encoded for one in assembled]
        reason = request.unrecordable
        if reason is not None:
            await self._pass(scope, receive, send, request.passed_on(body), reason)
            return
        state, headers = request_state(scope), first_values(scope)
        namespace = state.caller.tenant, "", headers.get(b"x-radix-namespace", b"").decode("latin-1")
        parents = _parents(headers.get(b"x-radix-parent", b"").decode("latin-1"), request.prompts)
        routing_key = headers.get(b"x-smg-routing-key")
        prompts: list[Prompt] = []
        printed: list[Raw] = []
        try:
            for number, parent in enumerate(parents):
                prompts.append(await self._prompt(namespace, request, number, parent, encoded))
                printed.append(Raw(printed_ids(prompts[-1].packed)))
                if number:
                    await asyncio.sleep(0)
            out, sent = request.for_worker(printed, state.request, force_logprobs=self.force_logprobs)
            hint = RouteHint(
                prompts[0].match.text, prompts[0].ids, None if routing_key is None else routing_key.decode("latin-1")
            )
            responder = Responder(self.recorder, self, request, prompts, hint, force_logprobs=self.force_logprobs)
            inner = with_body(scope, out, request=sent, hint=hint)
            inner["headers"] = [pair for pair in inner["headers"] if pair[0] != b"content-type"]
            inner["headers"].append((b"content-type", b"application/json"))  # whatever the client called it
            try:
                sending = send if self.memory is None else responder.acknowledged(send)
                await self.app(inner, replay(out, receive), EditedReply(responder, sending).send)
            finally:
                # However it ended: what was streamed to a client is remembered.
                responder.close()
        finally:
            for prompt in prompts:
                self.tree.unpin(prompt.match)

    def _parsed(self, body: bytes) -> GenerateRequest:
        request = GenerateRequest.parse(body, self._limits)
        for ids in request.ids or ():
            id_checks.check_ids(self.tokenizer.vocabulary, ids)
        id_checks.check_options(self.tokenizer.vocabulary, request)
        return request

    async def _prompt(
        self,
        namespace: Namespace,
        request: GenerateRequest,
        number: int,
        parent: str | None,
        encoded: Sequence[Sequence[range]],
    ) -> Prompt:
        """Return one prompt of a request, its match pinned."""
        if request.lora_paths:
            namespace = namespace[0], request.lora_path(number), namespace[2]
        if request.texts is not None:
            text = request.texts[number]
            prompt = await prompting.from_text(
                self.tree, self.tokenizer, namespace, text, parent, self._tracer, self.memory
            )
        else:
            assert request.ids is not None
            prompt = await prompting.from_ids(
                self.tree,
                self.tokenizer,
                namespace,
                request.ids[number],
                parent,
                self._tracer,
                encoded[number] if encoded else (),
                self.memory,
            )
        matched = "fresh" if prompt.match.cut.span is None else "continued"
        self.metrics.prompted(prompt.reused, prompt.encoded, matched, *prompt.reasons)
        return prompt

    async def _pass(self, scope: Scope, receive: Receive, send: Send, body: bytes, reason: str) -> None:
        """Send a request on as it came. Its reply only gains the header that says why it is not recorded."""
        self.metrics.answered("no", reason)
        await self.app(with_body(scope, body), replay(body, receive), unrecorded(send, reason))

    @staticmethod
    def _namespace(scope: Scope, lora_path: str = "") -> Namespace:
        return request_state(scope).caller.tenant, lora_path, header(scope, b"x-radix-namespace") or ""

    def count(self, verdicts: Sequence[Verdict]) -> None:
        """Count and log the verdicts on the replies of a request, and start a collection if the tree is over its budget."""
        bad: dict[tuple[str, str], list[Verdict]] = {}
        for verdict in verdicts:
            self._count(verdict)
            if verdict.outcome != "exact":
                bad.setdefault((verdict.outcome, verdict.reason), []).append(verdict)
        for alike in bad.values():  # one line, however large the batch
            level = logging.WARNING if any(one.suspicious for one in alike) else logging.INFO
            what = "a reply was" if len(alike) == 1 else f"{len(alike)} of {len(verdicts)} replies were"
            logger.log(level, "%s not recorded as exact: %s %s", what, alike[0].reason, alike[0].detail)
        self._keep_to_budget()

    def _keep_to_budget(self) -> None:
        if self.tree.over_budget and not self._collecting:
            self._collecting = True
            # Not a part of this request.
            asyncio.get_running_loop().call_soon(self._collect, context=contextvars.Context())

    def _count(self, verdict: Verdict) -> None:
        self.metrics.answered(verdict.outcome, verdict.reason)
        if verdict.generation is not None:
            span = verdict.generation.span
            assert span.versions is not None, "a reply was sampled"
            self.metrics.recorded(span.count, self.tree.clock.staleness(span.versions))

    def _collect(self) -> None:
        """Make one step of the collection. The event loop turns between steps."""
        before = self.tree.stats.evicted["never_retrieved"]
        more = self.tree.collect(seconds=COLLECT_SECONDS)
        lost = self.tree.stats.evicted["never_retrieved"] - before
        if lost:
            logger.warning("%d replies were dropped that nobody had retrieved: raise --radix-max-tokens", lost)
        self._collecting = more
        if more:
            asyncio.get_running_loop().call_later(COLLECT_SECONDS, self._collect)

    async def _new_version(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a call that gives all workers new weights. When it is done, its version is the current one."""
        body = await read_json(scope, receive, self._max_body_bytes)
        version = new_weight_version(body)

        async def observing(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200 and version is not None:
                self.tree.clock.set(version)
                self.recorder.judge.workers.set_everywhere(version)
                if self.memory is not None:
                    await self.memory.write_versions()
            await send(message)

        await self.app(with_body(scope, body), replay(body, receive), observing)

    # The tree ------------------------------------------------------------------------------------------------------------

    async def _retrieve(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = await self._asked(scope, receive)
        namespace = self._namespace(scope, request.lora_path or "")
        parts: list[bytes] = []
        for number, text in enumerate([request.text] if isinstance(request.text, str) else request.text):
            answer = await retrieval.retrieve(
                self.tree, self.tokenizer, namespace, text, request, request.expected(number), self.memory
            )
            found = answer["trajectories"] if request.cover else [answer]
            for one in found:
                self.metrics.retrievals.labels(str(one["exact"]).lower()).inc()
                for reason in one["reasons"]:
                    self.metrics.retrieval_reasons.labels(reason).inc()
            heavy = sum(one["token_length"] for one in found) > MANY_TOKENS
            parts += (b",", await offload(heavy, _encoded, answer))
            self._keep_to_budget()
            await asyncio.sleep(0)
        await send_json(send, 200, parts[1] if isinstance(request.text, str) else [b"[", *parts[1:], b"]"])

    async def _asked(self, scope: Scope, receive: Receive) -> RetrievalRequest:
        body = await read_json(scope, receive, self._max_body_bytes)
        return await offload(len(body) > LIGHT, RetrievalRequest.parse, body, self._limits)

    async def _explain(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = await self._asked(scope, receive)
        if not isinstance(request.text, str):
            raise BadRequestError("`text` must be one string")
        namespace = self._namespace(scope, request.lora_path or "")
        if self.memory is not None:
            await self.memory.cover(namespace, request.text)
            self._keep_to_budget()
        await send_json(
            send, 200, msgspec.json.encode(self.tree.departure(namespace, request.text).explained(request.text))
        )

    async def _stats(self, scope: Scope, receive: Receive, send: Send) -> None:
        stats, clock = self.tree.stats, self.tree.clock
        answer: dict[str, Any] = {
            "nodes": stats.nodes,
            "generations": stats.generations,
            "spans": stats.spans,
            "tokens": stats.tokens,
            "max_tokens": self.tree.max_tokens,
            "characters": stats.characters,
            "bytes": self.tree.estimated_bytes,
            "hits": stats.hits,
            "misses": stats.misses,
            "weight_version": clock.current,
            "weight_versions": clock.known,
            "evictions": dict(stats.evicted),
            "evicted_tokens": stats.evicted_tokens,
        }
        if self.memory is not None:
            answer["store"] = await self.memory.stats()
        await send_json(send, 200, msgspec.json.encode(answer))


def _parents(given: str, prompts: int) -> list[str | None]:
    """Return the parent of each prompt. One name counts for all prompts; several must be as many as there are prompts."""
    names = [name.strip() or None for name in given.split(",")] if given and prompts > 1 else []
    return names if len(names) == prompts else [given or None] * prompts


def _encoded(answer: dict[str, Any]) -> bytes:
    """Return an answer as JSON. Long lists are encoded in pieces: one long call holds up the event loop from a thread, too."""
    return msgspec.json.encode({key: _by_pieces(value) for key, value in answer.items()})


def _by_pieces(value: Any) -> Any:
    if isinstance(value, list) and value and isinstance(value[0], dict) and "tokens" in value[0]:
        return [Raw(_encoded(one)) for one in value]
    if not isinstance(value, list) or len(value) <= MANY_TOKENS:
        return value
    pieces = [msgspec.json.encode(value[at : at + MANY_TOKENS])[1:-1] for at in range(0, len(value), MANY_TOKENS)]
    return Raw(b"[%b]" % b",".join(pieces))
