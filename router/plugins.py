"""Middlewares: their contract, their context, and how a dotted path is loaded."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp, Receive, Scope, Send

from router.auth.session_keys import SessionKeys
from router.config import RouterConfig
from router.engines.engine import Engine
from router.engines.sglang.engine import SGLANG
from router.errors import BadRequestError
from router.generate.scorers import Scorers
from router.observability.tracing import Tracer
from router.peers.peers import Peers
from router.proxy.generate_call import Backend
from router.workers.fleet_version import FleetVersion
from router.workers.worker import WorkerCheck


@dataclass(frozen=True)
class MiddlewareContext:
    """What the router gives to each middleware.

    Attributes:
        config: the whole configuration.
        registry: for instruments, which then show up in GET /metrics.
        tracer: for spans of the work on a request; None without `--enable-trace`.
        shared: what several middlewares of one application share, by its type.
        worker_checks: a middleware adds what each worker is to be asked.
        peers: the other routers. A middleware with a memory that they share gives it a channel (`Peers.join`), which has to be
            usable during the lifespan of the application inside.
        version: the weight version of the fleet. A middleware that reads replies tells it what they show.
        backend: generates at the workers: what a middleware that stands inside of all others calls in place of the application.
        engine: returns the engine that the workers run.
        session_keys: what the keys of sessions need. A middleware that has sessions says so there.
        scorers: models that only score; None where there are none.
        stopping: returns whether the router is about to stop. Requests that only wait for something are then to be answered.
    """

    config: RouterConfig
    registry: CollectorRegistry
    tracer: Tracer | None = None
    shared: dict[type, object] = field(default_factory=dict)
    worker_checks: list[WorkerCheck] = field(default_factory=list)
    peers: Peers | None = None
    version: FleetVersion | None = None
    backend: Backend | None = None
    engine: Callable[[], Engine] = lambda: SGLANG
    session_keys: SessionKeys = field(default_factory=SessionKeys)
    scorers: Scorers | None = None
    stopping: Callable[[], bool] = lambda: False


class Middleware(Protocol):
    """A pure ASGI application around another one.

    It passes on requests that it does not serve (lifespan events too), holds no message back longer than necessary, and may
    raise a RouterError as long as it has not sent `http.response.start`. From the application inside it gets
    one `http.response.start` and then `http.response.body` messages as the worker sends them; UpstreamBrokenError when
    the worker broke in between, ClientDisconnectedError when the client left.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""


class MiddlewareFactory(Protocol):
    """The class that `--middleware pkg.mod:Class` names."""

    def __call__(self, app: ASGIApp, context: MiddlewareContext) -> Middleware:
        """Wrap `app`. Runs once, before the server starts and outside of any event loop."""


def in_order(paths: Sequence[str]) -> list[MiddlewareFactory]:
    """Return the classes at these paths, the outermost first: in the order given, but those that are `innermost` last.

    A middleware that generates by `MiddlewareContext.backend` passes by all that stands inside of it.
    """
    return sorted(map(load, paths), key=lambda one: bool(getattr(one, "innermost", False)))


def load(path: str) -> MiddlewareFactory:
    """Return the class at `pkg.mod:Class`. Raises BadRequestError that says which part of the path is wrong."""
    module_name, _, name = path.partition(":")
    if not module_name or not name or module_name.startswith("."):
        raise BadRequestError(f"--middleware {path!r} is not of the form pkg.mod:Class")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise BadRequestError(f"--middleware {path}: cannot import {module_name}: {error}") from error
    factory = getattr(module, name, None)
    if factory is None:
        raise BadRequestError(f"--middleware {path}: {module_name} has no {name}")
    if not isinstance(factory, type):
        raise BadRequestError(f"--middleware {path}: {name} is not a class")
    return cast(MiddlewareFactory, factory)
