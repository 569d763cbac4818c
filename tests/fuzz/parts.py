"""What an application is made of, found by walking through it: so nothing has to be listed that could be forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from starlette.routing import Route

from middleware_hub.radix.node import every_node
from middleware_hub.radix.tree import RadixTree
from middleware_hub.spans.chain import TokenSpan, links
from router.app import RouterApp
from router.http.handlers import ByMethod

_OURS = ("router.", "middleware_hub.", "starlette.routing")
T = TypeVar("T")


def parts(app: RouterApp) -> Iterator[Any]:
    """Every object of this project's that belongs to an application."""
    seen, waiting = {id(app)}, [app]
    while waiting:
        part = waiting.pop()
        yield part
        for value in _held(part):
            for one in (value, getattr(value, "__self__", None)):
                if type(one).__module__.startswith(_OURS) and id(one) not in seen:
                    seen.add(id(one))
                    waiting.append(one)


def only(app: RouterApp, kind: type[T]) -> T:
    """The one part of a kind."""
    (found,) = (part for part in parts(app) if isinstance(part, kind))
    return found


def routes(app: RouterApp) -> dict[str, tuple[str, ...]]:
    """Every path with a handler of its own, and its methods; all of them where the handler itself looks at that."""
    found: dict[str, tuple[str, ...]] = {}
    for part in parts(app):
        if isinstance(part, Route):
            found[part.path] = _methods(part.app)
        for table in vars(part).values() if hasattr(part, "__dict__") else ():
            if isinstance(table, dict) and any(isinstance(handler, ByMethod) for handler in table.values()):
                found |= {path: found.get(path) or _methods(handler) for path, handler in table.items()}
    return found


def _methods(handler: Any) -> tuple[str, ...]:
    return tuple(handler.handlers) if isinstance(handler, ByMethod) else ("POST",)


def _held(part: Any) -> Iterator[Any]:
    values = list(vars(part).values()) if hasattr(part, "__dict__") else []
    for value in values:
        yield value
        if isinstance(value, list | tuple | set):
            yield from value
        elif isinstance(value, dict):
            yield from value.values()


def pins(tree: RadixTree) -> int:
    """How many holds on chains there are beside those of what is recorded: none, when no request is in flight."""
    spans: set[TokenSpan] = set()
    generations = 0
    for node, _ in every_node(tree.roots.values()):
        for generation in node.generations():
            generations += 1
            for span, _ in links(generation.span, len(generation.span)):
                if span in spans:
                    break
                spans.add(span)
    expected = generations + sum(span.parent is not None for span in spans)
    return sum(span.users for span in spans) - expected + tree.stats.spans - len(spans)
