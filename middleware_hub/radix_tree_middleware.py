"""`RadixTreeMiddleware`: from texts to exact tokens, as pure ASGI around the router's proxy.

The middleware reads and parses a `/generate` once, matches its text, encodes the tail, and sends the body on with ids in place
of the prompt. On the way back the same bytes go to the client and into the recorder. A request that cannot be recorded passes
through unchanged, and its reply says so in `x-radix-recorded`.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import msgspec
from msgspec import Raw
from msgspec.structs import replace
from starlette.datastructures import QueryParams
from starlette.types import ASGIApp, Receive, Scope, Send

from middleware_hub import affinity, routes
from middleware_hub.chat.answer import check_one
from middleware_hub.generate import prompting
from middleware_hub.generate.prompting import Prompt
from middleware_hub.generate.responder import Recorder, Responder
from middleware_hub.hub import Hub, unrecorded
from middleware_hub.media.calls import PREFIX as MEDIA
from middleware_hub.media.calls import MediaCalls
from middleware_hub.media.media import Media, Shown
from middleware_hub.media.picture import Picture
from middleware_hub.media.reading import NO_PICTURES, BodyReader
from middleware_hub.media.viewer import Viewer, asks_inline
from middleware_hub.metrics import GroupsCollector, RadixMetrics
from middleware_hub.persistence import metrics
from middleware_hub.persistence.memory import Memory
from middleware_hub.persistence.spelling import Spelling
from middleware_hub.radix.judge import RECORDED, Verdict
from middleware_hub.radix.records import Namespace
from middleware_hub.retrieval import retrieval
from middleware_hub.retrieval.retrieval_request import RetrievalRequest
from middleware_hub.spans.answer_json import Lists
from middleware_hub.spans.chain import began_with, printed_ids
from middleware_hub.spans.media import Pictures
from middleware_hub.tokenizer.id_checks import check_ids, check_unmatched
from middleware_hub.trajectories.calls import TrajectoryCalls
from middleware_hub.trajectories.members import HEADERS, memberships
from middleware_hub.trajectories.sequences import Sequences
from router.engines.form.limits import PromptLimits
from router.engines.form.request import GenerateRequest
from router.engines.form.worker_request import WorkerRequest
from router.engines.json_cost import LIGHT
from router.errors import BadRequestError
from router.http.bodies import read_json
from router.http.disconnect import ClientConnection
from router.http.handlers import ByMethod, by_method, for_method
from router.http.headers import as_json, first_values, header, request_target, text_of
from router.http.offload import offload
from router.http.request_state import RouteHint, request_state
from router.http.responses import send_json
from router.plugins import MiddlewareContext
from router.proxy.generate_call import GenerateCall
from router.proxy.worker_reply import WorkerReply

logger = logging.getLogger(__name__)

EXPANDED = b"x-radix-media"
COLLECT_SECONDS = 0.002
"""How long a step of the collection may hold up the event loop."""
OTHER_PATH = "other_path"


class RadixTreeMiddleware:
    """Serves `/generate`, `/retrieve_from_text`, `/radix_tree/...` and `/trajectories/...`; the rest passes untouched.

    Raises BadRequestError when made without a usable `--tokenizer-path`.
    """

    innermost = True

    def __init__(self, app: ASGIApp, context: MiddlewareContext) -> None:
        config = context.config.radix
        self._hub = hub = Hub.of(context)
        self._bodies = BodyReader.of(context, None if hub.media is None else hub.shelf)
        self._max_body_bytes = context.config.server.max_body_bytes
        self.app = app
        self.tokenizer = hub.tokenizer
        self.tree = hub.open_tree(config)
        self.memory = self._open_memory(hub, context)
        self.recorder = Recorder(
            self.tree, hub.judge, context.tracer, self.memory, hub.groups, sees=hub.media is not None
        )
        self.metrics = RadixMetrics(context.registry, self.tree)
        self.force_logprobs = config.force_logprobs
        hub.recorded = self.generate
        self._tracer = context.tracer
        self._limits = PromptLimits(context.config.server.max_batch, config.max_text_tokens)
        self._max_context = context.config.sessions.max_context
        self._collecting = False
        context.registry.register(GroupsCollector(hub.groups.counts, hub.groups.held))
        sequences = Sequences(self.tree, self.memory, lambda: hub.sessions, hub.media)
        limit = self._max_body_bytes
        trajectories = TrajectoryCalls(
            hub.groups, sequences, hub.clock, context.stopping, self.memory, max_body_bytes=limit
        )
        calls = {"generate": self._generate, "retrieve": self._retrieve, "explain": self._explain, "stats": self._stats}
        self._routes: dict[str, ASGIApp] = {
            **by_method(routes.bound(routes.RADIX_TREE, calls)),
            **trajectories.routes,
            **dict.fromkeys(routes.SAMPLED_ELSEWHERE, self._elsewhere),
        }
        if self._bodies is not None:
            self._routes |= dict.fromkeys(routes.READ_ELSEWHERE, self._unsampled)
        self._media = MediaCalls.of(context, hub.stock).serve
        if context.peers is not None:
            context.peers.on_version = self._new_version

    def _open_memory(self, hub: Hub, context: MiddlewareContext) -> Memory | None:
        """Return what fills the tree from the store; None without a store."""
        if hub.store is None or hub.versions is None:
            return None
        vocabulary = hub.tokenizer.vocabulary
        spelling = Spelling(hub.tokenizer.spell_prompt, vocabulary.spell, vocabulary.special_ids)
        max_bytes = context.config.store.max_bytes
        hub.memory = memory = Memory(self.tree, hub.store, hub.serials, hub.versions, spelling, max_bytes, hub.saving)
        metrics.register(context.registry, memory)
        return memory

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] == "lifespan":
            return self._live(scope, receive, send)
        inside = self._routes.get(scope["path"]) if scope["type"] == "http" else None
        if inside is None:
            media = scope["type"] == "http" and scope["path"].startswith(MEDIA)
            inside = self._media if media else self.app
        elif isinstance(inside, ByMethod):
            inside = inside.handlers.get(scope["method"]) or for_method(inside.handlers, scope)
        return inside(scope, receive, send)

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._hub.live(self.app, scope, receive, send)
        self.tree.clear()

    # /generate -----------------------------------------------------------------------------------------------------------

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        pictures = NO_PICTURES
        if self._bodies is None:
            body = await read_json(scope, receive, self._max_body_bytes, ids=True)
        else:
            body, _, pictures = await self._bodies.read(scope, receive, ids=True)
        state, headers = request_state(scope), scope["headers"]
        call = GenerateCall(
            body,
            None,
            headers,
            state.record,
            state.caller,
            method=scope["method"],
            target=request_target(scope),
            named=first_values(headers),
        )
        async with ClientConnection(receive) as client:
            reply = await self.generate(call, pictures=pictures)
            try:
                await reply.answer(send, client)
            finally:
                await reply.aclose()

    async def generate(
        self,
        call: GenerateCall,
        *,
        verdicts: list[Verdict] | None = None,
        unheard: bool = False,
        pictures: Mapping[str, Picture] = NO_PICTURES,
    ) -> WorkerReply:
        """Return the reply to a call, which is recorded as it is read. The caller closes it.

        Args:
            call: its body may have text or segments. The headers name the namespace, the parent and the group.
            verdicts: gets the verdict on each reply when all of it was recorded.
            unheard: nobody knows whether replies in the prompt were sampled, because the store could not be asked.
            pictures: those of its body, by digest, as far as they came with it.

        Raises what `Backend.generate` raises, and BadRequestError.
        """
        body = call.body
        request = self._parsed(body) if len(body) <= LIGHT else await offload(True, self._parsed, body)
        encoded: list[list[range]] = []
        if request.segments is not None:
            assembled = await prompting.assemble(
                self.tokenizer,
                request.segments,
                batch=request.batch,
                limits=self._limits,
                max_context=self._max_context,
                tracer=self._tracer,
            )
            request = request.assembled([one.ids for one in assembled])
            encoded = [one.encoded for one in assembled]
        media, shown, headers = self._hub.media, list[Shown](), call.named
        if media is not None:
            request, shown = await self._shown(media, request, call.caller.tenant, pictures, headers.get(EXPANDED))
        reason = None if shown else request.unrecordable
        if reason is not None:
            return await self._unrecorded(call, request.passed_on(body), reason)
        namespace = call.caller.tenant, "", headers.get(b"x-radix-namespace", b"").decode("latin-1")
        named = headers.get(b"x-radix-parent")
        parents = [None] * request.prompts if named is None else _parents(text_of(named), request.prompts)
        members = () if headers.keys().isdisjoint(HEADERS) else memberships(headers, request.prompts)
        routing_key = headers.get(b"x-smg-routing-key")
        prompts: list[Prompt] = []
        printed: list[Raw] = []
        try:
            for number, parent in enumerate(parents):
                seen = media.pictures(namespace[0], shown[number].digests) if media is not None and shown else None
                prompt = await self._prompt(namespace, request, number, parent, encoded, seen)
                if unheard:
                    prompt = replace(prompt, match=replace(prompt.match, unheard=True))
                prompts.append(replace(prompt, member=members[number]) if members else prompt)
                if media is not None and shown:
                    media.check_prompt(prompt.packed, prompt.media)
                    media.check_runs(shown[number], prompt.media, prompt.unknown)
                    reasons = *prompt.reasons, *shown[number].reasons
                    prompts[-1] = replace(prompts[-1], reasons=reasons, pictures=shown[number].pictures)
                printed.append(Raw(printed_ids(prompt.sent if prompt.media else prompt.packed)))
                if number:
                    await asyncio.sleep(0)
            if self._hub.saving is not None:
                self._hub.saving.admit()
            further = None
            if media is not None and media.bias:
                further = {"sampling_params": request.biased(media.bias)}
            if media is not None and shown:
                asks = media.asks_ids(unknown=any(prompt.unknown for prompt in prompts), stream=request.stream)
                further = {
                    **(further or {}),
                    **media.worker_fields(call.caller.tenant, shown, batch=request.batch, asks_ids=asks),
                }
            finish = partial(
                request.for_worker, printed, call.request, force_logprobs=self.force_logprobs, further=further
            )
            heavy = shown and sum([one.size for one in shown]) > LIGHT
            call.body, call.request = await offload(True, finish) if heavy else finish()
            if headers.get(b"content-type") != b"application/json":
                call.headers = as_json(call.headers)
            first = prompts[0]
            span = first.match.cut.span
            call.hint = RouteHint(
                first.match.text,
                first.ids[: first.media[0].start] if first.media else first.ids,
                None if routing_key is None else routing_key.decode("latin-1"),
                conversation=partial(affinity.of_text, {}, first.match),  # a client may have one word for all it does
                continues=span is not None and span.answered >= 0,
            )
            call.began = partial(_began, prompts)
            responder = Responder(
                self.recorder,
                self,
                request,
                prompts,
                call.hint,
                affinity.of_text(headers, first.match),
                force_logprobs=self.force_logprobs,
                media=media if shown else None,
                verdicts=verdicts,
            )
        except BaseException:
            for prompt in prompts:
                self.tree.unpin(prompt.match)
            raise
        try:
            reply = await self._hub.backend.generate(call)
        except BaseException:
            responder.over()
            raise
        reply.when_closed(responder.over)
        try:
            await responder.follow(reply, call.salts)
        except BaseException:
            await reply.aclose()
            raise
        return reply

    async def _shown(
        self,
        media: Media,
        request: GenerateRequest,
        tenant: str,
        pictures: Mapping[str, Picture],
        form: bytes | None,
    ) -> tuple[GenerateRequest, list[Shown]]:
        """Return the request with keyed texts and compact ids, and the pictures of each prompt; none if it has no pictures.

        `form` is the header that says in which form the ids are. Raises BadRequestError.
        """
        if form not in (None, b"expanded"):
            raise BadRequestError("`x-radix-media` must be `expanded`, or left out")
        media.check_fields(request.fields)
        texts, given = request.texts, request.images()
        segments = [[one for one in each if isinstance(one, str)] for each in request.segments or ()]
        for text in chain.from_iterable(segments):
            media.check_text(text)
        if given is None:
            for text in texts or ():
                media.key(text, ())
            for ids in request.ids or ():
                media.check_ids(ids, None)
            return request, []
        held = await media.bring(tenant, chain.from_iterable(given), pictures)
        shown = [media.shown(tenant, one, pictures, held.unasked) for one in given]
        del held  # those that are shown hold them now
        for spelled, one in zip(segments, shown, strict=False):
            if one.pictures:
                media.check_words(spelled)
        if texts is not None:
            media.check_words([text for text, one in zip(texts, shown, strict=True) if one.pictures])
            texts = [media.key(text, one.digests) for text, one in zip(texts, shown, strict=True)]
        every_ids = request.ids
        if form is not None and every_ids is not None:
            heavy = sum(map(len, every_ids)) > prompting.MANY_TOKENS
            lengths = media.lengths(tenant, [digest for one in shown for digest in one.digests])
            pairs = zip(every_ids, shown, strict=True)
            compact = await offload(heavy, lambda: [media.collapsed(ids, one, lengths) for ids, one in pairs])
            every_ids, shown = [ids for ids, _ in compact], [one for _, one in compact]
        for ids, one in zip(every_ids or (), shown, strict=False):
            media.check_ids(ids, one.digests)
        return replace(request, texts=texts, ids=every_ids), shown

    def _parsed(self, body: bytes) -> GenerateRequest:
        request = GenerateRequest.parse(body, self._limits, vocabulary=self.tokenizer.vocabulary.size)
        for ids in request.ids or ():
            check = check_ids if request.unrecordable else check_unmatched
            check(self.tokenizer.vocabulary, ids)
        return request

    async def _prompt(
        self,
        namespace: Namespace,
        request: GenerateRequest,
        number: int,
        parent: str | None,
        encoded: Sequence[Sequence[range]],
        pictures: Pictures | None = None,
    ) -> Prompt:
        """Return one prompt of a request, its match pinned."""
        if request.lora_paths:
            namespace = namespace[0], request.lora_path(number), namespace[2]
        if request.texts is not None:
            text = request.texts[number]
            prompt = await prompting.from_text(
                self.tree, self.tokenizer, namespace, text, parent, self._tracer, self.memory, pictures
            )
        elif pictures is not None:
            assert request.ids is not None
            prompt = await prompting.from_ids_with_pictures(
                self.tree, self.tokenizer, namespace, request.ids[number], parent, pictures, self._tracer, self.memory
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
            try:
                prompting.check_rest(
                    self.tokenizer.vocabulary,
                    prompt,
                    request.ids[number],
                    None if request.segments is None else request.segments[number],
                    encoded[number] if encoded else (),
                    number if request.batch else None,
                )
            except BadRequestError:
                self.tree.unpin(prompt.match)
                raise
        matched = "fresh" if prompt.match.cut.span is None else "continued"
        self.metrics.prompted(prompt.reused, prompt.encoded, matched, *prompt.reasons)
        return prompt

    async def _unrecorded(self, call: GenerateCall, body: bytes, reason: str) -> WorkerReply:
        """Pass on a request unchanged. Its reply only gains the header that says why it is not recorded."""
        self.metrics.replies.counts["no", reason] += 1
        request = await offload(len(body) > LIGHT, WorkerRequest.parse, body, self._limits)
        call.body, call.request = body if request is None else request.body, request
        reply = await self._hub.backend.generate(call)
        reply.added.append((RECORDED, f"no; {reason}".encode("latin-1", "replace")))
        return reply

    async def _elsewhere(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send on what a worker samples for at a path of its own. Its reply gains the same header."""
        if self._bodies is not None and scope["method"] in ("POST", "PUT"):
            scope, receive = await self._bodies.passed_on(scope, receive)
        self.metrics.replies.counts["no", OTHER_PATH] += 1
        await self.app(scope, receive, unrecorded(send, OTHER_PATH))

    async def _unsampled(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send on what a worker reads at a path of its own, media perhaps."""
        if self._bodies is not None and scope["method"] in ("POST", "PUT"):
            scope, receive = await self._bodies.passed_on(scope, receive)
        await self.app(scope, receive, send)

    @staticmethod
    def _namespace(scope: Scope, lora_path: str = "") -> Namespace:
        return request_state(scope).caller.tenant, lora_path, header(scope, b"x-radix-namespace") or ""

    def count(self, verdicts: Sequence[Verdict]) -> None:
        """Count and log the verdicts on the replies of a request, and start a collection if the tree is over its budget."""
        bad: dict[tuple[str, str], list[Verdict]] = {}
        for verdict in verdicts:
            outcome, reason = verdict.outcome, verdict.reason
            self.metrics.replies.counts[outcome, reason] += 1
            if outcome != "exact":
                bad.setdefault((outcome, reason), []).append(verdict)
            if verdict.generation is not None:
                span = verdict.generation.span
                assert span.versions is not None, "a reply was sampled"
                self.metrics.recorded(span.count, self.tree.clock.staleness(span.versions))
        for alike in bad.values():  # one line, however large the batch
            what = "a reply was" if len(alike) == 1 else f"{len(alike)} of {len(verdicts)} replies were"
            logger.log(max(one.level for one in alike), "%s not recorded as exact: %s", what, alike[0].why)
        if self.tree.over_budget:
            self._keep_to_budget()

    def _keep_to_budget(self) -> None:
        if self.tree.over_budget and not self._collecting:
            self._collecting = True
            # Not a part of this request.
            asyncio.get_running_loop().call_soon(self._collect, context=contextvars.Context())

    def _collect(self) -> None:
        """Make one step of the collection. The event loop runs between steps."""
        before = self.tree.stats.evicted["never_retrieved"]
        more = self.tree.collect(seconds=COLLECT_SECONDS)
        lost = self.tree.stats.evicted["never_retrieved"] - before
        if lost:
            logger.warning("%d replies were dropped before they were retrieved: raise --radix-max-tokens", lost)
        self._collecting = more
        if more:
            asyncio.get_running_loop().call_later(COLLECT_SECONDS, self._collect)

    async def _new_version(self, version: str | None) -> None:
        """Note that a call has set the version of all workers, now the current one. None: another router has noted one."""
        if version is not None:
            self.tree.clock.set(version)
            self.recorder.judge.workers.set_everywhere(version)
            if self.memory is not None:
                await self.memory.write_versions()
        elif self.memory is not None:
            await self.memory.read_versions()

    # The tree ------------------------------------------------------------------------------------------------------------

    async def _retrieve(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, pictures = await self._asked(scope, receive)
        namespace = self._namespace(scope, request.lora_path or "")
        parts, lists = list[bytes](), Lists()
        texts = [request.text] if isinstance(request.text, str) else request.text
        texts, viewer = await self._keyed(scope, request, texts, pictures)
        for number, text in enumerate(texts):
            answer = await retrieval.retrieve(
                self.tree,
                self.tokenizer,
                namespace,
                text,
                request,
                request.expected(number),
                self.memory,
                lists,
                viewer,
            )
            for exact, reasons in answer.sequences:
                self.metrics.retrievals.labels(str(exact).lower()).inc()
                for reason in reasons:
                    self.metrics.retrieval_reasons.labels(reason).inc()
            parts += (b",", *answer.pieces)
            self._keep_to_budget()
            await asyncio.sleep(0)
        word = affinity.of_text(first_values(scope["headers"]), self.tree.match(namespace, texts[0]))
        answered = parts[1:] if isinstance(request.text, str) else [b"[", *parts[1:], b"]"]
        await send_json(send, 200, answered, [(affinity.HEADER, word)])

    async def _keyed(
        self, scope: Scope, request: RetrievalRequest, texts: list[str], pictures: Mapping[str, Picture]
    ) -> tuple[list[str], Viewer | None]:
        """Return the keyed texts of a request, and what shows their pictures. Raises BadRequestError."""
        media = self._hub.media
        if media is None:
            return texts, None
        tenant, given = request_state(scope).caller.tenant, request.images()
        inline = asks_inline(QueryParams(scope["query_string"]).get("media"))
        images = given or [[]] * len(texts)
        held, unasked = await media.bring(tenant, chain.from_iterable(images), pictures)
        named = [media.named(tenant, one, pictures, unasked) for one in images]
        keyed = [media.key(text, digests) for text, (digests, _) in zip(texts, named, strict=True)]
        held += [picture for _, found in named for picture in found]
        return keyed, Viewer(media, tenant, inline, held)

    async def _asked(self, scope: Scope, receive: Receive) -> tuple[RetrievalRequest, Mapping[str, Picture]]:
        pictures = NO_PICTURES
        if self._bodies is None:
            body = await read_json(scope, receive, self._max_body_bytes)
        else:
            body, _, pictures = await self._bodies.read(scope, receive)
        return await offload(len(body) > LIGHT, RetrievalRequest.parse, body, self._limits), pictures

    async def _explain(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, pictures = await self._asked(scope, receive)
        if not isinstance(request.text, str):
            raise BadRequestError("`text` must be one string")
        namespace = self._namespace(scope, request.lora_path or "")
        (text,), viewer = await self._keyed(scope, request, [request.text], pictures)
        stored, asked = self.memory is not None, True
        if self.memory is not None:
            asked = await self.memory.cover(namespace, text)
            self._keep_to_budget()
        explained = retrieval.explained(self.tree, namespace, text, viewer, stored=stored, asked=asked)
        await send_json(send, 200, msgspec.json.encode(explained))

    async def _stats(self, scope: Scope, receive: Receive, send: Send) -> None:
        beside = {} if self.memory is None else {"store": await self.memory.stats()}
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
            **beside,
        }
        await send_json(send, 200, msgspec.json.encode(answer))


def _began(prompts: Sequence[Prompt]) -> list[str | None]:
    """Return with which weight version the conversation of each prompt began; see `GenerateCall.began`."""
    return [began_with(prompt.match.cut.span, prompt.match.cut.take) for prompt in prompts]


def _parents(given: str, prompts: int) -> list[str | None]:
    """Return the parent of each prompt. One name counts for all prompts; a list must have one name for each."""
    names = [name.strip() or None for name in given.split(",")] if given and prompts > 1 else []
    found = names if len(names) == prompts else [given or None] * prompts
    for name in set(found):
        if name is not None:
            check_one(name, "x-radix-parent")
    return found
