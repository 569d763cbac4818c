"""What happens to a generation that its worker aborted, or whose client left: the layer around the proxy.

A worker aborts what it has when its weights are changed. Under the policy `retry` the client never learns of it: the same
request goes out again until it is answered, elsewhere or later. But an abort that was asked for through this router is
what somebody wanted, and is returned as it came.

A generation whose client left costs a GPU until its worker notices, which takes SGLang some seconds: it is told at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import cast, get_args

import msgspec
import tenacity
from msgspec import Raw
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.asgi import header, read_body, replay, with_body
from router.callers import caller_of
from router.config import AbortConfig, AbortPolicy
from router.disguise import Disguise, Undisguising, disguised
from router.errors import BadRequestError, ClientDisconnectedError, RouterError
from router.fleet import Fleet
from router.flights import FLIGHT, Flight
from router.metrics import RouterMetrics
from router.sglang.attempt import Attempt, aborted_replies, renamed, was_aborted, was_refused
from router.sglang.stream import EventSplitter, event_data
from router.upstream import UpstreamBrokenError

logger = logging.getLogger(__name__)


class Generations:
    """Serves `/generate` by one attempt of the application inside, or by several."""

    def __init__(
        self,
        app: ASGIApp,
        fleet: Fleet,
        metrics: RouterMetrics,
        abort: AbortConfig,
        *,
        max_body_bytes: int,
        isolated: bool = False,
    ) -> None:
        """`isolated`: workers are given ids that no client has chosen, for there are others whom those might hit."""
        self._app = app
        self._isolated = isolated
        self._fleet = fleet
        self._retries = metrics.abort_retries
        self._outcomes = metrics.generations
        self._abort = abort
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Raises what the application inside raises, and BadRequestError for an unknown policy."""
        if scope["method"] not in ("POST", "PUT"):
            await self._app(scope, receive, send)
            return
        policy = self._policy(scope)
        body = await read_body(scope, receive, self._max_body_bytes)
        attempt = Attempt.first(body)
        names = () if attempt is None else attempt.rids
        if self._isolated:
            body, attempt, disguise = disguised(body, attempt)
            send = send if disguise is None else Undisguising(disguise, send).send
        flight = Flight(names, None if attempt is None else attempt.rids, tenant=caller_of(scope).tenant)
        flight.whole = attempt is not None and not attempt.stream
        flights = self._fleet.flights
        flights.begin(flight)
        account = _Account(send)
        try:
            if attempt is None or policy == "return":
                await self.once(scope, receive, account.send, flight, body if attempt is None else attempt)
            elif not attempt.stream:
                await _Whole(self, scope, receive, flight, attempt).serve(account.send)
            elif not attempt.listed:
                await _Stream(self, scope, receive, flight, attempt).serve(account.send)
            else:
                await self.once(scope, receive, account.send, flight, attempt)
        except ClientDisconnectedError:
            account.outcome = "orphaned"
            self._fleet.abandon(flight, scope)
            raise
        finally:
            flights.over(flight)
            self._outcomes.labels(account.outcome).inc(1 if attempt is None else attempt.replies)

    def _policy(self, scope: Scope) -> AbortPolicy:
        asked = header(scope, b"x-abort-policy")
        if asked is None:
            return self._abort.policy
        if asked not in get_args(AbortPolicy):
            raise BadRequestError(f"x-abort-policy must be one of {', '.join(get_args(AbortPolicy))}, not {asked!r}")
        return cast(AbortPolicy, asked)

    async def once(self, scope: Scope, receive: Receive, send: Send, flight: Flight, attempt: Attempt | bytes) -> None:
        """One attempt, as far as aborts are concerned: the application inside may ask several workers."""
        flight.renew = None
        if isinstance(attempt, bytes):
            body = attempt
        else:
            body = attempt.encode()
            if attempt.rids:
                renewal = _Renewal(flight, attempt, send)
                flight.renew, send = renewal.body, renewal.send
        inner = with_body(scope, body)
        inner["state"][FLIGHT] = flight
        await self._app(inner, replay(body, receive), send)

    def retrying(self, job: _Job) -> tenacity.AsyncRetrying:
        """Attempts as configured, for as long as a job says that there is something left to do."""

        async def pause(seconds: float) -> None:
            logger.info("a generation was aborted by its worker: it is sent again in %g s", seconds)
            await job.pause(seconds)
            self._retries.labels("retried").inc()

        return tenacity.AsyncRetrying(
            retry=tenacity.retry_if_result(bool),
            stop=tenacity.stop_after_attempt(self._abort.attempts),
            wait=tenacity.wait_fixed(self._abort.wait),
            sleep=pause,
            retry_error_callback=self._given_up,
        )

    def _given_up(self, _: tenacity.RetryCallState) -> None:
        self._retries.labels("given_up").inc()


class _Renewal:
    """Lets a request go to a worker that has seen it already: under other ids, of which nobody else learns.

    SGLang refuses an id that it is serving, and still aborts one for a while after its stream has ended.
    """

    def __init__(self, flight: Flight, attempt: Attempt, send: Send) -> None:
        self._flight = flight
        self._attempt = attempt
        self._outward = self._send = send

    def body(self) -> bytes:
        """The request under new ids."""
        disguise = Disguise(self._attempt.rids)
        self._flight.rids = dict(zip(self._flight.rids, disguise.rids, strict=True))
        self._send = Undisguising(disguise, self._outward).send
        return msgspec.structs.replace(self._attempt, rids=disguise.rids).encode()

    async def send(self, message: Message) -> None:
        """What the application inside calls."""
        await self._send(message)


class _Account:
    """What came of a request: `answered` when a good reply has gone out to its end, else `failed`; or what it is set to."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._good = False
        self.outcome = "failed"

    async def send(self, message: Message) -> None:
        """To the client."""
        await self._send(message)
        if message["type"] == "http.response.start":
            self._good = message["status"] < 400
        elif self._good and not message.get("more_body", False):
            self.outcome = "answered"


class _EnoughError(Exception):
    """All that was waited for is to end."""


class _Job:
    """A request under the policy `retry`."""

    def __init__(
        self, generations: Generations, scope: Scope, receive: Receive, flight: Flight, attempt: Attempt
    ) -> None:
        self._generations = generations
        self._scope = scope
        self._receive = receive
        self._flight = flight
        self._attempt = attempt

    async def _run(self) -> None:
        """Attempts until nothing is left to do, or nothing may be done any more."""
        if not await self._try():
            return  # Nearly always; to ask tenacity what to do next costs as much as a third of the way to the worker.
        outcomes = iter([True])

        async def attempt() -> bool:
            return next(outcomes, False) or await self._try()

        with contextlib.suppress(_EnoughError):
            await self._generations.retrying(self)(attempt)

    async def _try(self) -> bool:
        """One attempt; whether another one is called for."""
        raise NotImplementedError

    def _positions(self) -> Sequence[int]:
        """The generations that are still without an answer."""
        raise NotImplementedError

    async def pause(self, seconds: float) -> None:
        """Wait, but not for what is to end, and not for a client that has left."""
        self._flight.rids = {}  # No worker has any of it now, so there is nobody to be told of its end.
        asked = asyncio.ensure_future(self._flight.until_asked(self._positions()))
        gone = asyncio.ensure_future(_disconnected(self._receive))
        try:
            await asyncio.wait((asked, gone), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                raise ClientDisconnectedError("the client left while its generation waited to be sent again")
            if asked.done():
                raise _EnoughError
        finally:
            asked.cancel()
            gone.cancel()

    async def _send_on(self, attempt: Attempt, send: Send) -> None:
        await self._generations.once(self._scope, self._receive, send, self._flight, attempt)


class _Whole(_Job):
    """A request whose reply comes in one piece: aborted replies are replaced by those of later attempts."""

    _start: Message | None = None
    _body: bytes = b""
    _replies: list[Raw]
    _aborted: list[int]

    async def serve(self, send: Send) -> None:
        """All attempts, then the reply."""
        self._aborted = []
        await self._run()
        assert self._start is not None
        headers = [(name, value) for name, value in self._start["headers"] if name != b"content-length"]
        headers.append((b"content-length", b"%d" % len(self._body)))
        await send({**self._start, "headers": headers})
        await send({"type": "http.response.body", "body": self._body, "more_body": False})

    def _positions(self) -> Sequence[int]:
        return self._aborted

    async def _try(self) -> bool:
        if self._start is None:
            self._start, self._body = await self._exchange(self._attempt)
            if self._start["status"] == 200 and b'"abort"' in self._body:
                self._replies, self._aborted = aborted_replies(self._body, self._attempt)
        else:
            self._leave_out_the_asked()  # in the meantime
            if self._aborted:
                await self._replace()
        self._leave_out_the_asked()
        return bool(self._aborted)

    def _leave_out_the_asked(self) -> None:
        """What somebody wants to end keeps the reply it has."""
        self._aborted = [position for position in self._aborted if not self._flight.asked(position)]

    async def _replace(self) -> None:
        """Send again what was aborted, and put the replies in their places."""
        again = self._attempt.again(self._aborted)
        self._flight.rids = dict(zip(self._aborted, again.rids, strict=True))
        try:
            start, body = await self._exchange(again)
        except (RouterError, UpstreamBrokenError) as error:
            logger.warning("an aborted generation could not be sent again: %s", error)
            return
        if start["status"] != 200:
            logger.warning("an aborted generation was sent again, and refused: %r", body[:500])
            return
        replies, aborted = aborted_replies(body, again)
        for position, reply in zip(self._aborted, replies, strict=False):
            name = self._attempt.rids[position] if self._attempt.rids else None
            self._replies[position] = reply if name is None else Raw(renamed(reply, name))
        self._start = start
        self._aborted = [self._aborted[number] for number in aborted] if replies else self._aborted
        self._body = msgspec.json.encode(self._replies) if self._attempt.listed else bytes(self._replies[0])

    async def _exchange(self, attempt: Attempt) -> tuple[Message, bytes]:
        start: Message = {}
        chunks: list[bytes] = []

        async def keep(message: Message) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
            else:
                chunks.append(message.get("body", b""))

        await self._send_on(attempt, keep)
        return start, b"".join(chunks)


class _Stream(_Job):
    """A request whose reply is a stream: sent again only while nothing but an abort has come of it."""

    async def serve(self, send: Send) -> None:
        """All attempts; the last one is the client's."""
        self._client = send
        self._held: list[Message] | None = None
        await self._run()
        held: list[Message] = self._held or []
        for message in held:
            # The last attempt was aborted as well, or was meant to be.
            await send(message)

    def _positions(self) -> Sequence[int]:
        return (0,)

    async def _try(self) -> bool:
        attempt, name = self._attempt, None
        if self._held is not None:
            if self._flight.asked(0):
                return False
            attempt, name = self._attempt.again((0,)), self._attempt.rids[0] if self._attempt.rids else None
            self._flight.rids = dict(enumerate(attempt.rids))
        gate = _Gate(self._client, name, again=self._held is not None)
        try:
            await self._send_on(attempt, gate.send)
        except (RouterError, UpstreamBrokenError) as error:
            if self._held is None or gate.opened:
                raise
            logger.warning("an aborted stream could not be sent again: %s", error)
            return True
        if gate.refused:
            logger.warning("an aborted stream was sent again, and refused")
            return True
        self._held = [] if gate.opened else gate.held
        return not gate.opened and not self._flight.asked(0)


class _Gate:
    """Holds a stream back until its first event is there, and for good if that says nothing but `aborted`.

    With a `name` the events are given that id: to the worker the generation had another one.
    """

    def __init__(self, send: Send, name: str | None, *, again: bool) -> None:
        """`again`: there is an aborted reply already, which is better than none."""
        self._send = send
        self._again = again
        self.refused = False
        self._name = name
        self._events = EventSplitter()
        self._judged = False
        self.held: list[Message] = []
        self.opened = False

    async def send(self, message: Message) -> None:
        """What the application inside calls."""
        if self.opened and self._name is None:
            await self._send(message)
            return
        if message["type"] == "http.response.start":
            kind = dict(message["headers"]).get(b"content-type", b"")
            self.refused = self._again and message["status"] != 200
            if not self.refused and (message["status"] != 200 or not kind.startswith(b"text/event-stream")):
                self._name = None
                self._judged = self.opened = True
        else:
            message = self._looked_at(message)
        self.held.append(message)
        if self.opened:
            held, self.held = self.held, []
            for kept in held:
                await self._send(kept)

    def _looked_at(self, message: Message) -> Message:
        """The message with whole events in it, each under its name."""
        if self.refused:
            return message
        events = list(self._events.feed(message.get("body", b"")))
        over = not message.get("more_body", False)
        if not self._judged and (events or over):
            # The first event may come in many pieces; a stream that ends without one was not aborted.
            self._judged = True
            first = (event_data(events[0]) or b"") if events else b""
            self.refused = self._again and was_refused(first)
            self.opened = not self.refused and not was_aborted(first)
        if over or (self.opened and self._name is None):
            events.append(self._events.flush())
        return {**message, "body": b"".join(self._named(event) for event in events)}

    def _named(self, event: bytes) -> bytes:
        data = None if self._name is None else event_data(event)
        if self._name is None or data is None or not data.startswith(b"{"):
            return event
        return b"data: " + renamed(data, self._name) + b"\n\n"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
