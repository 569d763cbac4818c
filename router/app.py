"""`create_app(config)`: the one place where the parts are made and wired."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator

from prometheus_client import CollectorRegistry
from starlette.routing import Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router import plugins
from router.asgi import send_error
from router.config import RouterConfig
from router.errors import ClientDisconnectedError, RouterError, UpstreamError
from router.fleet import Fleet
from router.generations import Generations
from router.guard import ApiKeyGuard
from router.metrics import BROKEN, CLIENT_LEFT, RouterMetrics, WorkerCollector, route_class
from router.policies import create_policy
from router.proxy import Proxy
from router.routes import ControlRoutes, Lifecycle
from router.upstream import AiohttpUpstream, UpstreamBrokenError
from router.workers.health import Admission
from router.workers.pool import WorkerPool
from router.workers.worker import normalize_url

logger = logging.getLogger(__name__)


class RouterApp:
    """The ASGI application, and the little that its surroundings need to know of it."""

    def __init__(self, app: ASGIApp, pool: WorkerPool, registry: CollectorRegistry, lifecycle: Lifecycle) -> None:
        self._app = app
        self._lifecycle = lifecycle
        self.pool = pool
        self.registry = registry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection, or the lifespan."""
        await self._app(scope, receive, send)

    def start_draining(self) -> None:
        """From now on /readiness says no. Everything else goes on."""
        self._lifecycle.draining = True


def create_app(config: RouterConfig) -> RouterApp:
    """The router as configured. BadRequestError tells what is wrong with the configuration."""
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)
    pool = WorkerPool(create_policy(config.workers.policy))
    registry.register(WorkerCollector(pool.list))
    upstream = AiohttpUpstream(connect_timeout=config.workers.connect_timeout)
    admission = Admission(pool, upstream, probe_timeout=config.workers.probe_timeout)
    lifecycle = Lifecycle()
    fleet = Fleet(
        pool,
        upstream,
        max_body_bytes=config.server.max_body_bytes,
        forward_authorization=not config.server.api_keys,
    )
    urls = [normalize_url(url) for url in config.workers.urls]

    @contextlib.asynccontextmanager
    async def lifespan(_: object) -> AsyncIterator[None]:
        async with upstream:
            await admission.admit_all(urls)
            logger.info("%d of %d workers are routed to", len(pool.routable), len(urls))
            if not urls:
                logger.info("no workers yet: add them with POST /add_worker?url=http://HOST:PORT")
            yield
            admission.close()
            await fleet.close()

    innermost = Proxy(
        pool,
        upstream,
        metrics,
        max_body_bytes=config.server.max_body_bytes,
        forward_authorization=not config.server.api_keys,
    )
    generations = Generations(innermost, fleet, metrics, config.abort, max_body_bytes=config.server.max_body_bytes)
    control = ControlRoutes(pool, admission, registry, lifecycle)
    router = Router(
        [*control.routes(), *fleet.routes()], redirect_slashes=False, default=_HttpOnly(innermost), lifespan=lifespan
    )

    app: ASGIApp = _Dispatch(generations, router)
    context = plugins.MiddlewareContext(config=config, registry=registry)
    for path in reversed(config.middlewares):
        app = plugins.load(path)(app, context)
    if config.server.api_keys:
        app = ApiKeyGuard(app, config.server.api_keys)
    return RouterApp(ErrorBoundary(app, metrics), pool, registry, lifecycle)


class _Dispatch:
    """The generations, which are nearly everything, need not be compared with every route first."""

    def __init__(self, generations: ASGIApp, router: ASGIApp) -> None:
        self._generations = generations
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/generate":
            await self._generations(scope, receive, send)
        else:
            await self._router(scope, receive, send)


class _HttpOnly:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._app(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1003, "reason": "websockets are not proxied"})


class ErrorBoundary:
    """The outermost layer: errors become JSON here and nowhere else, and every request is counted.

    An error after the reply's head can no longer be answered. It is raised on into the server, which then breaks the
    connection off: the client must not take what it has for a whole reply.
    """

    def __init__(self, app: ASGIApp, metrics: RouterMetrics) -> None:
        self._app = app
        self._requests = metrics.requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection, or the lifespan."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status: int | None = None
        outcome: str | None = None

        async def noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting_status)
        except ClientDisconnectedError:
            logger.debug("%s %s: the client left", scope["method"], scope["path"])
            outcome = CLIENT_LEFT
        except Exception as error:
            if not isinstance(error, RouterError | UpstreamBrokenError):
                logger.exception("%s %s failed", scope["method"], scope["path"])
            if status is not None:
                outcome = BROKEN
                raise
            await send_error(noting_status, _answerable(error))
        finally:
            self._requests.labels(route_class(scope["path"]), outcome or str(status)).inc()


def _answerable(error: Exception) -> RouterError:
    if isinstance(error, RouterError):
        return error
    if isinstance(error, UpstreamBrokenError):
        return UpstreamError(str(error))
    return RouterError(f"internal error ({type(error).__name__}): the router's log has the details")
