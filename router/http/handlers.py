"""Handlers of requests, by path and method."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from starlette.types import Receive, Scope, Send

from router.errors import MethodNotAllowedError

Handler = Callable[[Scope, Receive, Send], Awaitable[None]]
T = TypeVar("T")


class ByMethod:
    """One path, a handler for each method. A class, because Starlette treats a function as an endpoint of its own form."""

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self.handlers = handlers

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serve one request. Raises MethodNotAllowedError."""
        return for_method(self.handlers, scope)(scope, receive, send)


def by_method(table: Mapping[str, Mapping[str, Handler]]) -> dict[str, ByMethod]:
    """Return a handler for each path of a table that has one for each method."""
    return {path: ByMethod(handlers) for path, handlers in table.items()}


def for_method(calls: Mapping[str, T], scope: Scope) -> T:
    """Return the call for the method of a request. Raises MethodNotAllowedError with the methods that there are."""
    call = calls.get("GET" if scope["method"] == "HEAD" else scope["method"])
    if call is None:
        allowed = ", ".join(calls)
        raise MethodNotAllowedError(f"{scope['path']} takes {allowed}", headers=(("allow", allowed),))
    return call
