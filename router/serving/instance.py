"""Detects a router that is among its own workers, before a request goes round in circles.

A new worker is probed with the id of this process in a header. If the probe comes back to this process, by any way, the
"worker" is this router. Names and addresses do not show that: one host has too many of them.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable

from starlette.types import ASGIApp, Receive, Scope, Send

from router.errors import LoopError
from router.http.headers import HeaderList
from router.http.responses import send_error

INSTANCE = b"x-tito-router-instance"


class Instance:
    """The id of this router, which goes along with probes. Processes that share a port share it, too."""

    def __init__(self, name: bytes | None = None) -> None:
        self.headers: HeaderList = [(INSTANCE, secrets.token_hex(16).encode() if name is None else name)]
        """For a probe of a worker."""


class LoopGuard:
    """Refuses probes of this process. It stands in front of the check of keys, because probes carry none."""

    def __init__(self, app: ASGIApp, instance: Instance) -> None:
        self._app = app
        self._mark = instance.headers[0]

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] == "http" and self._mark in scope["headers"]:
            return send_error(send, LoopError("this is the router that asks"))
        return self._app(scope, receive, send)
