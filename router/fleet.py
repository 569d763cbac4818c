"""Calls that mean all workers at once: abort, pause, weights. And the abort of what nobody waits for any more.

Sent to one worker, `/pause_generation` or a new weight version would leave the fleet in two minds. So these calls go to every
worker of the pool, draining ones too, and the answer holds each of theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from router.asgi import ByMethod, Handler, HeaderList, read_json, request_headers, request_target, send_json
from router.callers import caller_of
from router.errors import BadRequestError, ForbiddenError, NoWorkerError
from router.flights import Flight, Flights
from router.sglang.json import JSON_ERRORS, parse_object
from router.sglang.request import new_weight_version
from router.upstream import Upstream, UpstreamFailure, fetch
from router.workers.pool import WorkerPool
from router.workers.worker import Worker

logger = logging.getLogger(__name__)

CALL_SECONDS = 60.0
"""How long a worker gets to answer a call that is not about weights; those may take any time."""

ABORT_SECONDS = 10.0
"""How long a worker is told about a client that left."""

ABORTS_AT_ONCE = 16
"""Generations of one request that a worker is told to end at the same time, each over a connection of its own."""

RECALL_SECONDS = 1.0
"""How long a request that goes elsewhere waits for its old worker to have heard of it. A well one answers in milliseconds."""


_WANT_AN_OBJECT = frozenset({"/pause_generation", "/continue_generation"})
"""Paths whose options all have defaults, and of which SGLang refuses a call without a body all the same."""


class Fleet:
    """The workers as one.

    Args:
        pool: who they are.
        upstream: the way to them.
        max_body_bytes: the limit for the body of a call (weights can come in it).
        forward_authorization: off where the header carries this router's own key.
    """

    def __init__(
        self, pool: WorkerPool, upstream: Upstream, *, max_body_bytes: int, forward_authorization: bool
    ) -> None:
        self.flights = Flights()
        self._pool = pool
        self._upstream = upstream
        self._max_body_bytes = max_body_bytes
        self._forward_authorization = forward_authorization
        self._aborts: set[asyncio.Task[None]] = set()

    def routes(self) -> list[Route]:
        """The table of paths and methods."""
        everywhere: dict[str, tuple[str, Callable[[dict[str, Any]], bool]]] = {
            "/pause_generation": ("POST", lambda body: body.get("mode", "abort") == "abort"),
            "/continue_generation": ("POST", _never),
            "/flush_cache": ("GET POST", _never),
            "/release_memory_occupation": ("GET POST", _never),
            "/resume_memory_occupation": ("GET POST", _never),
            "/update_weights_from_{source}": ("POST", _aborts_all),
            "/update_weight_version": ("POST", lambda body: body.get("abort_all_requests", True) is not False),
            "/begin_weight_update": ("POST", _aborts_all),
            "/end_weight_update": ("POST", _aborts_all),
            "/load_lora_adapter": ("POST", _never),
            "/load_lora_adapter_from_tensors": ("POST", _never),
            "/unload_lora_adapter": ("POST", _never),
        }
        handlers: dict[str, dict[str, Handler]] = {
            path: dict.fromkeys(methods.split(), _Everywhere(self, aborts))
            for path, (methods, aborts) in everywhere.items()
        }
        handlers["/abort_request"] = {"POST": self.abort_request}
        return [Route(path, ByMethod(by_method)) for path, by_method in handlers.items()]

    async def abort_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        """End generations by the id that the client knows, or all of them. None of them is sent again.

        Raises BadRequestError for a body that is no object, and ForbiddenError for an end of all by somebody who may not.
        """
        raw = await read_json(scope, receive, self._max_body_bytes)
        fields, body, caller = parse_object(raw), _object(raw), caller_of(scope)
        rid = body.get("rid")
        if body.get("abort_all") or not isinstance(rid, str) or not rid:
            if not caller.admin:
                raise ForbiddenError(
                    "without a `rid`, /abort_request is about everybody: it wants an admin key (--admin-key)"
                )
            with self.flights.ending() if body.get("abort_all") else contextlib.nullcontext():
                await self.everywhere(scope, send, raw)
            return
        meant = self.flights.named(rid, caller.tenant if caller.confined else None)
        for flight, position in meant:
            flight.end((position,))
        calls, headers = [], self._headers(scope)
        for flight, position in meant:
            at_worker = flight.rids.get(position)
            if flight.worker is not None and at_worker is not None:
                told = {**fields, "rid": at_worker} if caller.admin else {"rid": at_worker}
                calls.append((flight.worker, msgspec.json.encode(told)))
        if meant or caller.confined:
            answers = await asyncio.gather(
                *(self._ask(worker, "POST", "/abort_request", headers, one, CALL_SECONDS) for worker, one in calls)
            )
            await _answer(send, answers)
        else:
            logger.info("/abort_request: no generation in flight is called %r, all workers are asked", rid)
            # Nobody here knows it: a sample of a group, or a generation that came past this router.
            await self.everywhere(scope, send, raw)

    async def everywhere(self, scope: Scope, send: Send, body: bytes, *, seconds: float | None = CALL_SECONDS) -> None:
        """Send a call to every worker. Raises NoWorkerError if there is none."""
        workers = self._pool.list()
        if not workers:
            raise NoWorkerError("there is no worker to tell: add one with POST /add_worker?url=http://HOST:PORT")
        target, headers, method = request_target(scope), self._headers(scope), scope["method"]
        answers = await asyncio.gather(
            *(self._ask(worker, method, target, headers, body, seconds) for worker in workers)
        )
        version = new_weight_version(body) if "weight" in scope["path"] else None
        if version is not None:
            self._pool.new_version(version, {answer["id"] for answer in answers if _done(answer)})
        await _answer(send, answers)

    def _headers(self, scope: Scope) -> HeaderList:
        return request_headers(scope, forward_authorization=self._forward_authorization)

    def abandon(self, flight: Flight, scope: Scope) -> list[asyncio.Task[None]]:
        """Nobody waits for a request any more: tell its worker, which would take seconds to notice. Returns what does so."""
        worker = flight.worker
        rids = [] if worker is None else [r for r in flight.rids.values() if not self.flights.shares_prefix(r, worker)]
        if worker is None or not rids:
            return []
        task = asyncio.create_task(self._abort(worker, rids, self._headers(scope)))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)
        return [task]

    async def recall(self, flight: Flight, scope: Scope) -> None:
        """A request goes to another worker: the one that has it now is told to end it, and has a moment to say so."""
        aborts = self.abandon(flight, scope)
        if aborts:
            await asyncio.wait(aborts, timeout=RECALL_SECONDS)

    async def close(self) -> None:
        """Let the last aborts go out."""
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=1.0)

    async def _abort(self, worker: Worker, rids: Sequence[str], headers: HeaderList) -> None:
        """Tell a worker to end the generations of one request, some of them at a time."""
        left, failed = iter(rids), []

        async def tell() -> None:
            for rid in left:
                body = msgspec.json.encode({"rid": rid})
                answer = await self._ask(worker, "POST", "/abort_request", headers, body, ABORT_SECONDS)
                if answer["status"] != 200:
                    failed.append(answer)

        await asyncio.gather(*(tell() for _ in range(min(ABORTS_AT_ONCE, len(rids)))))
        if failed:
            logger.info(
                "worker %s was not told to abort %d of %d generations: %s",
                worker.url,
                len(failed),
                len(rids),
                failed[0],
            )

    async def _ask(
        self, worker: Worker, method: str, target: str, headers: HeaderList, body: bytes, seconds: float | None
    ) -> dict[str, Any]:
        """One worker's answer, or why there is none.

        Sent once, and so on a new connection: one that its worker has just closed looks like a dead worker.
        """
        answer: dict[str, Any] = {"id": worker.id, "url": worker.url, "status": None}
        try:
            async with asyncio.timeout(seconds):
                status, content = await fetch(self._upstream, method, worker.url + target, headers, body, fresh=True)
        except UpstreamFailure as failure:
            return {**answer, "error": str(failure)}
        except TimeoutError:
            return {**answer, "error": f"no answer within {seconds:g} s"}
        return {**answer, "status": status, "body": _readable(content)}


class _Everywhere:
    """One call to all, which ends all generations if `aborts` says so of its body."""

    def __init__(self, fleet: Fleet, aborts: Callable[[dict[str, Any]], bool]) -> None:
        self._fleet = fleet
        self._aborts = aborts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_json(scope, receive, self._fleet._max_body_bytes)
        if not body and scope["method"] == "POST" and scope["path"] in _WANT_AN_OBJECT:
            body = b"{}"
            kept = [pair for pair in scope["headers"] if pair[0] != b"content-type"]
            scope = {**scope, "headers": [*kept, (b"content-type", b"application/json")]}
        about_weights = "weight" in scope["path"] or "memory" in scope["path"] or "lora" in scope["path"]
        with self._fleet.flights.ending() if self._aborts(_object(body)) else contextlib.nullcontext():
            await self._fleet.everywhere(scope, send, body, seconds=None if about_weights else CALL_SECONDS)


def _never(_: dict[str, Any]) -> bool:
    return False


def _aborts_all(body: dict[str, Any]) -> bool:
    return body.get("abort_all_requests") is True


def _object(body: bytes) -> dict[str, Any]:
    """A body as far as it is an object; whether it should be one is for the workers to say.

    Raises BadRequestError for what may be one, and is nested too deeply to tell.
    """
    try:
        value = msgspec.json.decode(body)
    except RecursionError as error:
        raise BadRequestError(f"the body cannot be read: {error}") from error
    except JSON_ERRORS:
        return {}
    return value if isinstance(value, dict) else {}


def _done(answer: dict[str, Any]) -> bool:
    """Whether a worker did what it was told. About weights it may say with a 200 that it did not."""
    status, body = answer["status"], answer.get("body")
    return status is not None and status < 300 and not (isinstance(body, dict) and body.get("success") is False)


def _readable(content: bytes) -> Any:
    try:
        return msgspec.json.decode(content)
    except JSON_ERRORS:
        return content.decode("utf-8", "replace")


async def _answer(send: Send, answers: Sequence[dict[str, Any]]) -> None:
    """200 if every worker agreed, its own status if all refused alike, 207 if they differ, 502 if none was reached."""
    statuses = {answer["status"] for answer in answers}
    agreed = all(status is not None and status < 300 for status in statuses)
    if agreed:
        status = 200
    elif len(statuses) == 1:
        status = statuses.pop() or 502
    else:
        status = 207
    done = sum(answer["status"] is not None and answer["status"] < 300 for answer in answers)
    body = {"success": agreed, "message": f"{done} of {len(answers)} workers did it", "workers": list(answers)}
    await send_json(send, status, msgspec.json.encode(body))
