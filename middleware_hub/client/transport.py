"""How requests travel: addresses, headers and retries, in the event loops of the caller or in a thread that has its own loop.

The HTTP library is aiohttp, also for the blocking client. httpx can do both by itself, but its pool checks all connections for
each request: with 150 conversations at once a request took 55 ms of processor time.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import random
import selectors
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self, TypedDict, TypeVar, Unpack

import aiohttp
import msgspec
from aiohttp.connector import Connection
from aiohttp.tracing import Trace

from middleware_hub.client.errors import IncompleteStreamError, InconsistentAnswerError, UnreachableError, refused
from middleware_hub.client.operations import Operation, check_options
from middleware_hub.client.wire import (
    REFUSED,
    SAVED,
    ClientAnswer,
    ClientCall,
    Piece,
    Reply,
    Retries,
    may_go_again,
    read_json,
    read_reply,
)

BROKEN = (aiohttp.ClientError, OSError, TimeoutError)
"""The errors of aiohttp if a connection cannot be made, or breaks."""
_NEVER_SENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
_COMMENT = b": x-radix-saved:"
_dice = random.SystemRandom()
"""Not the generator of Python's `random`: environments seed that one for each rollout, and draw their games from it."""
T = TypeVar("T")


class ClientOptions(TypedDict, total=False):
    """How a client talks to its routers.

    Attributes:
        api_key: one of the router's keys; by default that in the variable `TITO_API_KEY`, if there is one.
        namespace: `x-radix-namespace`: keeps texts apart, for example an evaluation's.
        retries: how often a request is sent again, if that is allowed.
        connect_timeout: seconds until a router that does not answer at all counts as unreachable. Nothing else has a time limit
            here: a generation takes as long as it takes, and the router has limits.
    """

    api_key: str | None
    namespace: str | None
    retries: Retries | None
    connect_timeout: float


class Sending:
    """The base of both clients: the routers' addresses, the headers, and the decision whether a request is sent again.

    Args:
        urls: of one router, or of several that share a store. The first is asked until it cannot be reached or refuses to take
            requests, then the next one, and so on in a circle.
        options: see `ClientOptions`.
    """

    def __init__(self, urls: str | Sequence[str], **options: Unpack[ClientOptions]) -> None:
        check_options(options, ClientOptions)
        self.urls = tuple(url.strip().rstrip("/") for url in ([urls] if isinstance(urls, str) else urls))
        if not self.urls or not all(url.startswith(("http://", "https://")) for url in self.urls):
            raise ValueError(f"a router's address begins with http:// or https://, not {urls!r}")
        self.retries = options.get("retries") or Retries()
        self._at = 0
        key = options.get("api_key") or os.environ.get("TITO_API_KEY")
        self._headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        if namespace := options.get("namespace"):
            self._headers["x-radix-namespace"] = namespace
        self._connect_timeout = options.get("connect_timeout", 10.0)

    @property
    def url(self) -> str:
        """Return the address that is asked now."""
        return self.urls[self._at]

    def _request(self, call: ClientCall) -> dict[str, Any]:
        headers = {**self._headers, **call.headers}
        return {"method": call.method, "url": self.url + call.path, "data": call.content(), "headers": headers}

    def go_on(
        self,
        call: ClientCall,
        attempt: int,
        asked: str,
        status: int | None,
        error: Exception | None,
        least: float = 0.0,
    ) -> float | None:
        """Decide what follows a failure: return the seconds to wait before the next attempt, or None if there is none.

        Args:
            asked: the address that failed. Of many requests that fail there at once, the first one goes on to the next
                address, and the others follow: if each moved on by one, they would come back to the failed address.
            status: of the answer; None if no answer came.
            least: the seconds that routers have asked to wait since the last wait.

        Raises UnreachableError for an exception without a further attempt.
        """
        if status is not None:
            harmless = may_go_again(call, status)
        else:
            harmless = call.again or isinstance(error, _NEVER_SENT) or (call.samples and self.retries.resample)
        if (error is not None or status in REFUSED) and asked == self.url:
            self._at = (self._at + 1) % len(self.urls)
        if harmless and attempt < self.retries.attempts:
            # Try every router once before a wait.
            rounds = attempt // len(self.urls)
            return 0.0 if not rounds else _spread(self.retries.wait(rounds, least))
        if error is None:
            return None
        raise self._unreachable(call, attempt, error) from error

    def _unreachable(self, call: ClientCall, attempt: int, error: Exception) -> UnreachableError:
        where = ", ".join(self.urls)
        if isinstance(error, _NEVER_SENT):
            return UnreachableError(
                f"no router answers at {where} after {attempt} attempts ({str(error) or error!r}): is it running, and does "
                "--host let this machine in?"
            )
        broke = f"the connection broke before {call.method} {call.path} was answered ({error!r})"
        if call.again or not call.samples or self.retries.resample:
            return UnreachableError(f"{broke}; attempts: {attempt}")
        return UnreachableError(
            f"{broke}. A reply may have been sampled, so the client did not repeat the request: send it again to sample "
            "another reply"
        )


class _Connector(aiohttp.TCPConnector):
    """Closes a kept connection on which bytes came while no request was under way.

    aiohttp would take them for the answer to the next request. A load balancer in front of the routers sends them: a 408, when
    nothing was asked for a while.
    """

    async def connect(
        self, req: aiohttp.ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> Connection:
        while True:
            found = await super().connect(req, traces, timeout)
            if found.protocol is None or not found.protocol.should_close:
                return found
            found.close()


class AsyncTransport(Sending):
    """Sends requests from one event loop, or from several. See `Sending` for the arguments."""

    def __init__(self, urls: str | Sequence[str], **options: Unpack[ClientOptions]) -> None:
        super().__init__(urls, **options)
        # By event loop: trainers make new loops.
        self._sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}
        self._keepers: dict[asyncio.AbstractEventLoop, AsyncGenerator[aiohttp.ClientSession, None]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections of the running loop."""
        await self._end(asyncio.get_running_loop())

    async def _session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        found = self._sessions.get(loop)
        if found is None:
            keeper = self._keepers[loop] = self._kept(loop)
            found = await anext(keeper)
            for other in [one for one in tuple(self._keepers) if one.is_closed()]:  # without having been shut down
                await self._end(other)
        return found

    async def _end(self, loop: asyncio.AbstractEventLoop) -> None:
        keeper = self._keepers.pop(loop, None)
        if keeper is not None:
            await keeper.aclose()

    async def _kept(self, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[aiohttp.ClientSession, None]:
        """Yield a session. A loop that is shut down closes its generators, and so the session: trainers run many loops."""
        # No limits by the library itself. An idle connection is closed here before the router closes it.
        session = self._sessions[loop] = aiohttp.ClientSession(
            connector=_Connector(limit=0, keepalive_timeout=30.0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        try:
            yield session
        finally:
            self._sessions.pop(loop, None)
            self._keepers.pop(loop, None)
            await session.close()

    async def run(self, operation: Operation[T]) -> T:
        """Send a request, again if that is harmless, and return what its answer says."""
        async with self._sent(operation.call, whole=True) as found:
            return operation.read(ClientAnswer(found.status, _lower(found), await found.read()))

    @asynccontextmanager
    async def _sent(self, call: ClientCall, *, whole: bool = False) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send until there is an answer that counts; `whole`: with all of its body, which is otherwise still to be read."""
        attempt, least = 0, 0.0
        while True:
            attempt += 1
            asked = self.url
            wait: float | None
            try:
                found = await (await self._session()).request(**self._request(call), allow_redirects=False)
                if whole:
                    await found.read()
            except BROKEN as error:
                wait = self.go_on(call, attempt, asked, None, error, least)
            else:
                least = max(least, _retry_after(found))
                wait = self.go_on(call, attempt, asked, found.status, None, least) if found.status >= 400 else None
                if wait is None:
                    break
                found.close()
            least = 0.0 if wait else least
            await asyncio.sleep(wait or 0.0)
        try:
            yield found
        finally:
            found.release() if found.content.is_eof() else found.close()

    async def pieces(self, call: ClientCall) -> AsyncGenerator[Piece, None]:
        """Yield the pieces of a stream."""
        async with self._sent(call) as found:
            if found.status != 200:
                read_json(call, ClientAnswer(found.status, _lower(found), await found.read()))
            reader, lines = StreamReader(_lower(found)), Lines()
            try:
                async for chunk in found.content.iter_any():
                    new = "".join([reader.feed(line) for line in lines.feed(chunk)])
                    if reader.done:
                        yield Piece(new, reader.reply())
                        return
                    if new:
                        yield Piece(new, None)
            except BROKEN as error:
                raise _broken_stream() from error
        raise _broken_stream()


def _retry_after(answer: aiohttp.ClientResponse) -> float:
    """Return the seconds that an answer asks to wait. A date, which no router and no load balancer sends, counts as 0."""
    said = answer.headers.get("retry-after", "")
    return float(said) if said.isascii() and said.isdecimal() else 0.0


def _spread(seconds: float) -> float:
    """Return these seconds, or up to half as much again: clients refused at the same time do not return at the same time."""
    return seconds * _dice.uniform(1.0, 1.5)


def _broken_stream() -> IncompleteStreamError:
    return IncompleteStreamError(
        "the stream ended before its last event: what came is recorded, and a text that goes on from it continues its tokens"
    )


def _lower(found: aiohttp.ClientResponse) -> dict[str, str]:
    return {name.lower(): value for name, value in found.headers.items()}


class StreamReader:
    """Reads one stream, in any of the forms that workers send it in."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        from router.engines.form.stream import StreamedReply  # it needs numpy, which only streams load

        self._headers = {
            name: value for name, value in headers.items() if name != SAVED
        }  # a comment says it at the end
        self._reply = StreamedReply(added=[])

    @property
    def done(self) -> bool:
        """Return whether the last event has come."""
        return self._reply.done

    def feed(self, line: bytes) -> str:
        """Take a line; return what it adds to the text. Raises RefusedError for an error in the place of an event."""
        if line.startswith(_COMMENT):
            self._headers[SAVED] = line[len(_COMMENT) :].strip().decode("latin-1")
        if not line.startswith(b"data:"):
            return ""
        self._reply.feed(line[5:].strip())
        if self._reply.error is not None:
            try:
                error = msgspec.json.decode(self._reply.error)
            except msgspec.DecodeError:
                error = {"message": self._reply.error}
            raise refused(502, error if isinstance(error, dict) else {"message": str(error)})
        added = self._reply.added
        assert added is not None
        pieces = [msgspec.json.decode(piece, type=str) for piece in added]
        added.clear()
        return "".join(pieces)

    def reply(self) -> Reply:
        """Return the whole reply, when the stream is over. Raises InconsistentAnswerError."""
        found = self._reply.reply()
        if found is None:
            raise InconsistentAnswerError("the stream ended without an event")
        meta = {name: msgspec.json.decode(raw) for name, raw in self._reply.last_meta.items()}
        if self._reply.logprobs:
            meta["output_token_logprobs"] = list(self._reply.logprobs)
        return read_reply({"text": found.text, "output_ids": list(self._reply.ids), "meta_info": meta}, self._headers)


class Lines:
    """Cuts bytes into lines, at line feeds only: JSON may hold any other character that Unicode calls a line's end."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, chunk: bytes) -> Sequence[bytes]:
        """Take bytes; return the lines that they complete."""
        *lines, self._held = (self._held + chunk).split(b"\n")
        return lines


class Transport:
    """Sends requests, and waits for each answer. Any number of threads may share it.

    It has its own thread: make the client after a `fork`, not before it. What is still open when Python ends is closed then.
    See `Sending` for the arguments.
    """

    def __init__(self, urls: str | Sequence[str], **options: Unpack[ClientOptions]) -> None:
        self._transport = AsyncTransport(urls, **options)
        self._closed = False
        self._beginning = threading.Lock()
        self._loop = _loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tito-client", daemon=True)
        self._thread.start()
        # A client that nobody closes leaves no thread behind. At the end of Python, see below.
        self._dropped = weakref.finalize(self, _end_thread, self._loop, self._transport)
        self._dropped.atexit = False
        _open.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections, and end the thread."""
        _open.discard(self)
        self._dropped.detach()
        if not self._thread.is_alive():  # closed already, or this is a fork
            return
        with self._beginning:
            closed, self._closed = self._closed, True
        if not closed:
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _end(self) -> None:
        """End what other threads wait for: for a loop that has stopped they would wait for ever."""
        waited_for = asyncio.all_tasks() - {asyncio.current_task()}
        for task in waited_for:
            task.cancel()
        await asyncio.gather(*waited_for, return_exceptions=True)
        await asyncio.get_running_loop().shutdown_asyncgens()
        await self._transport.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        left, begun = threading.Event(), list[asyncio.Task[Any] | None]()

        async def watched() -> T:
            begun.append(asyncio.current_task())
            if left.is_set():
                work.close()
                raise CancelledError
            return await work

        def end() -> None:
            for task in begun:
                if task is not None:
                    task.cancel()

        try:
            return self._begin(work, watched()).result()
        except CancelledError:
            raise RuntimeError("this client was closed while a request was under way") from None
        except BaseException:  # also Ctrl-C, at any moment: what is under way ends, and its worker stops
            left.set()
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(end)
            raise

    def _begin(self, work: Coroutine[Any, Any, T], watched: Coroutine[Any, Any, T]) -> Future[T]:
        if self._thread.is_alive():
            with self._beginning:  # nothing begins behind `_end`
                if not self._closed:
                    return asyncio.run_coroutine_threadsafe(watched, self._loop)
        watched.close()
        work.close()
        raise RuntimeError(
            "this client was closed, or it was made before a fork and its thread is in the other process: make another client"
        )

    @property
    def url(self) -> str:
        """Return the address that is asked now."""
        return self._transport.url

    def run(self, operation: Operation[T]) -> T:
        """Send a request, again if that is harmless, and return what its answer says."""
        return self._wait(self._transport.run(operation))

    def pieces(self, call: ClientCall) -> Iterator[Piece]:
        """Yield the pieces of a stream."""
        pieces = self._transport.pieces(call)
        try:
            while (piece := self._wait(_next(pieces))) is not None:
                yield piece
        finally:
            self._wait(pieces.aclose())


def _loop() -> asyncio.AbstractEventLoop:
    """Return a loop that a fork does not share: a file that a child closes would be gone from an epoll of its parent."""
    if hasattr(selectors, "PollSelector"):
        return asyncio.SelectorEventLoop(selectors.PollSelector())
    return asyncio.new_event_loop()


def _end_thread(loop: asyncio.AbstractEventLoop, client: AsyncTransport) -> None:
    """Close the connections of a client that was dropped, and end its thread."""

    async def end() -> None:
        await client.close()
        loop.stop()

    loop.call_soon_threadsafe(lambda: loop.create_task(end()))


async def _next(pieces: Any) -> Piece | None:
    return await anext(pieces, None)


_open: weakref.WeakSet[Transport] = weakref.WeakSet()


@atexit.register
def _close_what_is_open() -> None:
    for client in list(_open):
        client.close()
