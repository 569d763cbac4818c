"""Calls to all workers (abort, pause, weights), and the abort of generations whose clients left.

Sent to one worker, `/pause_generation` or a new weight version would divide the fleet. So these calls go to every worker of the
pool, draining ones too, and the answer has the answers of all. The router calls all workers at the same time, because a
transfer of weights may need all of them at once; workers whose last probe was bad come last (`router/generate/fleet_calls.py`).

Weight updates reach the workers one after the other, in the order in which they came: two at once would leave some workers with
one version and some with the other. A call that has begun is completed even if its client disconnects: half an update is worse
than an update without a client.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import Raw
from msgspec.structs import replace
from starlette.datastructures import QueryParams
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from router.engines.form.fields import parse_object
from router.engines.form.fleet_paths import COMMON, FleetPath, asleep
from router.engines.form.request import new_weight_version
from router.engines.json import JSON_ERRORS
from router.errors import BadRequestError, ForbiddenError, NoWorkerError
from router.generate.fleet_calls import CallSender, FleetCall, WorkerAnswer
from router.http.bodies import read_json
from router.http.handlers import ByMethod, Handler
from router.http.headers import HeaderList, request_headers, request_target
from router.http.request_state import Caller, request_state
from router.http.responses import send_json
from router.peers.events import Abort, AbortAnswered, AbortsOver, CallBegan, CallOver
from router.peers.peers import MOMENT, UNTIL_GONE, Heard, Peers
from router.proxy.generate_call import GenerateCall
from router.proxy.in_flight import GenerationsInFlight, InFlight
from router.workers.fleet_version import FleetVersion
from router.workers.pool import WorkerPool
from router.workers.worker import Worker, WorkerRole

logger = logging.getLogger(__name__)

_Meant = Sequence[tuple[InFlight, int]]

_LONGER = 5.0
"""Seconds that another router has beyond `--fleet-timeout`, to report what its workers said."""
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


class Fleet:
    """All workers as one."""

    def __init__(
        self,
        pool: WorkerPool,
        sender: CallSender,
        *,
        max_body_bytes: int,
        forward_authorization: bool,
        peers: Peers | None = None,
        paths: Sequence[FleetPath] = COMMON,
    ) -> None:
        """Make the workers of a pool one.

        Args:
            forward_authorization: off where the header carries this router's own key.
            paths: the calls that go to all workers.
        """
        self.in_flight = GenerationsInFlight()
        self.peers = peers or Peers()
        self.version = FleetVersion(pool.list)
        self._paths = paths
        self._pool = pool
        self._sender = sender
        self._updating = asyncio.Lock()
        self._max_body_bytes = max_body_bytes
        self._forward_authorization = forward_authorization
        self._aborts: set[asyncio.Task[None]] = set()
        self._named = NamedAborts(self.in_flight, sender, self.peers, self._headers)
        self._ending: dict[str, contextlib.ExitStack] = {}
        """The calls of other routers in progress, which end what is in flight."""
        self.peers.log.on_lost = self._end_all
        self.peers.log.hear(CallBegan, self._began_elsewhere)
        self.peers.log.hear(AbortsOver, self._over_elsewhere)
        self.peers.log.hear(CallOver, self._over_elsewhere)

    def routes(self, engine: Callable[[], str] | None = None, others: ASGIApp | None = None) -> list[Route]:
        """Return the routes of all these calls.

        Args:
            engine: returns the name of the engine that the workers run.
            others: serves a call that workers of this engine do not have, as any other path. By default there is none such.
        """
        handlers: dict[str, dict[str, Handler]] = {
            one.path: dict.fromkeys(one.methods.split(), _Everywhere(self, one)) for one in self._paths
        }
        handlers["/abort_request"] = {"POST": self.abort_request}
        endpoints: dict[str, ASGIApp] = {path: ByMethod(by_method) for path, by_method in handlers.items()}
        if engine is not None and others is not None:
            for one in self._paths:
                if one.engine:
                    endpoints[one.path] = _OfEngine(one.engine, engine, endpoints[one.path], others)
        return [Route(path, endpoint) for path, endpoint in endpoints.items()]

    async def abort_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        """End generations by the id that the client knows, or all of them. None of them is sent again.

        Raises BadRequestError for a body that is not an object, and ForbiddenError for an end of all without an admin key.
        """
        raw = await read_json(scope, receive, self._max_body_bytes)
        fields, body, caller = parse_object(raw), _object(raw), request_state(scope).caller
        rid = body.get("rid")
        if body.get("abort_all") or not isinstance(rid, str) or not rid:
            if not caller.admin:
                raise ForbiddenError(
                    "without a `rid`, /abort_request ends the generations of all tenants: it wants an admin key (--admin-key)"
                )
            await self.everywhere(scope, send, raw, aborts=bool(body.get("abort_all")))
            return
        abort = _abort_of(rid, caller, {k: v for k, v in fields.items() if k != "rid"})
        answers, found, heard = await self._named.end(abort, scope["headers"])
        if found or caller.confined:
            await self._answer(send, answers, heard)
        else:
            logger.info("/abort_request: no generation in flight is called %r, all workers are asked", rid[:_SHOWN])
            # The router does not know it: a sample of a group, or a generation that did not come through this router.
            await self.everywhere(scope, send, raw, heard=heard)

    async def abort(self, rid: str, call: GenerateCall) -> None:
        """End the generations of a call that have this id."""
        await self._named.end(_abort_of(rid, call.caller), call.headers)

    async def everywhere(
        self, scope: Scope, send: Send, body: bytes, *, aborts: bool = False, heard: Heard | None = None
    ) -> None:
        """Send a call to every worker. Raises NoWorkerError without a worker.

        `aborts`: all generations in flight end. `heard`: which routers know of it, if they were told before.
        """
        path = scope["path"]
        known = next((one for one in self._paths if one.fits(path)), FleetPath(path))
        call = FleetCall(
            scope["method"],
            request_target(scope),
            self._headers(scope["headers"]),
            body,
            transfer=known.transfer,
            updates=known.updates,
            lasting=known.lasting,
            prefill_first=known.prefill_first,
        )
        version = new_weight_version(body) if call.updates else None
        async with self._updating if call.updates else contextlib.nullcontext():
            if aborts or call.updates or known.pauses:
                begun = CallBegan(secrets.token_hex(8), path, aborts=aborts, updates=call.updates)
                over = CallOver(begun.call)
                moment = MOMENT if aborts or known.pauses else 0.0
                done = False
                paused: bool | None = None
                self.version.begins(begun.call, path)
                try:
                    heard = await self.peers.take_turn(begun, seconds=moment)
                    answers = await self._send_to_all(call, begun)
                    done = any(answer.done or answer.unsure for answer in answers)
                    paused = asleep(answer.body for answer in answers if answer.done) if known.pauses else None
                    if version is not None:
                        over = await self._updated(begun, version, answers, announced=known.names_version)
                finally:
                    self.version.over(begun.call, done=done, paused=paused)
                    over = replace(over, paused=paused)
                    # What begins after the answer has the new weights: no abort means it, and the pause is over for it.
                    wait = UNTIL_GONE if over.version is not None else moment
                    last = await asyncio.shield(self.peers.tell(over, seconds=wait))
                heard = heard if heard.error is not None else last
            else:
                await self.peers.catch_up()
                answers = await self._send_to_all(call)
        await self._answer(send, answers, heard or Heard())

    async def _updated(
        self, call: CallBegan, version: str, answers: Sequence[WorkerAnswer], *, announced: bool
    ) -> CallOver:
        """Note what an update has set, and return what to report to the other routers."""
        # A worker that may have restarted in the meantime has the weights of its disk.
        same = {(worker.id, worker.doubts) for worker in self._pool.list()}
        taken_by = {answer.id for answer in answers if answer.done and (answer.id, answer.doubts) in same}
        reached = {answer.id for answer in answers if answer.done or answer.unsure}
        self._pool.new_version(version, taken_by, unsure=reached - taken_by)
        if announced and all(answer.done for answer in answers):
            await self.peers.on_version(version)
        self.version.called()
        return CallOver(call.call, version, tuple(sorted(taken_by)), tuple(sorted(reached - taken_by)))

    async def _send_to_all(self, call: FleetCall, begun: CallBegan | None = None) -> list[WorkerAnswer]:
        """Return the answers, in the order of the pool, and of workers that only other routers still drain.

        `begun`: what the other routers know of the call.
        """
        aborts = begun is not None and begun.aborts
        workers = (*self._pool.list(), *self._pool.elsewhere().values())
        if not workers:
            raise NoWorkerError("there is no worker to tell: add one with POST /add_worker?url=http://HOST:PORT")
        first = [worker for worker in workers if worker.complaint is None]
        last = [worker for worker in workers if worker.complaint is not None]
        if call.prefill_first:  # a decode worker that goes on may ask its prefill worker for a prompt at once
            prefills = [worker for worker in first if worker.role is WorkerRole.PREFILL]
            asked = {worker: asyncio.create_task(self._sender.send(worker, call)) for worker in prefills}
            await asyncio.gather(*asked.values())
        else:
            asked = {}
        others = (worker for worker in (*first, *last) if worker not in asked)
        asked |= {worker: asyncio.create_task(self._sender.send(worker, call)) for worker in others}
        try:
            # Generations that begin while the router waits for the unhealthy workers do not end.
            with self.in_flight.ending() if aborts else contextlib.nullcontext():
                await asyncio.gather(*(asked[worker] for worker in first))
            if begun is not None and aborts and last:
                await self.peers.tell(AbortsOver(begun.call), seconds=0.0)
            return await asyncio.gather(*(asked[worker] for worker in workers))
        finally:
            for task in asked.values():
                task.cancel()  # some are left only when the router is stopped

    # What other routers tell ------------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Take over what the routers' log says: the weight version, and calls in progress."""
        state = self.peers.log.state
        self._pool.begin(state.version)
        self.version.take_over(paused=state.paused)
        for call in state.calls.values():
            await self._began_elsewhere(call, 0, False)

    async def _began_elsewhere(self, call: CallBegan, _: int, own: bool) -> None:
        if not own:
            self.version.begins(call.call, call.path)
        if call.aborts and not own:
            ending = self._ending[call.call] = contextlib.ExitStack()
            ending.enter_context(self.in_flight.ending())

    async def _over_elsewhere(self, event: AbortsOver | CallOver, _: int, own: bool) -> None:
        if isinstance(event, CallOver):
            # Perhaps of a router that is gone, for which this one tells it.
            self.version.over(event.call, paused=event.paused)
        if own:
            return
        self._ending.pop(event.call, contextlib.ExitStack()).close()
        if isinstance(event, CallOver) and event.version is not None:
            self._pool.new_version(event.version, frozenset(event.taken), frozenset(event.unsure))
            await self.peers.on_version(None)
            self.version.called()

    def _end_all(self) -> None:
        with self.in_flight.ending():
            pass

    async def may_retry(self) -> bool:
        """Learn of all aborts that clients asked for at any router; return whether that was possible, or not necessary."""
        return await self.peers.catch_up() or self.peers.alone

    # Aborts of single generations --------------------------------------------------------------------------------------

    def _headers(self, headers: HeaderList) -> HeaderList:
        return request_headers(headers, forward_authorization=self._forward_authorization)

    def abandon(self, in_flight: InFlight, at: Worker | None = None) -> list[asyncio.Task[None]]:
        """Abort a request whose client left, which its workers would take seconds to notice. Return the tasks.

        `at`: the only one of its workers that is to end it.
        """
        tasks = []
        for worker in in_flight.workers if at is None else (at,):
            rids = self.in_flight.alone(in_flight.rids.values(), worker)
            if rids:
                headers = self._headers([] if in_flight.call is None else in_flight.call.headers)
                tasks.append(task := asyncio.create_task(self._abort(worker, rids, headers)))
                self._aborts.add(task)
                task.add_done_callback(self._aborts.discard)
        return tasks

    async def recall(self, in_flight: InFlight) -> None:
        """Abort a request at its worker before it goes to another one, and wait a moment for it."""
        aborts = self.abandon(in_flight)
        if aborts:
            await asyncio.wait(aborts, timeout=RECALL_SECONDS)

    async def close(self) -> None:
        """Wait a moment for the last aborts."""
        await self._named.close()
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=1.0)

    async def _abort(self, worker: Worker, rids: Sequence[str], headers: HeaderList) -> None:
        """Abort the generations of one request at a worker, some of them at a time."""
        left, failed = iter(rids), []

        async def send_some() -> None:
            for rid in left:
                answer = await self._sender.send(worker, abort_call(headers, {"rid": rid}), ABORT_SECONDS)
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

    async def _answer(self, send: Send, answers: Sequence[WorkerAnswer], heard: Heard) -> None:
        routers = {} if self.peers.kind is None else {"routers": heard.shown()}
        await _answer(send, answers, routers)


class _OfEngine:
    """A call that only the workers of one engine have."""

    def __init__(self, name: str, engine: Callable[[], str], call: ASGIApp, others: ASGIApp) -> None:
        self._name = name
        self._engine = engine
        self._call = call
        self._others = others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._call if self._engine() == self._name else self._others
        await app(scope, receive, send)


class _Everywhere:
    """A call to all workers."""

    def __init__(self, fleet: Fleet, path: FleetPath) -> None:
        self._fleet = fleet
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_json(scope, receive, self._fleet._max_body_bytes)
        if not body and scope["method"] == "POST" and self._path.wants_object:
            body = b"{}"
            kept = [pair for pair in scope["headers"] if pair[0] != b"content-type"]
            scope = {**scope, "headers": [*kept, (b"content-type", b"application/json")]}
        aborts = self._path.aborts(_object(body), QueryParams(scope["query_string"]))
        await self._fleet.everywhere(scope, send, body, aborts=aborts)


def _object(body: bytes) -> dict[str, Any]:
    """Return a body as an object, {} if it is not one: the workers decide whether it has to be.

    Raises BadRequestError for JSON that is nested too deeply to be read.
    """
    try:
        value = msgspec.json.decode(body)
    except RecursionError as error:
        raise BadRequestError(f"the body cannot be read: {error}") from error
    except JSON_ERRORS:
        return {}
    return value if isinstance(value, dict) else {}


async def _answer(send: Send, answers: Sequence[WorkerAnswer], more: dict[str, Any]) -> None:
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
    body = {"success": not failed, "message": message, "workers": [answer.shown() for answer in answers], **more}
    await send_json(send, status, msgspec.json.encode(body))


class NamedAborts:
    """Ends generations by the id that their clients know, at whichever router they are.

    An abort is an entry in the routers' log before any worker gets it, so that no router resends such a generation. SGLang's
    rule for ids holds for all routers together: an abort ends the generations with exactly this id, or, if no router has one,
    those whose ids begin with it. So for an id that this router does not have, it asks the others twice.
    """

    def __init__(
        self,
        in_flight: GenerationsInFlight,
        sender: CallSender,
        peers: Peers,
        headers: Callable[[HeaderList], HeaderList],
    ) -> None:
        """`headers`: returns those of a request that its worker gets, too."""
        self._in_flight = in_flight
        self._sender = sender
        self._peers = peers
        self._headers = headers
        self._answered: dict[int, list[AbortAnswered]] = {}
        self._answering: set[asyncio.Task[None]] = set()
        peers.log.hear(Abort, self._asked_elsewhere)
        peers.log.hear(AbortAnswered, self._answered_elsewhere)

    async def end(self, abort: Abort, headers: HeaderList) -> tuple[list[WorkerAnswer], bool, Heard]:
        """End the generations that an abort means. Return what workers said, whether there were any, and who heard of it.

        `headers`: of the request that asks for it.
        """
        here = self._in_flight.named(abort.rid, abort.tenant)
        if _of_this_name(here, abort.rid) or self._peers.kind is None:
            _mark(here)
            heard = await self._peers.tell(replace(abort, exact=bool(here)), seconds=0.0)
            self._answered.pop(heard.number, None)
            return await self._call_workers(here, abort, headers), bool(here), heard
        heard, answers, found = await self._ask(replace(abort, exact=True))
        if not found:
            _mark(here)
            (heard, answers, found), mine = await asyncio.gather(
                self._ask(abort), self._call_workers(here, abort, headers)
            )
            answers = [*mine, *answers]
        return answers, found or bool(here), heard

    async def _ask(self, abort: Abort) -> tuple[Heard, list[WorkerAnswer], bool]:
        """Ask all other routers. Return who heard, what their workers said, and whether one of them had such a generation."""
        heard = await self._peers.tell(abort, seconds=self._sender.seconds + _LONGER)
        await self._peers.catch_up()
        answered = self._answered.pop(heard.number, [])
        answers = [msgspec.convert(answer, WorkerAnswer) for one in answered for answer in one.answers]
        return heard, answers, bool(answered)

    async def close(self) -> None:
        """Wait a moment for the last answers."""
        if self._answering:
            await asyncio.wait(self._answering, timeout=1.0)

    async def _asked_elsewhere(self, abort: Abort, number: int, own: bool) -> None:
        if own:
            self._answered[number] = []
            return
        named = self._in_flight.named(abort.rid, abort.tenant)
        meant = _of_this_name(named, abort.rid) if abort.exact else named
        if meant:
            _mark(meant)
            self._peers.presence.busy.add(number)
            task = asyncio.create_task(self._answer(abort, number, meant))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

    async def _answer(self, abort: Abort, number: int, meant: _Meant) -> None:
        """Abort generations at their workers for another router, and report to it what they said."""
        try:
            answers = await self._call_workers(meant, abort)
            told = tuple(msgspec.to_builtins(answer) for answer in answers)
            await self._peers.tell(AbortAnswered(number, told), seconds=0.0)
        finally:
            self._peers.presence.busy.discard(number)
            await self._peers.announce()

    async def _answered_elsewhere(self, event: AbortAnswered, _: int, own: bool) -> None:
        if not own and event.abort in self._answered:
            self._answered[event.abort].append(event)

    async def _call_workers(self, meant: _Meant, abort: Abort, headers: HeaderList | None = None) -> list[WorkerAnswer]:
        """Send the abort to the workers; without `headers`, with those of the generation itself."""
        calls = []
        for one, position in meant:
            at_worker = one.rids.get(position)
            if at_worker is not None:
                own = [] if one.call is None else one.call.headers
                passed = self._headers(own if headers is None else headers)
                call = abort_call(passed, {**abort.fields, "rid": at_worker})
                calls += [self._sender.send(worker, call) for worker in one.workers]
        return await asyncio.gather(*calls)


def _abort_of(rid: str, caller: Caller, fields: dict[str, Raw] | None = None) -> Abort:
    """Return the abort that a caller asks for: of its own tenant's generations, unless it may end all."""
    return Abort(rid, caller.tenant if caller.confined else None, fields=(fields or {}) if caller.admin else {})


def abort_call(headers: HeaderList, body: dict[str, Any]) -> FleetCall:
    return FleetCall("POST", "/abort_request", headers, msgspec.json.encode(body), lasting=True)


def _of_this_name(meant: _Meant, rid: str) -> _Meant:
    return [(one, position) for one, position in meant if one.names[position] == rid]


def _mark(meant: _Meant) -> None:
    for one, position in meant:
        one.end((position,))
