"""Generations that their workers aborted, sent again until they are answered: the policy `retry`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import tenacity
from msgspec import Raw
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.config import AbortConfig
from router.engines.sglang.attempt import Attempt, aborted_replies, renamed
from router.errors import ClientDisconnectedError, RouterError
from router.generate.gate import Gate
from router.generate.resend import send_on
from router.http.asgi import collected
from router.http.upstream import UpstreamBrokenError
from router.observability.metrics import RouterMetrics
from router.proxy.in_flight import Flight

logger = logging.getLogger(__name__)


class Retries:
    """How often, and how long apart."""

    def __init__(self, config: AbortConfig, metrics: RouterMetrics) -> None:
        self._config = config
        self._counted = metrics.abort_retries

    def of(self, wait: Callable[[float], Awaitable[None]]) -> tenacity.AsyncRetrying:
        """Attempts as configured, for as long as they return that there is something left to do. `wait(seconds)` waits."""

        async def pause(seconds: float) -> None:
            logger.info("a generation was aborted by its worker: it is sent again in %g s", seconds)
            await wait(seconds)
            self._counted.labels("retried").inc()

        return tenacity.AsyncRetrying(
            retry=tenacity.retry_if_result(bool),
            stop=tenacity.stop_after_attempt(self._config.attempts),
            wait=tenacity.wait_fixed(self._config.wait),
            sleep=pause,
            retry_error_callback=self._given_up,
        )

    def _given_up(self, _: tenacity.RetryCallState) -> None:
        self._counted.labels("given_up").inc()


class _EnoughError(Exception):
    """All that was waited for is to end."""


class _Job:
    """A request under the policy `retry`."""

    def __init__(
        self, app: ASGIApp, retries: Retries, scope: Scope, receive: Receive, flight: Flight, attempt: Attempt
    ) -> None:
        self._app = app
        self._retries = retries
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
            await self._retries.of(self._pause)(attempt)

    async def _try(self) -> bool:
        """One attempt; whether another one is called for."""
        raise NotImplementedError

    def _positions(self) -> Sequence[int]:
        """The generations that are still without an answer."""
        raise NotImplementedError

    async def _pause(self, seconds: float) -> None:
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
        await send_on(self._app, self._scope, self._receive, send, self._flight, attempt)


class WholeJob(_Job):
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
        async def asked(_: Scope, __: Receive, send: Send) -> None:
            await self._send_on(attempt, send)

        return await collected(asked, self._scope, self._receive)


class StreamJob(_Job):
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
        gate = Gate(self._client, name, again=self._held is not None)
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


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
