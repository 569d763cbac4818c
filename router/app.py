"""`create_app(config)`: the one place that makes the parts and wires them. `run(config)` serves them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial

import prometheus_client
from prometheus_client import CollectorRegistry, ProcessCollector
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from router import plugins
from router.auth.cross_site import CrossSiteCheck
from router.auth.key_check import KeyCheck
from router.auth.keys import ApiKeys
from router.auth.session_key_check import SessionKeyCheck
from router.auth.session_keys import SessionKeys
from router.config import RouterConfig, ServerConfig, TraceConfig, WorkersConfig
from router.engines.engine import KnownWorker
from router.engines.table import engines, fleet_paths
from router.errors import BadRequestError
from router.generate.fleet import Fleet
from router.generate.fleet_calls import CallSender
from router.generate.generations import Generations
from router.generate.scorers import Scorers
from router.http.request_state import Requests
from router.http.upstream import AiohttpUpstream, Upstream
from router.kv_cache.salts import KvSalts
from router.kv_cache.watch import KvWatch
from router.observability.kv_metrics import KvCollector
from router.observability.logs import configure_logging
from router.observability.loop_lag import LoopLag
from router.observability.metrics import RouterMetrics, WorkerCollector
from router.observability.tracing import Tracer
from router.peers.peers import Peers, PeersCollector
from router.peers.presence import Presence
from router.policies import policies_of
from router.policies.base import FollowsCaches, HasMetrics, SharesHomes
from router.policies.snapshots import PolicySnapshots
from router.processes.joint_routes import JointRoutes, OtherProcesses
from router.processes.supervisor import supervise
from router.proxy.engine_upstream import EngineUpstream
from router.proxy.outbound import RequestReader
from router.proxy.proxy import Proxy
from router.routes import ControlRoutes, Lifecycle
from router.serving.entrance import Check, Entrance, Instance
from router.serving.listener import listen, reserve
from router.serving.server import serve
from router.workers.admission import Admission
from router.workers.allowed import AllowedWorkers
from router.workers.dns import WorkerDns
from router.workers.fleet_engine import FleetEngine, known_worker
from router.workers.health import HealthChecks
from router.workers.membership import FleetMembership
from router.workers.names import DESCRIPTIONS, WorkerNames
from router.workers.paired_pool import PairedPool
from router.workers.policy import ReadsPrompts
from router.workers.probe import Prober
from router.workers.queue import RequestQueue
from router.workers.roles import WorkerRoles
from router.workers.worker import WorkerCheck, WorkerRole, normalize_url

logger = logging.getLogger(__name__)


class RouterApp(Entrance):
    """The ASGI application: its entrance, and handles for a server and for tests."""

    def __init__(
        self,
        app: ASGIApp,
        checks: Sequence[Check],
        metrics: RouterMetrics,
        requests: Requests,
        *,
        body_timeout: float,
        tracer: Tracer | None,
        pool: PairedPool,
        registry: CollectorRegistry,
        lifecycle: Lifecycle,
    ) -> None:
        super().__init__(app, checks, metrics, requests, body_timeout=body_timeout, tracer=tracer)
        self._lifecycle = lifecycle
        self.pool = pool
        self.registry = registry

    def start_draining(self) -> None:
        """Answer /readiness with an error from now on. Everything else goes on."""
        self._lifecycle.draining = True


def create_app(
    config: RouterConfig,
    tracer: Tracer | None = None,
    shared: Mapping[type, object] | None = None,
    others: OtherProcesses | None = None,
) -> RouterApp:
    """Return the router as configured. Raises BadRequestError for a configuration that cannot work.

    Args:
        config: all of it.
        tracer: replaces the one that the configuration asks for. It ends with the application.
        shared: objects that the middlewares share, by type; given where several routers of one process share them, too.
        others: the other processes, where this is one of several (`--processes`).
    """
    keys = ApiKeys(config.server.api_keys, config.server.admin_keys)
    session_keys = SessionKeys(keys.owners)
    instance = Instance(None if others is None else others.instance)
    allowed = AllowedWorkers(config.workers.networks)
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)
    requests = Requests()
    tracer = create_tracer(config.trace) if tracer is None else tracer
    workers = config.workers
    policy, prefill_policy = policies_of(workers)
    pool = PairedPool(
        policy,
        prefill_policy,
        apart=workers.apart,
        health=workers.health,
        breaker=workers.breaker,
        max_inflight=workers.queue.max_inflight,
        max_inflight_per_worker=workers.queue.max_inflight_per_worker,
        on_breaker=metrics.breaker_moved,
    )
    queue = RequestQueue(pool, workers.queue, metrics.waited)
    registry.register(WorkerCollector(pool.list, queue))
    ProcessCollector(registry=registry)
    upstream = AiohttpUpstream(
        connect_timeout=workers.connect_timeout, permits=allowed.permits, max_reply=workers.reply_budget
    )
    translating = EngineUpstream(upstream, partial(known_worker, pool))
    table = engines(incremental_streams=workers.incremental_streams)
    engine = FleetEngine(pool, workers.engine, table, translating.speak)
    roles = WorkerRoles(pool, apart=workers.apart)
    for url, port in workers.prefill:
        roles.name(url, WorkerRole.PREFILL, port)
    for url in workers.decode:
        roles.name(url, WorkerRole.DECODE)
    prober = Prober(
        upstream,
        seconds=workers.health.timeout,
        headers=instance.headers,
        engines=table.values(),
        checked=lambda url, found: roles.checked(url, engine.checked(url, found)),
        ranks=None if workers.dp_ranks == "off" else {normalize_url(u): n for u, n in workers.given_ranks.items()},
        passes_keys=not keys,
    )
    worker_checks: list[WorkerCheck] = []
    checks = HealthChecks(pool, prober, workers.health, metrics.probed, worker_checks)
    # The caches that spare work are those of prefill workers, where these are apart.
    caching = prefill_policy if workers.apart else policy
    if others is not None and isinstance(caching, SharesHomes):
        caching.homes = others.homes
    kv_index = caching.index if isinstance(caching, FollowsCaches) else None
    kv_watch = KvWatch(pool, prober, kv_index, engines=table)
    if isinstance(caching, HasMetrics):
        registry.register(caching)
    if isinstance(caching, FollowsCaches):
        registry.register(KvCollector(kv_index, kv_watch.subscriptions, pool.list))
    peers = Peers(Presence(config.server.router_id, _url(config.server)))
    registry.register(PeersCollector(peers))
    admission = Admission(pool, prober, checks, allowed=allowed, patience=workers.probe_timeout)
    names = WorkerNames(partial(prober.description, paths=DESCRIPTIONS))
    membership = FleetMembership(pool, admission, peers, names, roles)
    lifecycle = Lifecycle()
    fleet = Fleet(
        pool,
        CallSender(translating, prober, seconds=workers.fleet_timeout),
        max_body_bytes=config.server.max_body_bytes,
        forward_authorization=not keys,
        peers=peers,
        paths=fleet_paths(),
    )
    peers.presence.version = lambda: pool.version
    peers.presence.load = lambda: {
        "inflight": len(fleet.in_flight),
        "queued": len(queue),
        "workers": len(pool.routable),
    }
    worker_dns = WorkerDns(membership, workers.dns, workers.dns_interval)
    urls = [normalize_url(url) for url in (*(url for url, _ in workers.prefill), *workers.decode, *workers.urls)]
    for url in urls:
        allowed.check_now(url)

    @contextlib.asynccontextmanager
    async def lifespan(_: object) -> AsyncIterator[None]:
        async with upstream, LoopLag(metrics), PolicySnapshots(caching), kv_watch:
            await peers.start()
            await fleet.begin()
            await membership.begin(urls)
            await worker_dns.begin()
            await peers.go_live()
            logger.info("%d of %d workers are routed to", len(pool.routable), max(len(urls), len(pool.list())))
            if not pool.list() and not workers.dns:
                logger.info("no workers yet: add them with POST /add_worker?url=http://HOST:PORT")
            yield
            worker_dns.close()
            await checks.close()
            await fleet.close()
            await peers.close()
        if tracer is not None:
            await asyncio.to_thread(tracer.close)

    innermost = Proxy(
        pool,
        queue,
        translating,
        RequestReader(
            max_body_bytes=config.server.max_body_bytes,
            forward_authorization=not keys,
            reads_prompts=isinstance(policy, ReadsPrompts) or isinstance(prefill_policy, ReadsPrompts),
            reads_ranks=workers.dp_ranks != "off",
        ),
        workers,
        metrics,
        tracer,
        recall=fleet.recall,
        abandon=fleet.abandon,
        legs_at_once=lambda: engine.spoken.native,
        on_broken=checks.trouble,
    )
    limit = config.server.max_body_bytes
    control = ControlRoutes(pool, admission, registry, lifecycle, requests, membership, max_body_bytes=limit)
    router = Router(
        [*control.routes(), *fleet.routes(lambda: engine.spoken.name, innermost)],
        redirect_slashes=False,
        default=_HttpOnly(innermost),
        lifespan=lifespan,
    )
    backend = Generations(
        innermost,
        router,
        fleet,
        metrics,
        config.abort,
        config.server,
        isolated=keys.several,
        salts=KvSalts(config.kv_salt, fleet.version, metrics.kv_salts.counts, followed=kv_index is not None),
    )
    context = plugins.MiddlewareContext(
        config=config,
        registry=registry,
        tracer=tracer,
        shared=dict(shared or {}),
        worker_checks=worker_checks,
        peers=peers,
        version=fleet.version,
        backend=backend,
        engine=lambda: engine.spoken,
        session_keys=session_keys,
        scorers=_scorers(upstream, workers) if workers.scorers else None,
        stopping=lambda: lifecycle.draining,
    )
    app: ASGIApp = backend
    for middleware in reversed(plugins.in_order(config.middlewares)):
        app = middleware(app, context)
    if config.inspector is not None:
        # The inspector stands behind all middlewares: other requests do not pass through it, and it finds what they share.
        control.inspector = plugins.load(config.inspector)(control.inspector, context)
    if others is not None:
        app = JointRoutes(app, others, registry)
    return RouterApp(
        app,
        (instance, *_checks_of_callers(keys, session_keys)),
        metrics,
        requests,
        body_timeout=config.server.body_timeout,
        tracer=tracer,
        pool=pool,
        registry=registry,
        lifecycle=lifecycle,
    )


def _checks_of_callers(keys: ApiKeys, session_keys: SessionKeys) -> Sequence[Check]:
    of_sessions, of_pages = SessionKeyCheck(session_keys), CrossSiteCheck(keys)
    return (of_sessions, KeyCheck(keys), of_pages) if keys else (of_sessions, of_pages)


def _scorers(upstream: Upstream, config: WorkersConfig) -> Scorers:
    vllm = EngineUpstream(upstream, lambda _: KnownWorker())
    vllm.speak(engines()["vllm"])
    ways: dict[str, tuple[Upstream, str]] = {}
    for name, url in config.scorer_urls.items():
        bare = url.removeprefix("vllm+")
        ways[name] = upstream if bare == url else vllm, bare
    return Scorers(ways, seconds=config.score_timeout)


def _url(config: ServerConfig) -> str | None:
    """Return where a router listens; None if it takes any port."""
    if not config.port:
        return None
    host = socket.gethostname() if config.host in ("", "0.0.0.0", "::") else config.host
    return f"http://{f'[{host}]' if ':' in host else host}:{config.port}"


def run(config: RouterConfig) -> int:
    """Serve the router until it is stopped, and return the exit code. Raise a RouterError if it cannot start."""
    if config.server.processes > 1:
        return supervise(config)
    prepare_process(config.server)
    with reserve(config.server) as listener:  # before the tokenizer is loaded: an address in use is reported at once
        app = create_app(config)
        listen(listener, config.server)
        return serve(app, config.server, listener)


def prepare_process(config: ServerConfig, number: int | None = None) -> None:
    """Make the settings that concern the whole process, which `create_app` must leave to its caller.

    `number` is that of one of several processes, for its log.
    """
    configure_logging(config.log_level, config.log_format, number)
    # Otherwise each counter gets a second series, with the time of its creation.
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # the library has it without types
    # Otherwise Transformers warns on stderr, past the log, that PyTorch is missing.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def create_tracer(config: TraceConfig) -> Tracer | None:
    """Return the tracer, None unless it is enabled. Raise BadRequestError if OpenTelemetry is needed and not installed."""
    if not config.enabled:
        return None
    try:
        from router.observability.otel import exporting_tracer
    except ImportError as error:
        raise BadRequestError(
            f"--enable-trace needs OpenTelemetry ({error}): pip install 'tito-router[otel]'"
        ) from error
    return exporting_tracer(config.url)


class _HttpOnly:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._app(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1003, "reason": "websockets are not proxied"})
