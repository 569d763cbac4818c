"""A pool with health checks, and servers for it to probe."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from router.config import HealthConfig
from router.engines.table import engines
from router.http.upstream import AiohttpUpstream
from router.policies.least_inflight import LeastInflight
from router.workers.admission import Admission
from router.workers.health import HealthChecks
from router.workers.pool import WorkerPool
from router.workers.probe import Prober
from router.workers.worker import Worker, WorkerCheck, WorkerState
from tests.router.conftest import answer

QUICK = HealthConfig(interval=0.01, timeout=5.0)


class AnsweringServer:
    """A server with an answer (status, body, or both) per path. It answers nothing while its gate is closed."""

    def __init__(self, **answers: Any) -> None:
        self.answers = {f"/{path}": found for path, found in answers.items()}
        self.asked: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        self.asked.append(scope["path"])
        await self.gate.wait()
        found = self.answers.get(scope["path"], 404)
        status, body = found if isinstance(found, tuple) else (found if isinstance(found, int) else 200, found)
        await answer(send, status, msgspec.json.encode(body))


class Watched:
    """A pool with its admission and its health checks."""

    def __init__(self, upstream: AiohttpUpstream, config: HealthConfig, patience: float, passes_keys: bool) -> None:
        self.pool = WorkerPool(LeastInflight(), health=config)
        prober = Prober(upstream, seconds=config.timeout, engines=engines().values(), passes_keys=passes_keys)
        self.probes: list[bool] = []
        self.worker_checks: list[WorkerCheck] = []
        self.checks = HealthChecks(self.pool, prober, config, self.probes.append, self.worker_checks)
        self.admission = Admission(self.pool, prober, self.checks, startup_patience=patience)

    async def until(self, worker: Worker, state: WorkerState) -> None:
        await until(lambda: worker.state is state)

    async def until_version(self, worker: Worker, version: str) -> None:
        await until(lambda: worker.version == version)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - a pool is synchronous and reports no changes
            await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def watching(
    config: HealthConfig = QUICK, patience: float = 1.0, *, passes_keys: bool = True
) -> AsyncIterator[Watched]:
    async with AiohttpUpstream(connect_timeout=1) as upstream:
        watched = Watched(upstream, config, patience, passes_keys)
        try:
            yield watched
        finally:
            await watched.checks.close()


def states(watched: Watched) -> list[tuple[str, str]]:
    return [(worker.url, worker.state.value) for worker in watched.pool.list()]


PAGE = b"<!DOCTYPE HTML><title>Directory listing</title>"
JSON_404 = b'{"detail":"Not Found"}'


def web_server(get: tuple[int, bytes], post: tuple[int, bytes]) -> ASGIApp:
    """Return a server that answers every GET in one way, and every POST in one."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await answer(send, *(get if scope["method"] == "GET" else post))

    return app


NO_ENGINES = {
    "files": ((404, PAGE), (501, PAGE)),
    "pages": ((200, PAGE), (405, b"")),
    "one page for everything": ((200, PAGE), (200, PAGE)),
    "an API": ((404, JSON_404), (404, JSON_404)),
    "TLS on this port": ((400, PAGE), (400, PAGE)),
    "a redirect": ((302, b""), (302, b"")),
    "no GET": ((501, PAGE), (404, b"")),
    "forbidden": ((403, PAGE), (403, PAGE)),
    "forbidden in JSON": ((403, b'{"error": "no"}'), (403, b'{"error": "no"}')),
    "a page to sign in": ((401, PAGE), (401, PAGE)),
}

WELL_WITH_ANYTHING = {
    body.decode() or "nothing": ((200, body), (200, body))
    for body in (
        b"{}",
        b"[]",
        b"[{}]",
        b'{"status": "ok"}',
        b'{"data": []}',
        b'{"version": null}',
        b'"ok"',
        b"null",
        b"ok",
        b"",
    )
}
"""Servers that answer everything alike, and well."""
