"""A client's request, prepared for the workers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec
from msgspec import Raw
from starlette.types import Receive, Scope

from router.auth.permissions import meant_path, of_the_hub
from router.engines.form import ranks
from router.engines.form.outcome import lacks_path
from router.engines.form.worker_request import RoutePrompt, WorkerRequest, route_prompt
from router.engines.json import JSON_ERRORS, decode_any, decode_object, split_items
from router.errors import NotFoundError, UpstreamError
from router.http.bodies import gather_body
from router.http.headers import HeaderList, first_values, has_body, request_headers, request_target
from router.http.request_state import Caller, RequestRecord, RouteHint, request_state
from router.http.upstream import UpstreamBrokenError
from router.kv_cache.salts import CallSalts
from router.proxy.in_flight import InFlight
from router.proxy.request_ids import RequestIds
from router.workers.policy import RouteQuery
from router.workers.queue import Key

_NOT_OF_A_GENERATION = frozenset({b"content-encoding", b"x-override-rid"})
"""Headers that a generation is sent without. The first may say that there is no encoding. For the second, some SGLang workers
(`SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES`) forget the id in the body, and no abort would find the generation."""

_END_WITH_DONE = frozenset({"/generate", "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"})
"""Paths whose streams end with `[DONE]`. Others, such as those of Anthropic's dialect, end differently."""


class OutboundRequest(msgspec.Struct):
    """A request, with all that is needed to send it to one worker after the other.

    Attributes:
        path: without the query.
        record: how far it has come.
        in_flight: the generations that it asks for; None if it is no `/generate`.
        hint: what a middleware reports to the routing policy.
        target: path and query, as the client wrote them.
        query: what a routing policy may use.
        key: the line that the request stands in while no worker has room.
        alone: whether the prompt was read here, and is the only one.
        repeatable: whether sending it twice does no harm.
        limited: whether it is work, and may have to wait for a worker with room.
        ends_with_done: whether a stream that answers it has failed if it ends without `[DONE]`.
        whole: the generations of the request before any were left out, by their positions.
        left_out: restores the prompts that were aborted before the worker of this attempt had them.
        ids: restores the client's ids in the reply, if the request went to the same worker again under new ids.
        renewed: the generations that have new ids, before and after.
    """

    path: str
    record: RequestRecord
    in_flight: InFlight | None
    hint: RouteHint | None
    method: str
    target: str
    headers: HeaderList
    body: bytes | None
    query: RouteQuery
    key: Key
    alone: bool
    repeatable: bool
    limited: bool
    ends_with_done: bool
    whole: tuple[WorkerRequest, Sequence[int]] | None = None
    left_out: LeftOut | None = None
    ids: RequestIds | None = None
    renewed: tuple[WorkerRequest, WorkerRequest] | None = None

    def check_served(self, body: bytes) -> None:
        """Raise NotFoundError, which names the path that is meant, for a 404 of a worker that has no such path.

        A path of the hub comes to a worker only where the router runs without the middleware that serves it.
        """
        path = self.path
        if not lacks_path(body):
            return
        if of_the_hub(path):
            raise NotFoundError(f"this router runs without what serves {path}: see its --middleware and --no-sessions")
        if (meant := meant_path(path)) is None:
            return
        advice = ""
        if path.startswith("/v1/v1/"):
            advice = " The `base_url` of an OpenAI client ends with one /v1, that of an Anthropic client with none"
        elif meant == f"/v1{path}":
            advice = " The `base_url` of an OpenAI client ends with /v1"
        raise NotFoundError(f"no worker has a path {path}: did you mean {meant}?{advice}", meant=meant)

    def leave_out(self, in_flight: InFlight) -> None:
        """Leave out the prompts of a batch that are to end. If all are, the caller ends the request."""
        if in_flight.request is None or not in_flight.request.rids:
            return
        whole, positions = self.whole = self.whole or (in_flight.request, list(in_flight.rids))
        sent = [prompt for prompt, position in enumerate(positions) if not in_flight.to_end(position)]
        if 0 < len(sent) < len(in_flight.rids):
            self.left_out = LeftOut(whole, sent)
            in_flight.send_next(self.left_out.request, [positions[prompt] for prompt in sent])
            self.body = in_flight.body

    def renew_ids(self) -> None:
        """Replace the ids that the worker has seen already. Each new one begins with the old one."""
        in_flight = self.in_flight
        request = None if in_flight is None else in_flight.request
        if in_flight is not None and request is not None and request.rids:
            self.ids = RequestIds(request.rids, begin_with_names=True)
            in_flight.rids = dict(zip(in_flight.rids, self.ids.rids, strict=True))
            self.renewed = request, request.with_rids(self.ids.rids)
            self.body = self.renewed[1].body

    def salt(self, in_flight: InFlight, salts: CallSalts) -> None:
        """Give the body the salts that it has now: the weights may have changed while it waited."""
        self.body = salts.salted(self.sent(in_flight), in_flight.body, in_flight.positions)

    def sent(self, in_flight: InFlight) -> WorkerRequest | None:
        """Return the request of this attempt, under its ids. What was added to the body since is not in it."""
        request = in_flight.request
        return self.renewed[1] if self.renewed is not None and self.renewed[0] is request else request


class RequestReader:
    """Reads requests of clients.

    Args:
        forward_authorization: off where the header carries this router's own key.
        reads_prompts: whether the policy needs the prompts that no middleware has reported.
        reads_ranks: whether the ranks of workers are targets of their own, so that a client may name one.
    """

    def __init__(
        self, *, max_body_bytes: int, forward_authorization: bool, reads_prompts: bool, reads_ranks: bool = True
    ) -> None:
        self._max_body_bytes = max_body_bytes
        self._forward_authorization = forward_authorization
        self._reads_prompts = reads_prompts
        self._reads_ranks = reads_ranks

    async def read(self, scope: Scope, receive: Receive) -> OutboundRequest:
        """Return a whole request that is no `/generate`: a client that is slow to send holds no place at a worker.

        Raises BadRequestError for a target that is not a path; BodyTooLargeError, ClientDisconnectedError.
        """
        body = await gather_body(scope, receive, self._max_body_bytes) if has_body(scope) else None
        state, target = request_state(scope), request_target(scope)
        return self._other(scope["method"], scope["path"], target, scope["headers"], body, state.record, state.caller)

    def get(self, path: str, headers: HeaderList, caller: Caller) -> OutboundRequest:
        """Return a request of the router's own, for a caller."""
        return self._other("GET", path, path, headers, None, RequestRecord("", "GET", path), caller)

    def _other(
        self,
        method: str,
        path: str,
        target: str,
        headers: HeaderList,
        body: bytes | None,
        record: RequestRecord,
        caller: Caller,
    ) -> OutboundRequest:
        named = first_values(headers)
        if rank_named := self._reads_ranks and not ranks.HEADERS.isdisjoint(named):
            headers = [pair for pair in headers if pair[0] not in ranks.HEADERS]
        rank = ranks.rank_in_headers(named) if rank_named else None
        if rank is None and self._reads_ranks and path in _END_WITH_DONE:
            rank = ranks.rank_in_body(body)
        query = _query(named, None, RoutePrompt(), caller.tenant, rank)
        return OutboundRequest(
            path=path,
            record=record,
            in_flight=None,
            hint=None,
            method=method,
            target=target,
            headers=request_headers(headers, forward_authorization=self._forward_authorization),
            body=body,
            query=query,
            key=(caller.tenant, query.routing_key or ""),
            alone=False,
            repeatable=method in ("GET", "HEAD"),
            limited=method in ("POST", "PUT"),
            ends_with_done=path in _END_WITH_DONE,
        )

    def generation(self, in_flight: InFlight) -> OutboundRequest:
        """Return the request of one attempt of a `/generate`."""
        call = in_flight.call
        assert call is not None
        headers, named, hint, tenant = call.headers, call.named, call.hint, call.caller.tenant
        if not _NOT_OF_A_GENERATION.isdisjoint(named):
            headers = [pair for pair in headers if pair[0] not in _NOT_OF_A_GENERATION]
        rank, request = None, in_flight.request
        if self._reads_ranks:
            if request is None:
                rank = ranks.rank_in_body(in_flight.body)
            elif not ranks.FIELDS.isdisjoint(request.fields):
                rank = ranks.rank_in(request.fields)
            if not ranks.HEADERS.isdisjoint(named):
                headers = [pair for pair in headers if pair[0] not in ranks.HEADERS]
                rank = ranks.rank_in_headers(named) if rank is None else rank
        if hint is not None:
            prompt = RoutePrompt(hint.text, hint.token_ids)
        elif self._reads_prompts and in_flight.body:
            prompt = route_prompt(in_flight.body, request)
        else:
            prompt = RoutePrompt()
        query, salts = _query(named, hint, prompt, tenant, rank), call.salts
        if salts is not None:
            salts.salted(request, in_flight.body, in_flight.positions)
            salt = {"salt": salts.key} if salts.shared else {"text": None, "token_ids": None}
            query = msgspec.structs.replace(query, **salt)
        if request is not None and "lora_path" in request.fields:
            query = msgspec.structs.replace(query, adapter=request.adapter)
        return OutboundRequest(
            path="/generate",
            record=call.record,
            in_flight=in_flight,
            hint=hint,
            method=call.method,
            target=call.target,
            headers=request_headers(headers, forward_authorization=self._forward_authorization),
            body=in_flight.body,
            query=query,
            key=(tenant, query.routing_key or ""),
            alone=prompt.alone,
            repeatable=True,
            limited=True,
            ends_with_done=True,
        )


def _query(
    named: dict[bytes, bytes], hint: RouteHint | None, prompt: RoutePrompt, tenant: str, rank: int | None
) -> RouteQuery:
    found = named.get(b"x-smg-routing-key") or named.get(b"x-session-id")
    target = named.get(b"x-smg-target-worker")
    routing_key = None if found is None else found.decode("latin-1")
    target_worker = None if target is None else target.decode("latin-1")
    if hint is None:
        return RouteQuery(prompt.text, prompt.ids, routing_key, target_worker, tenant, rank)
    return RouteQuery(
        prompt.text,
        prompt.ids,
        hint.routing_key or routing_key,
        target_worker,
        tenant,
        rank,
        conversation=hint.conversation,
        continues=hint.continues,
    )


class LeftOut:
    """A batch without the prompts that were aborted while no worker had it. The client gets aborted replies for them.

    As an editor of the reply, this puts them into their places.

    Attributes:
        request: the batch as it is sent.
    """

    def __init__(self, whole: WorkerRequest, sent: Sequence[int]) -> None:
        """`sent`: the prompts of the whole batch that are sent, rising."""
        self.request = whole.only(sent)
        self._sent = sent
        self._replies: list[bytes] = whole.ended_replies(whole.rids)
        left_out = [reply for prompt, reply in enumerate(self._replies) if prompt not in set(sent)]
        self._before = b"\n\ndata: ".join((*left_out, b""))

    def event(self, data: bytes) -> bytes:
        """Return an event with the index that the client knows; before the first one come those of the prompts left out.

        Raises UpstreamBrokenError for an index that no prompt has.
        """
        before, self._before = self._before, b""
        try:
            fields: dict[str, Any] = decode_object(data)
        except JSON_ERRORS:
            try:
                fields = json.loads(data)  # Python's own parser takes NaN, which a worker may write
            except ValueError:
                return before + data  # the end
        if "index" not in fields:
            return before + data  # an error
        shown = {**fields, "index": self._client_index(fields["index"])}
        return before + (json.dumps(shown).encode() if isinstance(fields["index"], int) else msgspec.json.encode(shown))

    def _client_index(self, index: object) -> int:
        """Return the place of a prompt in the whole batch, given that in the part that was sent."""
        with suppress(*JSON_ERRORS):
            at = decode_any(index) if isinstance(index, Raw) else index
            if type(at) is int and 0 <= at < len(self._sent):
                return self._sent[at]
        raise UpstreamBrokenError("a worker's stream has an event of a prompt that it was not sent")

    def whole(self, status: int, body: bytes) -> bytes:
        """Return the reply with all prompts. Raises UpstreamError if it has not as many replies as prompts were sent."""
        if status != 200:
            return body
        try:
            found = split_items(body)
        except JSON_ERRORS:
            return body
        if len(found) != len(self._sent):
            raise UpstreamError(f"a worker answered {len(self._sent)} prompts with {len(found)} replies")
        for prompt, reply in zip(self._sent, found, strict=True):
            self._replies[prompt] = bytes(reply)
        return b"[%b]" % b",".join(self._replies)
