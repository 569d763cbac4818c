"""Who may: the `--api-key` check in front of everything."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from router.asgi import header
from router.errors import RouterError

FREE_PATHS = frozenset({"/liveness", "/readiness", "/health"})


class UnauthorizedError(RouterError):
    """No key, or a wrong one."""

    status = 401
    type = "unauthorized"


class ApiKeyGuard:
    """Lets a request in if it carries one of the keys as `Authorization: Bearer`."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises UnauthorizedError."""
        if scope["type"] != "lifespan" and scope["path"] not in FREE_PATHS and not self._allows(scope):
            raise UnauthorizedError(
                "this router needs a key: Authorization: Bearer KEY", headers=(("www-authenticate", "Bearer"),)
            )
        await self._app(scope, receive, send)

    def _allows(self, scope: Scope) -> bool:
        scheme, _, given = (header(scope, b"authorization") or "").partition(" ")
        if scheme.lower() != "bearer":
            return False
        key = given.strip().encode("latin-1")
        # All keys are compared, and each in constant time: how long it takes tells nothing about them.
        return sum(hmac.compare_digest(key, known) for known in self._keys) > 0
