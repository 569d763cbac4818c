"""A router among its own workers, found out before a request goes round in circles.

A new worker is asked about itself with the id of this process in a header. Whichever way the question took, if it comes back
to this process, then the "worker" is this router. Names and addresses would not tell: there are too many of them for one host.
"""

from __future__ import annotations

import secrets

from starlette.types import ASGIApp, Receive, Scope, Send

from router.errors import RouterError
from router.http.asgi import HeaderList, send_error

INSTANCE = b"x-tito-router-instance"


class LoopError(RouterError):
    """A request of this process came back to it."""

    status = 508
    type = "loop"


class Instance:
    """What sets this process apart from all others: put onto the questions to new workers, and known again."""

    def __init__(self) -> None:
        self.headers: HeaderList = [(INSTANCE, secrets.token_hex(16).encode())]
        """For a question to a worker."""


class LoopGuard:
    """Stands in front of the check of keys, for the questions of this process carry none."""

    def __init__(self, app: ASGIApp, instance: Instance) -> None:
        self._app = app
        self._mark = instance.headers[0]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "http" and self._mark in scope["headers"]:
            await send_error(send, LoopError("this is the router that asks"))
        else:
            await self._app(scope, receive, send)


def loop_refusal(url: str, status: int) -> str | None:
    """Why a worker cannot be used that answers the question with this status; None if it is no loop."""
    if status != LoopError.status:
        return None
    return f"{url} leads back to this router: give the URL of a worker"
