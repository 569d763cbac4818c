"""The router's event loop: uvloop's, where there is one."""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Any

if sys.platform == "win32":

    def new_event_loop() -> asyncio.AbstractEventLoop:
        """Return a new event loop."""
        return asyncio.new_event_loop()

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
        """Return a new event loop."""
        return _Loop()
