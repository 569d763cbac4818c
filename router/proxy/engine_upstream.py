"""Sends requests in the common form to workers of any engine, and alone uses the adapters (`router/engines/engine.py`).

It stands between the senders (the proxy, and calls to the fleet) and the HTTP client. The senders see several replies, or
another engine's events, as one reply of a worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import closing, suppress
from typing import Any, Protocol

from router.engines.engine import Engine, EngineAnswer, EngineCall, EngineExchange, KnownWorker, UntranslatableError
from router.engines.events import EventSplitter, event_data
from router.http.upstream import (
    Body,
    Headers,
    Take,
    Upstream,
    UpstreamBrokenError,
    UpstreamFailure,
    UpstreamResponse,
)

_OF_THE_BODY = frozenset({b"content-type", b"content-length"})
_JSON = (b"content-type", b"application/json")
_EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
_AT_ONCE = 8
"""Calls of one exchange that are begun without a break."""
MOST_OPEN = 1024
"""Connections that one exchange has at a time. No engine runs more generations at once, and a batch may have 8,192 prompts."""
_READY = 64
"""Events of a reply that are read ahead of a client that is slow."""


class EngineUpstream:
    """An `Upstream` for code that knows only the common form.

    Attributes:
        send: as in `Upstream`; that of the HTTP client itself where nothing is translated, so that it costs nothing. Raises
            UpstreamBrokenError also for a reply that its engine cannot have sent.
    """

    def __init__(self, upstream: Upstream, known: Callable[[str], KnownWorker]) -> None:
        """`known(url)`: what the adapter knows about a worker."""
        self._upstream = upstream
        self._known = known
        self.send = upstream.send

    def speak(self, engine: Engine) -> None:
        """Translate for this engine from now on."""
        self._engine = engine
        self.send = self._upstream.send if engine.native else self._translated

    def ranked(self, path: str, headers: Headers, body: Body, rank: int) -> tuple[Headers, Body]:
        """Return a request that this data-parallel rank of a worker is to serve."""
        return self._engine.ranked(path, headers, body, rank)

    async def _translated(
        self, method: str, url: str, headers: Headers, body: Body = None, *, fresh: bool = False
    ) -> UpstreamResponse:
        engine = self._engine
        begin = url.find("/", url.find("//") + 2)
        base, target = (url, "/") if begin < 0 else (url[:begin], url[begin:])
        exchange = engine.exchange(EngineCall(method, target, body), self._known(base))
        if exchange is None:
            return await self._upstream.send(method, url, headers, body, fresh=fresh)
        if isinstance(exchange, EngineAnswer):
            return WholeResponse(exchange)
        dropped = engine.private_headers | _OF_THE_BODY
        kept = [pair for pair in headers if pair[0].lower() not in dropped]

        def send(call: EngineCall, *, late: bool = False) -> Coroutine[Any, Any, UpstreamResponse]:
            own = kept if call.body is None else [*kept, _JSON]
            return self._upstream.send(call.method, base + call.target, own, call.body, fresh=fresh or late)

        return await _exchanged(exchange, send)


class _Send(Protocol):
    """Sends one of the calls. `late`: others have been answered, so its connection is new: a kept one may just be closed."""

    def __call__(self, call: EngineCall, *, late: bool = False) -> Coroutine[Any, Any, UpstreamResponse]: ...


async def _exchanged(exchange: EngineExchange, send: _Send) -> UpstreamResponse:
    while True:
        found = await _once(exchange, send)
        if isinstance(found, WholeResponse | StreamResponse):
            return found
        exchange = found


async def _once(exchange: EngineExchange, send: _Send) -> WholeResponse | StreamResponse | EngineExchange:
    calls, late = exchange.calls, exchange.calls[:0]
    if exchange.stream:
        calls, late = calls[:MOST_OPEN], calls[MOST_OPEN:]
    replies: list[UpstreamResponse] = []
    try:
        if len(calls) == 1:
            replies.append(await send(calls[0]))
        else:
            replies += await _all_of(calls, _in_turn(send, streams=exchange.stream))
        for reply in replies:
            if reply.status != 200:
                return _made(exchange, [await _read(reply)], reply)
        if exchange.stream and all(reply.stream for reply in replies):
            stream = StreamResponse(exchange, replies, late, send)
            replies = []
            return stream
        if late:
            raise UpstreamBrokenError("it does not answer a stream with one")
        answers = [await _read(reply) for reply in replies]
        return _made(exchange, answers, replies[0])
    finally:
        for reply in replies:
            reply.close()


def _in_turn(send: _Send, *, streams: bool) -> _Send:
    """Return a `send` that waits while too many connections are open.

    A reply that is not a stream is read to its end at once, because it occupies its connection until then.
    """
    free = asyncio.Semaphore(MOST_OPEN)

    async def ask(call: EngineCall, *, late: bool = False) -> UpstreamResponse:
        late = late or free.locked()
        async with free:
            reply = await send(call, late=late)
            if streams and reply.stream:
                return reply
            with closing(reply):
                return WholeResponse(await _read(reply), reply.headers)

    return ask


async def _all_of(calls: Sequence[EngineCall], send: _Send) -> list[UpstreamResponse]:
    """Return all replies, or only the first bad one, as soon as it is there: the others may take long.

    If one fails, the others are closed, and the failure is raised.
    """
    tasks: list[asyncio.Task[UpstreamResponse]] = []
    found: list[UpstreamResponse] = []
    try:
        for call in calls:
            if len(tasks) % _AT_ONCE == _AT_ONCE - 1:
                await asyncio.sleep(0)  # a batch of thousands of prompts must not hold up other clients
            tasks.append(asyncio.create_task(send(call)))
        for next_one in asyncio.as_completed(tasks):
            reply = await next_one
            if reply.status != 200:
                found = [reply]
                return found
        found = [task.result() for task in tasks]
        return found
    finally:
        if len(found) < len(calls):
            await _drop(tasks, found)


async def _drop(tasks: Sequence[asyncio.Task[UpstreamResponse]], kept: Sequence[UpstreamResponse]) -> None:
    for task in tasks:
        task.cancel()
    for reply in await asyncio.gather(*tasks, return_exceptions=True):
        if not isinstance(reply, BaseException) and reply not in kept:
            reply.close()


async def _read(reply: UpstreamResponse) -> EngineAnswer:
    pieces = []
    while piece := await reply.read():
        pieces.append(piece)
    return EngineAnswer(reply.status, b"".join(pieces))


def _made(
    exchange: EngineExchange, answers: Sequence[EngineAnswer], reply: UpstreamResponse
) -> WholeResponse | EngineExchange:
    try:
        found = exchange.whole(answers)
    except UntranslatableError as error:
        raise UpstreamBrokenError(f"its reply cannot be read: {error}") from error
    return WholeResponse(found, reply.headers) if isinstance(found, EngineAnswer) else found


class WholeResponse:
    """A reply in one piece, made here.

    Attributes:
        body: the part of it that was not read.
    """

    def __init__(
        self, answer: EngineAnswer, headers: Iterable[tuple[bytes, bytes]] = (), *, stream: bool = False
    ) -> None:
        """`headers`: those of the worker's reply. `stream`: whether it consists of events."""
        self.status = answer.status
        self.stream = stream
        kept = (pair for pair in headers if pair[0].lower() not in _OF_THE_BODY)
        self.headers: Headers = [*kept, _EVENTS if stream else _JSON]
        self.body = answer.body

    async def read(self) -> bytes:
        body, self.body = self.body, b""
        return body

    async def flow(self, take: Take) -> None:
        """Leave all of it to `read`."""

    def close(self) -> None:
        self.body = b""


class StreamResponse:
    """One stream in the common form, made of the streams of one or several calls."""

    status = 200
    stream = True

    def __init__(
        self, exchange: EngineExchange, replies: Sequence[UpstreamResponse], late: Sequence[EngineCall], send: _Send
    ) -> None:
        """`late`: the calls after those of `replies`. Each is sent when a stream has ended."""
        self.headers: Headers = [
            *(pair for pair in replies[0].headers if pair[0].lower() not in _OF_THE_BODY),
            _EVENTS,
        ]
        self._exchange = exchange
        self._replies = replies
        self._late = enumerate(late, len(replies))
        self._send = send
        self._left = len(replies) + len(late)
        self._splitters = [EventSplitter() for _ in range(self._left)]
        self._pieces: asyncio.Queue[tuple[int, bytes] | UpstreamBrokenError] = asyncio.Queue(_READY)
        self._readers: list[asyncio.Task[None]] = []

    async def read(self) -> bytes:
        """Return the next events, empty at the end. Raises UpstreamBrokenError."""
        while self._left:
            number, piece = await self._next()
            if not piece:
                self._left -= 1
            if events := self._translated(number, piece):
                return events
        return b""

    async def flow(self, take: Take) -> None:
        """Hand on the events of a single call as they come. Raises UpstreamBrokenError."""
        if len(self._splitters) > 1 or not self._left:
            return

        def translated(piece: bytes) -> bool:
            events = self._translated(0, piece)
            return (take(events) if events else True) and bool(self._left)

        await self._replies[0].flow(translated)

    def close(self) -> None:
        for reader in self._readers:
            reader.cancel()
        for reply in self._replies:
            reply.close()

    def _translated(self, number: int, piece: bytes) -> bytes:
        try:
            return self._events(number, piece)
        except UntranslatableError as error:
            self.close()
            raise UpstreamBrokenError(f"its stream cannot be read: {error}") from error

    def _events(self, number: int, piece: bytes) -> bytes:
        splitter, out = self._splitters[number], []
        for event in splitter.feed(piece):
            data = event_data(event)
            if data is not None:
                out.append(self._exchange.event(number, data))
            if self._exchange.over:
                self._left = 0
                self.close()
                return b"".join((*out, self._exchange.end()))
        if not piece:
            if (rest := splitter.flush()).strip():
                raise UntranslatableError(f"it ends in the middle of an event, after {rest[-40:]!r}")
            if not self._left:
                out.append(self._exchange.end())
        return b"".join(out)

    async def _next(self) -> tuple[int, bytes]:
        if len(self._splitters) == 1:
            return 0, await self._replies[0].read()
        if not self._readers:
            self._readers = [asyncio.create_task(self._read_streams(*one)) for one in enumerate(self._replies)]
        found = await self._pieces.get()
        if isinstance(found, UpstreamBrokenError):
            self.close()
            raise found
        return found

    async def _read_streams(self, number: int, reply: UpstreamResponse) -> None:
        """Read the stream of a call, and then those of late calls, one after the other."""
        with suppress(asyncio.CancelledError):
            try:
                await self._read_all(number, reply)
                for later, call in self._late:
                    with closing(await self._send(call, late=True)) as answer:
                        await self._read_all(later, answer)
            except UpstreamFailure as error:
                await self._pieces.put(UpstreamBrokenError(str(error)))

    async def _read_all(self, number: int, reply: UpstreamResponse) -> None:
        if reply.status != 200:  # the client has a part of its stream already
            error = (await _read(reply)).body
            await self._pieces.put((number, b"data: %b\n\n" % b" ".join(error.splitlines())))
        while piece := await reply.read():
            await self._pieces.put((number, piece))
        await self._pieces.put((number, b""))
