"""Calls that mean all workers at once: abort, pause, weights. And the abort of what nobody waits for any more.

Sent to one worker, `/pause_generation` or a new weight version would leave the fleet in two minds. So these calls go to every
worker of the pool, draining ones too, and the answer holds each of theirs. All are told at the same time, for a transfer of
weights may need all of them at once; those whose last probe was bad come last (`router/generate/fleet_calls.py`).

Updates of weights reach the workers one after the other, in the order in which they came: two at once would leave some workers
with the one and some with the other. A call that has begun goes on when its client leaves, for half of an update is worse than
one that nobody waits for.
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

from router.engines.sglang.json import JSON_ERRORS, parse_object
from router.engines.sglang.request import new_weight_version
from router.errors import BadRequestError, ForbiddenError, NoWorkerError
from router.generate.fleet_calls import Answer, Call, Teller
from router.http.asgi import ByMethod, Handler, HeaderList, read_json, request_headers, request_target, send_json
from router.http.request_state import request_state
from router.proxy.in_flight import GenerationsInFlight, InFlight
from router.workers.pool import WorkerPool
from router.workers.worker import Worker

logger = logging.getLogger(__name__)

ABORT_SECONDS = 10.0
"""How long a worker is told about a client that left."""

ABORTS_AT_ONCE = 16
"""Generations of one request that a worker is told to end at the same time, each over a connection of its own."""

RECALL_SECONDS = 1.0
"""How long a request that goes elsewhere waits for its old worker to have heard of it. A well one answers in milliseconds."""


_SHOWN = 100
"""Characters of a name in the log."""
_NAMED = 8
"""Workers that a message tells about; the list has all of them."""

_UPDATES = ("/update_weight", "/begin_weight_update", "/end_weight_update")
_TRANSFERS = (
    *("/update_weights_from_", "/begin_weight_update", "/end_weight_update"),
    *("/release_memory_occupation", "/resume_memory_occupation", "/load_lora_adapter", "/unload_lora_adapter"),
)
"""How the paths begin of what gives workers other weights, and of what may take any time."""

_WANT_AN_OBJECT = frozenset({"/pause_generation", "/continue_generation"})
"""Paths whose options all have defaults, and of which SGLang refuses a call without a body all the same."""


class Fleet:
    """The workers as one.

    Args:
        pool: who they are.
        teller: tells one of them.
        max_body_bytes: the limit for the body of a call (weights can come in it).
        forward_authorization: off where the header carries this router's own key.
    """

    def __init__(self, pool: WorkerPool, teller: Teller, *, max_body_bytes: int, forward_authorization: bool) -> None:
        self.in_flight = GenerationsInFlight()
        self._pool = pool
        self._teller = teller
        self._updating = asyncio.Lock()
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
        fields, body, caller = parse_object(raw), _object(raw), request_state(scope).caller
        rid = body.get("rid")
        if body.get("abort_all") or not isinstance(rid, str) or not rid:
            if not caller.admin:
                raise ForbiddenError(
                    "without a `rid`, /abort_request is about everybody: it wants an admin key (--admin-key)"
                )
            await self.everywhere(scope, send, raw, aborts=bool(body.get("abort_all")))
            return
        meant = self.in_flight.named(rid, caller.tenant if caller.confined else None)
        for one, position in meant:
            one.end((position,))
        calls = []
        for one, position in meant:
            at_worker = one.rids.get(position)
            if one.worker is not None and at_worker is not None:
                told = {**fields, "rid": at_worker} if caller.admin else {"rid": at_worker}
                calls.append(self._teller.tell(one.worker, self._abort_call(scope, told)))
        if meant or caller.confined:
            await _answer(send, await asyncio.gather(*calls))
        else:
            logger.info("/abort_request: no generation in flight is called %r, all workers are asked", rid[:_SHOWN])
            # Nobody here knows it: a sample of a group, or a generation that came past this router.
            await self.everywhere(scope, send, raw)

    async def everywhere(self, scope: Scope, send: Send, body: bytes, *, aborts: bool = False) -> None:
        """Send a call to every worker. `aborts`: what they have is to end. Raises NoWorkerError if there is none."""
        path = scope["path"]
        call = Call(
            scope["method"],
            request_target(scope),
            self._headers(scope),
            body,
            transfer=path.startswith(_TRANSFERS),
            updates=path.startswith(_UPDATES),
            lasting=path == "/continue_generation",  # a worker that hung may run the pause when it goes on
        )
        version = new_weight_version(body) if call.updates else None
        async with self._updating if call.updates else contextlib.nullcontext():
            answers = await self._tell_all(call, aborts=aborts)
            if version is not None:
                # One that may have been restarted while others were waited for has the weights of its disk.
                same = {(worker.id, worker.doubts) for worker in self._pool.list()}
                taken_by = {answer.id for answer in answers if answer.done and (answer.id, answer.doubts) in same}
                told = {answer.id for answer in answers if answer.done or answer.unsure}
                self._pool.new_version(version, taken_by, unsure=told - taken_by)
        await _answer(send, answers)

    async def _tell_all(self, call: Call, *, aborts: bool) -> list[Answer]:
        """The answers, in the order of the pool."""
        workers = self._pool.list()
        if not workers:
            raise NoWorkerError("there is no worker to tell: add one with POST /add_worker?url=http://HOST:PORT")
        first = [worker for worker in workers if worker.complaint is None]
        last = [worker for worker in workers if worker.complaint is not None]
        asked = {worker: asyncio.create_task(self._teller.tell(worker, call)) for worker in (*first, *last)}
        try:
            # What comes while a worker is waited for that does nothing is not to end.
            with self.in_flight.ending() if aborts else contextlib.nullcontext():
                await asyncio.gather(*(asked[worker] for worker in first))
            return await asyncio.gather(*(asked[worker] for worker in workers))
        finally:
            for task in asked.values():
                task.cancel()  # only where the router is stopped some are left

    def _headers(self, scope: Scope) -> HeaderList:
        return request_headers(scope, forward_authorization=self._forward_authorization)

    def abandon(self, in_flight: InFlight, scope: Scope) -> list[asyncio.Task[None]]:
        """Nobody waits for a request any more: tell its worker, which would take seconds to notice. Returns what does so."""
        worker = in_flight.worker
        rids = [] if worker is None else self.in_flight.alone(in_flight.rids.values(), worker)
        if worker is None or not rids:
            return []
        task = asyncio.create_task(self._abort(worker, rids, scope))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)
        return [task]

    async def recall(self, in_flight: InFlight, scope: Scope) -> None:
        """A request goes to another worker: the one that has it now is told to end it, and has a moment to say so."""
        aborts = self.abandon(in_flight, scope)
        if aborts:
            await asyncio.wait(aborts, timeout=RECALL_SECONDS)

    async def close(self) -> None:
        """Let the last aborts go out."""
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=1.0)

    async def _abort(self, worker: Worker, rids: Sequence[str], scope: Scope) -> None:
        """Tell a worker to end the generations of one request, some of them at a time."""
        left, failed = iter(rids), []

        async def tell() -> None:
            for rid in left:
                answer = await self._teller.tell(worker, self._abort_call(scope, {"rid": rid}), ABORT_SECONDS)
                if answer.status != 200:
                    failed.append(answer.failure)

        await asyncio.gather(*(tell() for _ in range(min(ABORTS_AT_ONCE, len(rids)))))
        if failed:
            logger.info(
                "worker %s was not told to abort %d of %d generations: %s",
                worker.url,
                len(failed),
                len(rids),
                failed[0],
            )

    def _abort_call(self, scope: Scope, told: dict[str, Any]) -> Call:
        return Call("POST", "/abort_request", self._headers(scope), msgspec.json.encode(told), lasting=True)


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
        await self._fleet.everywhere(scope, send, body, aborts=self._aborts(_object(body)))


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


async def _answer(send: Send, answers: Sequence[Answer]) -> None:
    """200 if every worker did it, their status if all refused alike, 207 if they differ, 502 if none says why it did not."""
    failed = [answer for answer in answers if not answer.done]
    statuses = {answer.status for answer in failed}
    if not failed:
        status = 200
    elif len(failed) < len(answers) or len(statuses) > 1:
        status = 207
    else:
        (told,) = statuses
        status = told if told is not None and told >= 400 else 502
    message = f"{len(answers) - len(failed)} of {len(answers)} workers did it"
    if failed:
        message += ", and not " + ", ".join(answer.failure for answer in failed[:_NAMED])
    body = {"success": not failed, "message": message, "workers": [answer.shown() for answer in answers]}
    await send_json(send, status, msgspec.json.encode(body))
