"""Letting workers in."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from starlette.types import Receive, Scope, Send

from router.errors import BadRequestError
from router.policies.least_inflight import LeastInflight
from router.upstream import AiohttpUpstream
from router.workers.health import Admission
from router.workers.pool import WorkerPool
from tests.router.conftest import answer, json_app
from tests.support.serving import dead_url, serving


class SlowInfo:
    """A worker that tells about itself when it is allowed to."""

    def __init__(self, *, skip_tokenizer_init: bool) -> None:
        self.gate = asyncio.Event()
        self._info = msgspec.json.encode({"skip_tokenizer_init": skip_tokenizer_init})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self.gate.wait()
            await answer(send, 200, self._info)


def test_workers_of_the_command_line_keep_their_order() -> None:
    async def main() -> None:
        pool = WorkerPool(LeastInflight())
        async with (
            serving(json_app({})) as one,
            serving(json_app({"/server_info": {"skip_tokenizer_init": True}})) as useless,
            AiohttpUpstream(connect_timeout=1) as upstream,
        ):
            dead = dead_url()
            await Admission(pool, upstream, probe_timeout=2).admit_all([dead, useless, one])
            assert [worker.url for worker in pool.list()] == [dead, one]

    asyncio.run(main())


@pytest.mark.parametrize("skip", [True, False])
def test_slow_worker_is_trusted_until_it_says_otherwise(skip: bool) -> None:
    async def main() -> None:
        pool = WorkerPool(LeastInflight())
        worker = SlowInfo(skip_tokenizer_init=skip)
        async with serving(worker) as url, AiohttpUpstream(connect_timeout=1) as upstream:
            admission = Admission(pool, upstream, probe_timeout=5, startup_patience=0)
            await admission.admit_all([url])
            assert [worker.url for worker in pool.routable] == [url]
            worker.gate.set()
            async with asyncio.timeout(5):
                await asyncio.gather(*admission._late)
            await asyncio.sleep(0)
            assert [worker.url for worker in pool.routable] == ([] if skip else [url])

    asyncio.run(main())


def test_asking_ends_with_the_router() -> None:
    async def main() -> None:
        pool = WorkerPool(LeastInflight())
        worker = SlowInfo(skip_tokenizer_init=True)
        async with serving(worker) as url, AiohttpUpstream(connect_timeout=1) as upstream:
            admission = Admission(pool, upstream, probe_timeout=5, startup_patience=0)
            await admission.admit_all([url])
            probes = list(admission._late)
            admission.close()
            await asyncio.gather(*probes, return_exceptions=True)
            assert all(probe.cancelled() for probe in probes)

    asyncio.run(main())


def test_bad_url_is_refused() -> None:
    async def main() -> None:
        async with AiohttpUpstream(connect_timeout=1) as upstream:
            with pytest.raises(BadRequestError):
                await Admission(WorkerPool(LeastInflight()), upstream, probe_timeout=2).admit("nonsense")

    asyncio.run(main())
