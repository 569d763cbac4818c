"""Calls to all workers (abort, pause, weights), and the abort of generations whose clients left.

Sent to one worker, `/pause_generation` or a new weight version would divide the fleet. So these calls go to every worker of the
pool, draining ones too, and the answer holds the answers of all. All workers get the call at the same time, because a transfer
of weights may need all of them at once; those whose last probe was bad come last (`router/generate/fleet_calls.py`).

Weight updates reach the workers one after the other, in the order in which they came: two at once would leave some workers with
one version and some with the other. A call that has begun goes on when its client leaves: half of an update is worse than an
update without a client.
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

from router.engines.json import JSON_ERRORS
from router.engines.sglang.fields import parse_object
from router.engines.sglang.request import new_weight_version
from router.errors import BadRequestError, ForbiddenError, NoWorkerError
from router.generate.fleet_calls import CallSender, FleetCall, WorkerAnswer
from router.http.bodies import read_json
from router.http.handlers import ByMethod, Handler
from router.http.headers import HeaderList, request_headers, request_target
from router.http.request_state import request_state
from router.http.responses import send_json
from router.proxy.in_flight import GenerationsInFlight, InFlight
from router.workers.pool import WorkerPool
from router.workers.worker import Worker

logger = logging.getLogger(__name__)

ABORT_SECONDS = 10.0
"""How long the abort of a generation whose client left may take."""

ABORTS_AT_ONCE = 16
"""Aborts of one request that are sent to a worker at the same time, each over a connection of its own."""

RECALL_SECONDS = 1.0
"""How long a request that goes elsewhere waits for its old worker to answer the abort. A healthy one takes milliseconds."""


_SHOWN = 100
"""Characters of a name in the log."""
_NAMED = 8
"""Workers that a message names; the list has all of them."""

_UPDATES = ("/update_weight", "/begin_weight_update", "/end_weight_update")
_TRANSFERS = (
    *("/update_weights_from_", "/begin_weight_update", "/end_weight_update"),
    *("/release_memory_occupation", "/resume_memory_occupation", "/load_lora_adapter", "/unload_lora_adapter"),
)
"""Beginnings of the paths that change the weights, and of the paths that may take any time."""

_WANT_AN_OBJECT = frozenset({"/pause_generation", "/continue_generation"})
"""Paths whose options all have defaults. SGLang still refuses a call without a body."""


class Fleet:
    """All workers as one."""

    def __init__(
        self, pool: WorkerPool, sender: CallSender, *, max_body_bytes: int, forward_authorization: bool
    ) -> None:
        """`forward_authorization`: off where the header carries this router's own key."""
        self.in_flight = GenerationsInFlight()
        self._pool = pool
        self._sender = sender
        self._updating = asyncio.Lock()
        self._max_body_bytes = max_body_bytes
        self._forward_authorization = forward_authorization
        self._aborts: set[asyncio.Task[None]] = set()

    def routes(self) -> list[Route]:
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

        Raises BadRequestError for a body that is no object, and ForbiddenError for an end of all without an admin key.
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
                body = {**fields, "rid": at_worker} if caller.admin else {"rid": at_worker}
                calls.append(self._sender.send(one.worker, self._abort_call(scope, body)))
        if meant or caller.confined:
            await _answer(send, await asyncio.gather(*calls))
        else:
            logger.info("/abort_request: no generation in flight is called %r, all workers are asked", rid[:_SHOWN])
            # The router does not know it: a sample of a group, or a generation that did not come through this router.
            await self.everywhere(scope, send, raw)

    async def everywhere(self, scope: Scope, send: Send, body: bytes, *, aborts: bool = False) -> None:
        """Send a call to every worker. `aborts`: all generations in flight end. Raises NoWorkerError without a worker."""
        path = scope["path"]
        call = FleetCall(
            scope["method"],
            request_target(scope),
            self._headers(scope),
            body,
            transfer=path.startswith(_TRANSFERS),
            updates=path.startswith(_UPDATES),
            lasting=path == "/continue_generation",  # a worker that hung may still run the pause later
        )
        version = new_weight_version(body) if call.updates else None
        async with self._updating if call.updates else contextlib.nullcontext():
            answers = await self._send_to_all(call, aborts=aborts)
            if version is not None:
                # A worker that may have restarted in the meantime has the weights of its disk.
                same = {(worker.id, worker.doubts) for worker in self._pool.list()}
                taken_by = {answer.id for answer in answers if answer.done and (answer.id, answer.doubts) in same}
                reached = {answer.id for answer in answers if answer.done or answer.unsure}
                self._pool.new_version(version, taken_by, unsure=reached - taken_by)
        await _answer(send, answers)

    async def _send_to_all(self, call: FleetCall, *, aborts: bool) -> list[WorkerAnswer]:
        """Return the answers, in the order of the pool."""
        workers = self._pool.list()
        if not workers:
            raise NoWorkerError("there is no worker to tell: add one with POST /add_worker?url=http://HOST:PORT")
        first = [worker for worker in workers if worker.complaint is None]
        last = [worker for worker in workers if worker.complaint is not None]
        asked = {worker: asyncio.create_task(self._sender.send(worker, call)) for worker in (*first, *last)}
        try:
            # Generations that begin while the router waits for the unhealthy workers do not end.
            with self.in_flight.ending() if aborts else contextlib.nullcontext():
                await asyncio.gather(*(asked[worker] for worker in first))
            return await asyncio.gather(*(asked[worker] for worker in workers))
        finally:
            for task in asked.values():
                task.cancel()  # some are left only when the router is stopped

    def _headers(self, scope: Scope) -> HeaderList:
        return request_headers(scope, forward_authorization=self._forward_authorization)

    def abandon(self, in_flight: InFlight, scope: Scope) -> list[asyncio.Task[None]]:
        """Abort a request whose client left, which its worker would take seconds to notice. Return the tasks."""
        worker = in_flight.worker
        rids = [] if worker is None else self.in_flight.alone(in_flight.rids.values(), worker)
        if worker is None or not rids:
            return []
        task = asyncio.create_task(self._abort(worker, rids, scope))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)
        return [task]

    async def recall(self, in_flight: InFlight, scope: Scope) -> None:
        """Abort a request at its worker before it goes to another one, and wait a moment for it."""
        aborts = self.abandon(in_flight, scope)
        if aborts:
            await asyncio.wait(aborts, timeout=RECALL_SECONDS)

    async def close(self) -> None:
        """Wait a moment for the last aborts."""
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=1.0)

    async def _abort(self, worker: Worker, rids: Sequence[str], scope: Scope) -> None:
        """Abort the generations of one request at a worker, some of them at a time."""
        left, failed = iter(rids), []

        async def send_some() -> None:
            for rid in left:
                answer = await self._sender.send(worker, self._abort_call(scope, {"rid": rid}), ABORT_SECONDS)
                if answer.status != 200:
                    failed.append(answer.failure)

        await asyncio.gather(*(send_some() for _ in range(min(ABORTS_AT_ONCE, len(rids)))))
        if failed:
            logger.info(
                "worker %s was not told to abort %d of %d generations: %s",
                worker.url,
                len(failed),
                len(rids),
                failed[0],
            )

    def _abort_call(self, scope: Scope, body: dict[str, Any]) -> FleetCall:
        return FleetCall("POST", "/abort_request", self._headers(scope), msgspec.json.encode(body), lasting=True)


class _Everywhere:
    """A call to all workers, which ends all generations if `aborts(body)` says so."""

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
    """Return a body as an object, {} if it is none: the workers decide whether it has to be one.

    Raises BadRequestError for JSON that is nested too deeply to be read.
    """
    try:
        value = msgspec.json.decode(body)
    except RecursionError as error:
        raise BadRequestError(f"the body cannot be read: {error}") from error
    except JSON_ERRORS:
        return {}
    return value if isinstance(value, dict) else {}


async def _answer(send: Send, answers: Sequence[WorkerAnswer]) -> None:
    """Send 200 if all succeeded, their status if all refused alike, 207 if they differ, 502 if no worker answered."""
    failed = [answer for answer in answers if not answer.done]
    statuses = {answer.status for answer in failed}
    if not failed:
        status = 200
    elif len(failed) < len(answers) or len(statuses) > 1:
        status = 207
    else:
        (common,) = statuses
        status = common if common is not None and common >= 400 else 502
    message = f"{len(answers) - len(failed)} of {len(answers)} workers did it"
    if failed:
        message += ", and not " + ", ".join(answer.failure for answer in failed[:_NAMED])
    body = {"success": not failed, "message": message, "workers": [answer.shown() for answer in answers]}
    await send_json(send, status, msgspec.json.encode(body))
