"""Replies to HTTP/1.0 clients, which know no chunks: a reply without a content-length ends with its connection.

    HTTP/1.1                          HTTP/1.0
    transfer-encoding: chunked        connection: close
    5 hello 0                         hello, and then the end

uvicorn writes chunks to every client. Only a connection that is reset shows such a client that a reply is not whole.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress
from typing import Any

from starlette.types import Message

_FRAMES = frozenset((b"content-length", b"transfer-encoding"))
_NO_LINGER = struct.pack("ii", 1, 0)
"""Without it, a connection that is aborted ends like any other."""


class _ResetByClose:
    """The transport of a connection that is reset when it is closed in the middle of a reply."""

    def __init__(self, transport: asyncio.Transport, cycle: Any) -> None:
        self._transport = transport
        self._cycle = cycle

    def close(self) -> None:
        if self._cycle.response_complete:
            self._transport.close()
            return
        with suppress(OSError):  # the client is gone already
            self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self._transport.abort()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def unframe(cycle: Any) -> None:
    """Have a reply written without chunks. `cycle` is uvicorn's `RequestResponseCycle`, before its application runs."""
    framed = cycle.send
    unframed = False

    async def send(message: Message) -> None:
        nonlocal unframed
        if message["type"] == "http.response.start":
            unframed = not any(name.lower() in _FRAMES for name, _ in message.get("headers", ()))
            if unframed:
                cycle.chunked_encoding = False
                cycle.transport = _ResetByClose(cycle.transport, cycle)
        elif unframed:
            cycle.expected_content_length = len(message.get("body", b""))  # uvicorn would compare it with a header
        await framed(message)

    cycle.send = send
