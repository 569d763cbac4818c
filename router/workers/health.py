"""Asking a worker about itself before anything is routed to it."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Iterable

import msgspec

from router.errors import BadRequestError
from router.upstream import Upstream, UpstreamFailure, fetch
from router.workers.pool import WorkerPool
from router.workers.worker import Worker, normalize_url

logger = logging.getLogger(__name__)

# The second one is what SGLang called it before 0.5.
_SERVER_INFO_PATHS = ("/server_info", "/get_server_info")

STARTUP_PATIENCE = 1.0
"""Seconds that the start waits for answers. Workers that are slower are routed to on trust."""


class _ServerInfo(msgspec.Struct):
    skip_tokenizer_init: bool = False


class Admission:
    """Lets workers into the pool, but for those that say of themselves that they cannot serve text."""

    def __init__(
        self, pool: WorkerPool, upstream: Upstream, *, probe_timeout: float, startup_patience: float = STARTUP_PATIENCE
    ) -> None:
        self._pool = pool
        self._upstream = upstream
        self._probe_timeout = probe_timeout
        self._startup_patience = startup_patience
        self._late: set[asyncio.Task[str | None]] = set()

    async def admit(self, url: str) -> Worker:
        """Register a worker. BadRequestError if the URL is bad or the worker is of no use; silence is no reason."""
        url = normalize_url(url)
        refusal = await self._refusal(url)
        if refusal is not None:
            raise BadRequestError(refusal)
        return self._pool.add(url)

    async def admit_all(self, urls: Iterable[str]) -> None:
        """Register the workers of the command line, in its order. Refused ones are logged and left out."""
        probes = {url: asyncio.create_task(self._refusal(url)) for url in map(normalize_url, urls)}
        if not probes:
            return
        await asyncio.wait(probes.values(), timeout=self._startup_patience)
        for url, probe in probes.items():
            if not probe.done():
                self._pool.add(url)
                self._late.add(probe)
                probe.add_done_callback(functools.partial(self._judge_late, url))
            elif (refusal := probe.result()) is not None:
                logger.error("not routed to: %s", refusal)
            else:
                self._pool.add(url)

    def close(self) -> None:
        """Stop asking."""
        for probe in self._late:
            probe.cancel()

    def _judge_late(self, url: str, probe: asyncio.Task[str | None]) -> None:
        self._late.discard(probe)
        if probe.cancelled():
            return
        refusal = probe.result()
        if refusal is not None and any(worker.url == url for worker in self._pool.list()):
            logger.error("no longer routed to: %s", refusal)
            self._pool.remove(url)

    async def _refusal(self, url: str) -> str | None:
        """Why this worker cannot be used, as far as it tells."""
        try:
            async with asyncio.timeout(self._probe_timeout):
                for path in _SERVER_INFO_PATHS:
                    info = await self._server_info(url + path)
                    if info is not None:
                        return _judge(url, info)
        except UpstreamFailure as failure:
            logger.warning("worker %s cannot be reached yet: %s", url, failure)
        except TimeoutError:
            logger.warning("worker %s did not answer within %g s", url, self._probe_timeout)
        else:
            logger.warning("worker %s has no usable %s: taken as it is", url, " or ".join(_SERVER_INFO_PATHS))
        return None

    async def _server_info(self, url: str) -> _ServerInfo | None:
        status, body = await fetch(self._upstream, "GET", url, [(b"accept-encoding", b"identity")])
        if status != 200:
            return None
        try:
            return msgspec.json.decode(body, type=_ServerInfo)
        except msgspec.DecodeError:  # not JSON, or not this JSON
            return None


def _judge(url: str, info: _ServerInfo) -> str | None:
    if info.skip_tokenizer_init:
        return (
            f"worker {url} runs with --skip-tokenizer-init: it neither takes nor returns text;"
            " start it without that flag"
        )
    return None
