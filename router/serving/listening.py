"""The listening socket."""

from __future__ import annotations

import os
import socket

from router.config.server import ServerConfig
from router.errors import BadRequestError

BACKLOG = 2048


def reserve(config: ServerConfig) -> socket.socket:
    """Return a socket that has the address and does not listen yet. Raise BadRequestError if the address is not available."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        found = socket.socket(family, proto=socket.IPPROTO_TCP)
        try:
            if os.name == "posix":  # elsewhere it would let two processes have one address
                found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            found.bind((config.host, config.port))
        except BaseException:
            found.close()
            raise
    except OSError as error:
        raise _unavailable(config, error) from error
    return found


def listen(reserved: socket.socket, config: ServerConfig) -> None:
    """Let clients connect. Raise BadRequestError if another process has begun to listen there in the meantime."""
    try:
        reserved.listen(BACKLOG)
    except OSError as error:
        reserved.close()
        raise _unavailable(config, error) from error


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _unavailable(config: ServerConfig, error: OSError) -> BadRequestError:
    return BadRequestError(
        f"cannot listen on {config.host}:{config.port}: {error.strerror or error} (--host, --port; port 0 takes a free one)"
    )
