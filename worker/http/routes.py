"""Routes of a worker, whatever its engine: which handler answers a path, and the routes that both interfaces have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from worker.http.exchange import Handler, HttpExchange

GET, POST = ("GET",), ("POST",)
BOTH = ("GET", "POST")
ANY = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD")

Routes = Mapping[str, tuple[tuple[str, ...], Handler]]
"""The methods that a path takes, and its handler."""


async def dispatch(exchange: HttpExchange, routes: Routes) -> None:
    """Let the handler of its path answer a request; without one the answer is 404, or 405 for another method."""
    methods, handler = routes.get(exchange.path, ((), not_found))
    if not methods:
        await not_found(exchange)
    elif exchange.method not in methods:
        allow = (b"allow", ", ".join(methods).encode())
        await exchange.answer(405, {"detail": "Method Not Allowed"}, more=[allow])
    else:
        await handler(exchange)


async def not_found(exchange: HttpExchange) -> None:
    """Answer 404, as both engines do."""
    await exchange.answer(404, {"detail": "Not Found"})


async def echo(exchange: HttpExchange) -> None:
    """Answer with the body. No engine does it: it shows what arrives of a request that a router passes through."""
    await exchange.answer(200, exchange.raw, exchange.headers.get("content-type", "application/octet-stream"))


def model_cards(
    name: str, path: str, adapters: Iterable[str], started: int, context_length: int, *, owner: str
) -> list[dict[str, Any]]:
    """Return the entries of a model and of its adapters in `/v1/models`.

    Args:
        name: by which the model is served.
        started: when the worker was, in seconds since 1970.
    """
    card = {"object": "model", "created": started, "owned_by": owner}
    return [
        {"id": name, **card, "root": path, "parent": None, "max_model_len": context_length},
        *({"id": one, **card, "root": one, "parent": name, "max_model_len": None} for one in adapters),
    ]
