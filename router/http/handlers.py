"""Handlers of requests, by path and method."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.types import Receive, Scope, Send

from router.errors import MethodNotAllowedError

Handler = Callable[[Scope, Receive, Send], Awaitable[None]]


class ByMethod:
    """One path, a handler for each method. A class, because Starlette treats a function as an endpoint of its own form."""

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self._handlers = handlers

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serve one request. Raises MethodNotAllowedError."""
        return self.handler(scope)(scope, receive, send)

    def handler(self, scope: Scope) -> Handler:
        """Return the handler for the method of a request. Raises MethodNotAllowedError with the methods that there are."""
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        handler = self._handlers.get(method)
        if handler is None:
            allowed = ", ".join(self._handlers)
            raise MethodNotAllowedError(f"{scope['path']} takes {allowed}", headers=(("allow", allowed),))
        return handler
