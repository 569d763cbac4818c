"""Generations that their workers aborted, sent again until they are answered: the policy `retry`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import msgspec
import tenacity
from msgspec import Raw

from router.config.workers import AbortConfig
from router.engines.form.outcome import aborted_replies, renamed, was_aborted, was_refused
from router.engines.form.worker_request import WorkerRequest
from router.errors import RouterError
from router.http.request_state import RequestPhase
from router.http.upstream import UpstreamBrokenError
from router.observability.metrics import RouterMetrics
from router.proxy.in_flight import InFlight
from router.proxy.worker_reply import EventEditor, WorkerReply

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


Generate = Callable[[InFlight], Awaitable[WorkerReply]]
"""Makes one attempt, as `Proxy.generate` does."""


class _EnoughError(Exception):
    """All generations that a retry waited for are to end."""


class _Aborted:
    """A request whose first attempt was aborted, in whole or in part. Each attempt finds its body in `in_flight`."""

    def __init__(self, generate: Generate, retries: Retries, in_flight: InFlight, first: WorkerRequest) -> None:
        """`first`: the whole request. Prompts that were aborted in the queue may be missing from its first attempt."""
        self._generate = generate
        self._retries = retries
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

    async def _next(self, request: WorkerRequest, positions: Sequence[int]) -> WorkerReply | None:
        """Return the reply to a further attempt; None if it failed."""
        self._in_flight.send_next(request, positions)
        try:
            reply = await self._generate(self._in_flight)
        except (RouterError, UpstreamBrokenError) as error:
            logger.warning("an aborted generation could not be sent again: %s", error)
            return None
        if reply.status == 200 and not (reply.stream and was_refused(reply.body)):
            return reply
        logger.warning("an aborted generation was sent again, and refused: %r", reply.body[:500])
        reply.close()
        return None

    async def _pause(self, seconds: float) -> None:
        """Wait, but not for generations that are to end."""
        self._in_flight.rename({})  # no worker has any of it now, so there is nothing to abort
        if self._in_flight.call is not None:
            self._in_flight.call.record.enter(RequestPhase.WAITING)
        try:
            async with asyncio.timeout(seconds):
                await self._in_flight.until_to_end(self._positions())
        except TimeoutError:
            return
        raise _EnoughError


class AbortedReplies(_Aborted):
    """A reply in one piece, whose aborted generations are replaced by the replies of later attempts."""

    _replies: list[Raw]
    _left: list[int]
    """Positions of the replies that are aborted and still wanted."""

    async def made_good(self, reply: WorkerReply) -> WorkerReply:
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
        found = await self._next(again, self._left)
        if found is None:
            return
        replies, aborted = aborted_replies(found.body, again)
        for position, reply in zip(self._left, replies, strict=False):
            name = self._name(position)
            self._replies[position] = reply if name is None else Raw(renamed(reply, name))
        self._left = [self._left[number] for number in aborted] if replies else self._left
        found.body = msgspec.json.encode(self._replies) if self._first.listed else bytes(self._replies[0])
        self._reply = found


class AbortedStream(_Aborted):
    """A stream, which is sent again only while nothing but an abort has come."""

    async def made_good(self, reply: WorkerReply) -> WorkerReply:
        """Return the last reply, which is not aborted or cannot be sent again; `reply` is that of the first attempt."""
        self._reply = reply
        if await self._only_aborted(reply) and not self._in_flight.to_end(0):
            await self._run()
        return self._reply

    def _positions(self) -> Sequence[int]:
        return (0,)

    async def _try_again(self) -> bool:
        if self._in_flight.to_end(0):
            return False
        reply = await self._next(self._first.again((0,)), (0,))
        if reply is None:
            return True
        self._reply = reply
        if (name := self._name(0)) is not None:
            reply.add_step(EventEditor(partial(_under, name)))
        return await self._only_aborted(reply) and not self._in_flight.to_end(0)

    async def _only_aborted(self, reply: WorkerReply) -> bool:
        """Return whether a stream only says that it was aborted. Such a stream is read to its end, and frees its worker."""
        try:
            if not (reply.stream and was_aborted(await reply.first_event())):
                return False
            await reply.gather()
        except BaseException:
            reply.close()
            raise
        reply.close()
        return True


def _under(name: str, data: bytes) -> bytes:
    """Return an event under the id that the client knows."""
    return renamed(data, name) if data.startswith(b"{") else data
