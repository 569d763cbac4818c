"""The server: uvicorn around the application, its socket, and its graceful shutdown."""

from __future__ import annotations

import gc
import logging
import math
import socket
import sys
from types import FrameType
from typing import Protocol

import uvicorn
from starlette.types import Receive, Scope, Send

from router.config.server import ServerConfig
from router.errors import BadRequestError
from router.serving.connection import Limits, limited_by
from router.serving.descriptors import connections_for, raise_limit

logger = logging.getLogger(__name__)

BACKLOG = 2048

CANNOT_START = 2
"""The exit code of an application that could not start, as for a bad configuration."""

GC_THRESHOLDS = (20_000, 20, 50)
"""New containers before a collection of the youngest generation, then collections of one before one of the next."""


class DrainingApp(Protocol):
    """An ASGI application with a notice that the server begins to stop."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    def start_draining(self) -> None:
        """Answer that nothing new should come. Called in a signal handler."""


def bind(config: ServerConfig) -> socket.socket:
    """Return the listening socket. Raise BadRequestError if the address is not available."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host, config.port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise BadRequestError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror or error} (--host, --port; port 0 takes a free one)"
        ) from error


def serve(app: DrainingApp, config: ServerConfig, listener: socket.socket) -> int:
    """Serve until SIGTERM or SIGINT, finish the requests in flight, and return the exit code."""
    server = _DrainingServer(app, config)
    server.run(sockets=[listener])
    return 1 if server.force_exit else 0


def _limits(config: ServerConfig) -> Limits:
    possible = connections_for(raise_limit())
    most = possible if config.max_connections is None else config.max_connections
    if most > possible:
        logger.warning(
            "--max-connections is %d: open files are enough for %d, and one to a worker each", most, possible
        )
    return Limits(max_header_bytes=config.max_header_bytes, max_connections=most)


def _spare_the_collector() -> None:
    """Exempt what is loaded now from garbage collection, and collect less often. A start may have switched it off.

    The collector walks all containers to find unreachable cycles. Here nearly all containers are libraries and remembered
    tokens: with the default thresholds it took a fifth of the CPU, and a third of the time of the slowest replies.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    gc.enable()


class _DrainingServer(uvicorn.Server):
    """Drains at the first signal, stops at the second. After draining, the exit code is 0 and not the signal's."""

    def __init__(self, app: DrainingApp, config: ServerConfig) -> None:
        self._app = app
        self._grace = config.shutdown_grace
        super().__init__(
            uvicorn.Config(
                app,
                loop="auto" if sys.platform == "win32" else "uvloop",
                http=limited_by(_limits(config)),
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

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except SystemExit:
            # uvicorn's way to end where the application could not start. The log says why.
            sys.exit(CANNOT_START)
        _spare_the_collector()
        for listener in sockets or ():
            host, port = listener.getsockname()[:2]
            logger.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        logger.info("stopping: %d requests in flight have %g s to finish", len(self.server_state.tasks), self._grace)
        await super().shutdown(sockets)
        logger.info("stopped")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Set flags and do nothing else: this runs in a signal handler."""
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True
        self._app.start_draining()
