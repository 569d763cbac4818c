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

from router.config.abort import AbortConfig
from router.engines.form.outcome import aborted_replies, renamed, was_aborted, was_refused
from router.engines.form.worker_request import WorkerRequest
from router.errors import ClientDisconnectedError, RouterError
from router.http.reply import CollectedReply, EditedReply
from router.http.upstream import UpstreamBrokenError
from router.observability.metrics import RouterMetrics
from router.proxy.in_flight import InFlight

logger = logging.getLogger(__name__)


class Retries:
    """How often, and how long apart."""

    def __init__(
        self, config: AbortConfig, metrics: RouterMetrics, allowed: Callable[[], Awaitable[bool]] | None = None
    ) -> None:
        """`allowed`: awaited before each attempt; learns of the aborts that clients asked for, and returns whether it could."""
        self.allowed = allowed
        self._config = config
        self._counted = metrics.abort_retries

    def run(self, wait: Callable[[float], Awaitable[None]]) -> tenacity.AsyncRetrying:
        """Return the configured attempts, which go on while an attempt returns True. `wait(seconds)` waits."""

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
    """All generations that a retry waited for are to end."""


class _Aborted:
    """A request whose first attempt was aborted, in whole or in part. Each attempt finds its body in `in_flight`."""

    def __init__(
        self,
        app: ASGIApp,
        retries: Retries,
        scope: Scope,
        receive: Receive,
        in_flight: InFlight,
        first: WorkerRequest,
    ) -> None:
        """`first`: the whole request. Prompts that were aborted in the queue may be missing from its first attempt."""
        self._app = app
        self._retries = retries
        self._scope = scope
        self._receive = receive
        self._in_flight = in_flight
        self._first = first

    async def _run(self) -> None:
        """Make further attempts until nothing is left to send, or no attempt is left."""
        outcomes = iter([True])

        async def attempt() -> bool:
            if next(outcomes, False):
                return True
            if self._retries.allowed is not None and not await self._retries.allowed():
                logger.warning("a generation is not sent again yet: whether its abort was asked for is not known")
                return True
            return await self._try_again()

        with contextlib.suppress(_EnoughError):
            await self._retries.run(self._pause)(attempt)

    async def _try_again(self) -> bool:
        """Make one attempt; return whether something is left for another one."""
        raise NotImplementedError

    def _positions(self) -> Sequence[int]:
        """Return the generations that have no answer yet."""
        raise NotImplementedError

    def _name(self, position: int) -> str | None:
        """Return the id that the client knows."""
        return self._first.rids[position] if self._first.rids else None

    async def _pause(self, seconds: float) -> None:
        """Wait, but not for generations that are to end, and not for a client that has left."""
        self._in_flight.rids = {}  # no worker has any of it now, so there is nothing to abort
        ended = asyncio.ensure_future(self._in_flight.until_to_end(self._positions()))
        gone = asyncio.ensure_future(_disconnected(self._receive))
        try:
            await asyncio.wait((ended, gone), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                raise ClientDisconnectedError("the client left while its generation waited to be sent again")
            if ended.done():
                raise _EnoughError
        finally:
            ended.cancel()
            gone.cancel()


class AbortedReplies(_Aborted):
    """A reply in one piece, whose aborted generations are replaced by the replies of later attempts."""

    _reply: CollectedReply
    _replies: list[Raw]
    _left: list[int]
    """Positions of the replies that are aborted and still wanted."""

    async def made_good(self, reply: CollectedReply) -> CollectedReply:
        """Return the reply after all attempts; `reply` is that of the first one."""
        self._reply = reply
        self._replies, self._left = aborted_replies(reply.body, self._first)
        self._leave_out_unwanted()
        if self._left:
            await self._run()
        return self._reply

    def _positions(self) -> Sequence[int]:
        return self._left

    async def _try_again(self) -> bool:
        self._leave_out_unwanted()  # it may have become so in the meantime
        if self._left:
            await self._replace()
            self._leave_out_unwanted()
        return bool(self._left)

    def _leave_out_unwanted(self) -> None:
        """Leave the replies of generations that are to end unchanged."""
        self._left = [position for position in self._left if not self._in_flight.to_end(position)]

    async def _replace(self) -> None:
        """Send again what was aborted, and put the replies in their places."""
        again = self._first.again(self._left)
        self._in_flight.send_next(again, self._left)
        found = CollectedReply()
        try:
            await self._app(self._scope, self._receive, found.send)
        except (RouterError, UpstreamBrokenError) as error:
            logger.warning("an aborted generation could not be sent again: %s", error)
            return
        if found.start["status"] != 200:
            logger.warning("an aborted generation was sent again, and refused: %r", found.body[:500])
            return
        replies, aborted = aborted_replies(found.body, again)
        for position, reply in zip(self._left, replies, strict=False):
            name = self._name(position)
            self._replies[position] = reply if name is None else Raw(renamed(reply, name))
        self._left = [self._left[number] for number in aborted] if replies else self._left
        self._reply.start = found.start
        self._reply.body = msgspec.json.encode(self._replies) if self._first.listed else bytes(self._replies[0])


class AbortedStream(_Aborted):
    """A stream, which is sent again only while nothing but an abort has come."""

    _client: Send
    _held: list[Message]

    async def serve(self, send: Send) -> None:
        """Make all attempts, including the first; the client gets the last one."""
        self._client = send
        gate = Gate(send, None, again=False)
        await self._app(self._scope, self._receive, gate.send)
        self._held = gate.held
        if not gate.opened and not self._in_flight.to_end(0):
            await self._run()
        for message in self._held:
            # The last attempt was aborted as well, or was meant to be.
            await send(message)

    def _positions(self) -> Sequence[int]:
        return (0,)

    async def _try_again(self) -> bool:
        if self._in_flight.to_end(0):
            return False
        self._in_flight.send_next(self._first.again((0,)), (0,))
        gate = Gate(self._client, self._name(0), again=True)
        try:
            await self._app(self._scope, self._receive, gate.send)
        except (RouterError, UpstreamBrokenError) as error:
            if gate.opened:
                raise
            logger.warning("an aborted stream could not be sent again: %s", error)
            return True
        if gate.refused:
            logger.warning("an aborted stream was sent again, and refused")
            return True
        self._held = gate.held
        return not gate.opened and not self._in_flight.to_end(0)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Gate:
    """Holds a stream back until its first event has come, and for good if that event only says `aborted`.

    Attributes:
        send: what the application inside calls.
        opened: whether the reply goes on to the client.
        refused: whether a later attempt brought an error instead of a stream.
        held: what the client did not get, while the gate is not open.
    """

    def __init__(self, client: Send, name: str | None, *, again: bool) -> None:
        """`name`: the id that events get, if the worker has another one. `again`: this is not the first attempt, and an aborted
        reply is better than a refused one.
        """
        self._client = client
        self._name = name
        self._again = again
        self._judged = False
        self._reply = EditedReply(self, self._hold)
        self.send = self._reply.send
        self.opened = False
        self.refused = False
        self.held: list[Message] = []

    def head(self, start: Message, *, stream: bool) -> Message:
        """Return the head unchanged. A reply that is not a stream is an error, which only a first attempt passes on."""
        if not stream:
            self._judged = True
            self.refused = self._again and start["status"] != 200
            self.opened = not self.refused
        return start

    def event(self, data: bytes) -> bytes:
        """Judge the first event, and return each under the client's id."""
        if not self._judged:
            self._judged = True
            self.refused = self._again and was_refused(data)
            self.opened = not self.refused and not was_aborted(data)
            if self.refused or (self.opened and self._name is None):
                self._reply.pass_on()
        if self._name is None or self.refused or not data.startswith(b"{"):
            return data
        return renamed(data, self._name)

    async def whole(self, start: Message, body: bytes) -> tuple[Message, bytes]:
        """Never called: no head is held back here."""
        raise AssertionError

    async def _hold(self, message: Message) -> None:
        if not self._judged and message["type"] == "http.response.body" and not message.get("more_body", False):
            self.opened = True  # a stream that ends without an event was not aborted
        self.held.append(message)
        if self.opened:
            held, self.held = self.held, []
            for one in held:
                await self._client(one)
