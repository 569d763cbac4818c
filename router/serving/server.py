"""The server: uvicorn around the application, its socket, and its graceful shutdown."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, current_thread, main_thread
from types import FrameType
from typing import Any, Protocol

import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import HANDLED_SIGNALS

from router.config.server import ServerConfig
from router.errors import RouterError
from router.serving import large_pages
from router.serving.connection import Limits, limited_by
from router.serving.listener import SharedListener, url_of
from router.serving.signals import HURRY, is_hangup, stop_signals

logger = logging.getLogger(__name__)

CANNOT_START = 2
"""The exit code of an application that could not start, as for a bad configuration."""

STOP_SECONDS = 2.0
"""How long the end may take after a second signal."""

GC_THRESHOLDS = (20_000, 20, 50)
"""New containers before a collection of the youngest generation, then collections of one before one of the next."""

SWITCH_SECONDS = 0.0005
"""How long one of Python's threads may run while another one waits for its turn.

With CPython's 5 ms, a thread that gives up its turn more often than that, for a moment (numpy does), keeps it: who waits begins
to wait again each time. So a file of 200,000 tokens, made in a thread, held up the event loop for 100 ms; now it is 2.
"""


SPARE = 64
"""Descriptors for everything but connections: logs, the tokenizer's files, the listening socket."""

PLENTY = 1 << 20
"""Stands for a limit that is infinite or unknown."""


class DrainingApp(Protocol):
    """An ASGI application with a notice that the server begins to stop."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    @property
    def fault(self) -> RouterError | None:
        """Why the application's startup failed, if it has an error for that."""

    def start_draining(self) -> None:
        """Answer from now on that clients should send nothing new. Called in a signal handler."""


class ConnectionSource(Protocol):
    """Where connections come from, in place of a listening socket of the server's own."""

    def count(self, connections: int) -> None:
        """Note how many connections there are now."""

    def begin(self, connect: Callable[[], asyncio.Protocol]) -> None:
        """Take connections in the running loop from now on, or from some later moment; `connect` makes the protocol of one."""

    async def end(self) -> None:
        """Take the connections that wait, and no more."""


def serve(app: DrainingApp, config: ServerConfig, listener: socket.socket) -> int:
    """Serve until a signal, finish the requests in flight, and return the exit code. Raises the app's `fault`."""
    # Windows' event loop cannot wait for a listening socket of ours.
    alone = None if sys.platform == "win32" else SharedListener.alone(listener)
    server = _DrainingServer(app, config, alone)
    server.run(sockets=[listener])
    return 1 if server.force_exit else 0


def serve_from(source: ConnectionSource, app: DrainingApp, config: ServerConfig) -> int:
    """Serve as `serve` does, for the connections of a source. Only `HURRY` stops the server at once."""
    server = _DrainingServer(app, config, source, hurry=HURRY)
    server.run(sockets=[])
    return 1 if server.force_exit else 0


def raise_limit() -> int:
    """Raise the soft limit of open files, and so of connections, to the hard one. Return the limit in force."""
    if sys.platform == "win32":
        return PLENTY
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            logger.info("open files: the limit was %d, and is %s now", soft, _shown(hard, resource.RLIM_INFINITY))
            soft = hard
    except (OSError, ValueError) as error:  # some systems have a lower limit elsewhere
        logger.warning("open files: the limit stays at %d: %s", soft, error)
    return PLENTY if soft == resource.RLIM_INFINITY else soft


def connections_for(descriptors: int) -> int:
    """Return how many clients fit: each of them may need a connection to a worker, too."""
    return max(1, (descriptors - SPARE) // 2)


def _shown(limit: int, infinity: int) -> str:
    return "none" if limit == infinity else str(limit)


def _limits(config: ServerConfig, on_count: Callable[[int], None] | None) -> Limits:
    possible = connections_for(raise_limit())
    most = possible if config.max_connections is None else config.max_connections
    if most > possible:
        logger.warning(
            "--max-connections is %d: open files are enough for %d, and one to a worker each", most, possible
        )
    return Limits(
        max_header_bytes=config.max_header_bytes,
        max_connections=most,
        write_seconds=config.write_timeout,
        on_count=on_count,
    )


def _spare_the_collector() -> None:
    """Exempt all present objects from garbage collection, and collect less often. A start may have switched it off.

    The collector walks all containers to find unreachable cycles. Here nearly all containers are libraries and remembered
    tokens: with the default thresholds it took a fifth of the CPU, and a third of the time of the slowest replies.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    gc.enable()


if sys.platform == "win32":
    new_event_loop = asyncio.new_event_loop

else:
    import uvloop

    class _Loop(uvloop.Loop):
        async def getaddrinfo(
            self,
            host: Any,
            port: Any,
            *,
            family: int = 0,
            type: int = 0,
            proto: int = 0,
            flags: int = 0,
        ) -> list[Any]:
            """Look up a name in a thread. For an IP address no thread is needed.

            uvloop's `sock_connect` names no type, and then uvloop asks one of its four threads for an IP address, too. Names
            whose servers do not answer hold these threads, and no worker could be connected to meanwhile.
            """
            kind = type or socket.SOCK_STREAM
            return await super().getaddrinfo(host, port, family=family, type=kind, proto=proto, flags=flags)

    def new_event_loop() -> asyncio.AbstractEventLoop:
        """Return a new event loop of uvloop's."""
        return _Loop()


class _DrainingServer(uvicorn.Server):
    """Drains at the first signal, and stops at the second; see `signals`. After draining, the exit code is 0."""

    def __init__(
        self,
        app: DrainingApp,
        config: ServerConfig,
        source: ConnectionSource | None = None,
        *,
        hurry: int | None = None,
    ) -> None:
        """`hurry`: the only signal that stops at once; by default any second signal does, except SIGHUP."""
        self._app = app
        self._hurry = hurry
        self._source = source
        self._grace = config.shutdown_grace
        self._starting: asyncio.Task[None] | None = None
        self._pages: Event | None = None
        super().__init__(
            uvicorn.Config(
                app,
                loop="none",  # `run` makes it
                http=limited_by(_limits(config, None if source is None else source.count)),
                ws="none",
                interface="asgi3",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=config.idle_timeout,
                timeout_graceful_shutdown=math.ceil(config.shutdown_grace),
            )
        )

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve in an event loop of our own kind."""
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(self.serve(sockets))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._starting = asyncio.current_task()
        try:
            await super().startup(sockets if self._source is None else [])
        except asyncio.CancelledError:
            if not self.should_exit:
                raise
            logger.info("stopped before anything was served")
            sys.exit(0)
        except SystemExit:  # uvicorn's way to end where the application could not start
            if self._app.fault is not None:
                raise self._app.fault from None
            sys.exit(CANNOT_START)  # the log says why
        finally:
            self._starting = None
        _spare_the_collector()
        sys.setswitchinterval(SWITCH_SECONDS)
        self._pages = large_pages.use_later()
        if self._source is not None:
            self._source.begin(self._connection)
        for listener in sockets or ():
            logger.info("listening on %s", url_of(listener))

    def _connection(self) -> asyncio.Protocol:
        """Return the protocol of a new connection, as uvicorn makes it."""
        make: Callable[..., asyncio.Protocol] = self.config.http_protocol_class
        return make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._source is not None:
            await self._source.end()
        logger.info("stopping: %d requests in flight have %g s to finish", len(self.server_state.tasks), self._grace)
        if self._pages is not None:
            self._pages.set()
        await super().shutdown(sockets)
        if self.force_exit:
            await self._stop_now()
        for connection in list(self.server_state.connections):  # after a second signal, some are still open
            connection.transport.abort()
        logger.info("stopped")

    async def _stop_now(self) -> None:
        """End the requests in flight, and release everything, in a moment. uvicorn leaves both to the end of the event loop."""
        tasks = list(self.server_state.tasks)
        for task in tasks:
            task.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                await asyncio.gather(*tasks, return_exceptions=True)
                await self.lifespan.shutdown()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle SIGHUP and `hurry` as well, for which uvicorn has no handler."""
        with super().capture_signals():
            others: set[int] = set()
            if current_thread() is main_thread():
                others = {*stop_signals(), *([] if self._hurry is None else [self._hurry])} - set(HANDLED_SIGNALS)
            before = {number: signal.signal(number, self.handle_exit) for number in others}
            try:
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Set flags, and end a start that waits, as for a store. Nothing else: this runs in a signal handler."""
        if sig == self._hurry or (self._hurry is None and self.should_exit and not is_hangup(sig)):
            self.force_exit = True
        self.should_exit = True
        self._app.start_draining()
        if self._starting is not None:
            self._starting.get_loop().call_soon_threadsafe(self._stop_starting)

    def _stop_starting(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
