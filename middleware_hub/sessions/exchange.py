"""One request of a client and the generations that answer it, which outlive the client.

    composing    its prompt is being made: nothing can be sampled yet, but the exchange is known already
    generating   workers have it
    over         it failed, or every generation has its answer or its error

Independently of that, it has a client (`ClientState`, with a table of its moves):

               leave              give up
    READING <--------> GONE -----------------> GIVEN_UP
       |      adopt
       | deliver
       v
    DELIVERED

A client that sends the same request again may adopt what another one left, during the grace period. After that it is given up:
it is aborted, and its reply reaches no client. So is an exchange whose client goes on with the words that it has read.

A client library that lost its connection sends its request again and must not get another sample. But two clients that want the
same thing at the same time want two samples, so an exchange that has a client is never joined.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

import msgspec
from xxhash import xxh3_128_digest

from middleware_hub.chat.answer import Answer
from middleware_hub.chat.errors import SessionOverError
from middleware_hub.chat.messages import Message
from router.errors import RouterError

logger = logging.getLogger(__name__)

KEPT_SECONDS = 120.0
"""How long a reply that did not reach its client is kept for a resend. Client libraries resend within seconds, and a reply may
hold megabytes of logprobs.
"""
HAND_OVER_SECONDS = 5.0
"""How long a generation may take to end by itself, from when its worker is told to end it."""


class ClientState(enum.Enum):
    """The client of an exchange."""

    READING = "reading"
    GONE = "gone"
    """It left before it had everything."""
    DELIVERED = "delivered"
    """It has received everything."""
    GIVEN_UP = "given up"
    """It left, and no other one gets the reply."""


_READING, _GONE, _DELIVERED, _GIVEN_UP = ClientState
_MOVES: Final = {
    ("leave", _READING): _GONE,
    ("deliver", _READING): _DELIVERED,
    ("adopt", _GONE): _READING,
    ("give up", _GONE): _GIVEN_UP,
    ("give up", _GIVEN_UP): _GIVEN_UP,  # by a client that goes on, and by the end of the grace period
}
"""From a move and a state to the next state. No other move happens."""


class RequestKey(NamedTuple):
    """Identifies a request that is sent again: everything that its reply depends on, and the `Idempotency-Key`."""

    idempotency: str | None
    body: bytes
    dialect: str = ""
    parent: str | None = None

    @property
    def digest(self) -> bytes:
        """What a turn keeps of the request that it answers."""
        rest = msgspec.msgpack.encode((self.idempotency, self.dialect, self.parent))
        return xxh3_128_digest(xxh3_128_digest(self.body) + rest)


_FORGOTTEN = RequestKey(None, b"")


class Running(Protocol):
    """The part of a generation that its exchange uses."""

    @property
    def answer(self) -> Answer | None: ...

    @property
    def error(self) -> RouterError | None: ...

    @property
    def begun(self) -> bool: ...

    @property
    def over(self) -> bool: ...

    async def run(self) -> None:
        """Run to the end. Raises nothing: `error` says what went wrong."""

    async def abort(self) -> None: ...

    def was_read(self, messages: Sequence[Message]) -> bool:
        """Whether a conversation goes on from the beginning of its reply, which a client must have read."""


G = TypeVar("G", bound=Running)


class Exchange(Generic[G]):
    """See the top of this file. It runs in a task of its own from when it is made.

    Args:
        compose: makes its generations.
        grace: seconds that it goes on without a client.
        on_over: called once, when it is over.

    Attributes:
        client: the state of its client.
        notes: facts about its prompt, one word each.
        over: whether nothing more will come, and everything was counted; `all_over` waits for that.
    """

    def __init__(
        self,
        key: RequestKey,
        compose: Callable[[Exchange[G]], Awaitable[list[G]]],
        *,
        grace: float,
        on_over: Callable[[Exchange[G]], None],
    ) -> None:
        self.key = key
        self.notes: tuple[str, ...] = ()
        self.generations: list[G] = []
        self.client = _READING
        self.over = False
        self._grace = grace
        self._on_over = on_over
        self._error: RouterError | None = None
        self._alone_since = 0.0
        self._condition = asyncio.Event()
        self._reader: Callable[[], bool] | None = None
        self._fault: Exception | None = None
        self._finished = asyncio.Event()
        self.all_over = self._finished.wait
        self._timer: asyncio.TimerHandle | None = None
        self._aborting: asyncio.Task[None] | None = None
        self._task = asyncio.create_task(self._run(compose))

    def __repr__(self) -> str:
        return f"<Exchange of {len(self.generations)}: {'over' if self.over else self.client.value}>"

    # Its state ---------------------------------------------------------------------------------------------------------

    @property
    def adoptable(self) -> bool:
        """Whether its client left before it had everything, and a reply is there or may still come."""
        return self.client is _GONE and (not self.over or bool(self.answers))

    @property
    def orphaned(self) -> bool:
        """Whether its client left, and it goes on."""
        return self.client in (_GONE, _GIVEN_UP) and not self.over

    @property
    def answers(self) -> list[Answer]:
        return [generation.answer for generation in self.generations if generation.answer is not None]

    @property
    def failure(self) -> RouterError:
        """Why an exchange that is over has no answer."""
        errors = (*(generation.error for generation in self.generations), self._error)
        return next(error for error in errors if error is not None)

    def stale(self, now: float) -> bool:
        """Whether it is over, and has had no client for so long that no client will ask for it."""
        return self.over and self.client is not _READING and now - self._alone_since > KEPT_SECONDS

    # Its life ----------------------------------------------------------------------------------------------------------

    async def _run(self, compose: Callable[[Exchange[G]], Awaitable[list[G]]]) -> None:
        try:
            self.generations = await compose(self)
            if len(self.generations) == 1:  # most have one, which needs no task of its own
                await self.generations[0].run()
            else:
                await asyncio.gather(*map(self._run_one, self.generations))
        except RouterError as error:
            self._error = error
        except Exception as error:
            logger.exception("a turn could not be begun")
            self._error = RouterError(f"internal error ({type(error).__name__}): the router's log has the details")
        finally:
            self._end()

    async def _run_one(self, generation: G) -> None:
        await generation.run()
        self.notify()

    def _end(self) -> None:
        """End the exchange. May be called twice."""
        if not self.over:
            self.over = True
            self._alone_since = time.monotonic()
            ended = bool(self.generations)
            for one in self.generations:
                ended = ended and one.over
            if self._error is None and not ended:
                self._error = SessionOverError("this turn was cancelled before there was a reply")
            if self._timer is not None:
                self._timer.cancel()
            self._condition.set()
            self._finished.set()
            self._on_over(self)

    async def abort(self) -> None:
        """End all generations: workers return what they have sampled; a worker that does not is cut off."""
        running = [generation for generation in self.generations if not generation.over]
        if running:
            asking = [asyncio.create_task(generation.abort()) for generation in running]
            # One limit for both: a hung worker answers neither.
            await asyncio.wait([self._task], timeout=HAND_OVER_SECONDS)
            for one in asking:
                one.cancel()
        await self.cancel()

    async def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._task.cancel()
        await asyncio.wait([self._task])
        self._end()  # for a task that was cancelled before it began

    def release(self) -> None:
        """Let go of the generations: they and the exchange refer to each other, and would stay until a garbage collection."""
        self.generations = []
        self.key = _FORGOTTEN

    # Its client --------------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Take a client that reads along."""
        self.client = _MOVES["adopt", self.client]
        self._condition.set()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def detach(self, *, delivered: bool) -> None:
        """Let go of the client, which has received everything (`delivered`) or is gone."""
        self.client = _MOVES["deliver" if delivered else "leave", self.client]
        self._alone_since = time.monotonic()
        if not self.over and not delivered:
            logger.info("a client left: its generation goes on for %g s, in case it is asked for again", self._grace)
            self._timer = asyncio.get_running_loop().call_later(self._grace, self._time_is_up)

    def give_up(self) -> None:
        """Let no client adopt it any more."""
        self.client = _MOVES["give up", self.client]

    def _time_is_up(self) -> None:
        self.give_up()
        self._aborting = asyncio.get_running_loop().create_task(self.abort())

    def notify(self) -> None:
        """Tell the client that there is something new."""
        try:
            dealt = self._reader is not None and self._reader()
        except Exception as error:  # noqa: BLE001 - it is raised in the client's task, for it is no fault of the generation
            self._fault, dealt = error, False
        if not dealt:
            self._condition.set()

    async def news(self, reader: Callable[[], bool] | None = None) -> None:
        """Wait until there is something new since the last call.

        `reader` is called for it first, without waking the task that waits; it returns whether it has dealt with it. Raises
        what it raises.
        """
        self._reader = reader
        try:
            await self._condition.wait()
        finally:
            self._reader = None
        self._condition.clear()
        if (fault := self._fault) is not None:
            self._fault = None
            raise fault

    async def begun(self) -> bool:
        """Wait until a reply has begun to arrive, or nothing more will come; return whether one has."""
        while not (found := any(generation.begun for generation in self.generations)) and not self.over:
            await self.news()
        return found


async def end_what_was_read(orphans: Iterable[Exchange[Any]], messages: Sequence[Message]) -> None:
    """End the orphans of whose replies a conversation has the beginning, and wait until they are over.

    Agents cut a reply off at a tag of their own, and people press *stop*: they go on with what they have read. Its tokens are
    known only when its generation has ended.
    """
    read = [
        exchange
        for exchange in orphans
        if exchange.orphaned and any(one.was_read(messages) for one in exchange.generations)
    ]
    for exchange in read:
        exchange.give_up()  # so no client adopts it while others are ended
    await asyncio.gather(*(exchange.abort() for exchange in read))
