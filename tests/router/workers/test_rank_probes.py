"""How the router learns how many data-parallel ranks a worker has, over real sockets."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from starlette.types import Receive, Scope, Send

from router.config import HealthConfig, WorkersConfig
from router.engines.vllm.engine import Vllm
from router.errors import BadRequestError
from router.http.upstream import AiohttpUpstream
from router.policies.least_inflight import LeastInflight
from router.workers.admission import Admission
from router.workers.health import HealthChecks
from router.workers.pool import WorkerPool
from router.workers.probe import Prober
from router.workers.worker import ProbeResult
from tests.router.conftest import MODEL, answer
from tests.router.workers.watched import AnsweringServer, until, watching
from tests.support.serving import serving


async def told(server: Any, given: int | None = None, *, ask: bool = True) -> int | None:
    """Return the number that a probe finds out. `given`: by the configuration."""
    async with serving(server) as url, AiohttpUpstream(connect_timeout=1) as upstream:
        ranks = {} if given is None else {url: given}
        prober = Prober(upstream, seconds=5, engines=[Vllm()], ranks=ranks if ask else None)
        found = await prober.introduction(url)
        assert (found.refusal, found.complaint) == (None, None)
        return found.ranks


@pytest.mark.parametrize(
    ("info", "ranks"),
    [
        ({"dp_size": 4}, 4),
        ({"dp_size": 1, "attn_dp_size": 8}, 8),
        ({"dp_size": 2, "attn_dp_size": 4}, 8),
        ({"dp_size": None, "attn_dp_size": None}, 1),
        ({"dp_size": 0}, 1),
        ({}, 1),
    ],
)
def test_sglang_says_it_in_its_description(info: dict[str, Any], ranks: int) -> None:
    server = AnsweringServer(server_info={**MODEL, **info})
    assert asyncio.run(told(server)) == ranks
    assert asyncio.run(told(server, 3)) == 3
    assert asyncio.run(told(server, ask=False)) == 1
    assert set(server.asked) == {"/server_info"}


class VllmServer:
    """What a vLLM answers. The paths of `late` are answered when the server ends."""

    def __init__(self, *late: str, **answers: bytes) -> None:
        own = {"version": b'{"version": "0.32.0"}', "tokenize": b'{"max_model_len": 4096}', "weight_info": b"{}"}
        self.answers = {f"/{path}": found for path, found in {**own, **answers}.items()}
        self.late = late

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        if path in self.late:
            await asyncio.Event().wait()
        refused = path in ("/v1/completions", "/inference/v1/generate")
        await answer(send, 400 if refused else 200 if path in self.answers else 404, self.answers.get(path, b"{}"))


INFO = msgspec.json.encode({"vllm_config": {"parallel_config": {"data_parallel_size": 2}}})
PLACES = {"server_info": INFO, "kv_event_sources": b'{"0": {}, "1": {}, "2": {}}', "metrics": b'vllm:a{engine="0"} 1\n'}


@pytest.mark.parametrize(
    ("server", "ranks"),
    [
        (VllmServer(**PLACES), 2),
        (VllmServer("/server_info", **PLACES), 3),
        (VllmServer(kv_event_sources=PLACES["kv_event_sources"], metrics=PLACES["metrics"]), 3),
        (VllmServer(kv_event_sources=b"{}", metrics=b'vllm:a{engine="0"} 1\nvllm:a{engine="1"} 1\n'), 2),
        (VllmServer(server_info=b'{"vllm_config": "text"}'), 1),
        (VllmServer(), 1),
        (VllmServer("/server_info"), None),
        (VllmServer("/metrics"), None),
    ],
    ids=["description", "late", "events", "metrics", "nothing of use", "nothing", "only late", "late metrics"],
)
def test_of_a_vllms_places_the_first_that_says_it_counts(server: VllmServer, ranks: int | None) -> None:
    """A description that takes seconds, as in development mode, holds nothing up. It is asked again if nothing else says it."""
    assert asyncio.run(told(server)) == ranks
    assert asyncio.run(told(server, 5)) == 5


def test_a_worker_that_was_too_busy_to_say_it_is_asked_again() -> None:
    async def main() -> None:
        server = AnsweringServer(server_info=503, model_info=MODEL, ping={})
        async with watching() as fleet, serving(server) as url:
            worker = await fleet.admission.admit(url)
            assert (worker.engine, worker.told_ranks, len(worker.targets)) == ("sglang", False, 1)
            server.answers["/server_info"] = {**MODEL, "dp_size": 3}
            await until(lambda: len(worker.targets) == 3)
            count = server.asked.count("/server_info")
            server.asked.clear()
            await until(lambda: len(server.asked) > 3)
            assert count
            assert "/server_info" not in server.asked, "it has said it"

    asyncio.run(main())


def test_a_worker_whose_connections_broke_may_be_another_one() -> None:
    """It is asked at once, and not after a bad probe: a request to a rank that is gone would be refused."""

    async def main() -> None:
        server = AnsweringServer(server_info={**MODEL, "dp_size": 4}, model_info=MODEL, ping={})
        async with watching(HealthConfig(interval=60)) as fleet, serving(server) as url:
            worker = await fleet.admission.admit(url)
            assert len(worker.targets) == 4
            server.answers["/server_info"] = {**MODEL, "dp_size": 2}
            fleet.checks.trouble(worker)
            await until(lambda: len(worker.targets) == 2)

    asyncio.run(main())


@pytest.mark.parametrize(("ranks", "count"), [({}, 4), ({"http://w:1": 2}, 2), (None, 1)])
def test_what_another_router_found_does_not_win_over_flags(ranks: dict[str, int] | None, count: int) -> None:
    async def main() -> None:
        async with AiohttpUpstream(connect_timeout=1) as upstream:
            pool, prober = WorkerPool(LeastInflight()), Prober(upstream, seconds=5, ranks=ranks)
            checks = HealthChecks(pool, prober, HealthConfig(interval=60))
            worker = Admission(pool, prober, checks).take_in("http://w:1", ProbeResult(engine="sglang", ranks=4))
            assert (len(worker.targets), worker.ranks) == (count, count)
            await checks.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "entry", ["http://w:1", "http://w:1=", "=4", "http://w:1=0", "http://w:1=x", "http://w:1=9999"]
)
def test_a_number_that_is_none_is_refused_at_the_start(entry: str) -> None:
    with pytest.raises(BadRequestError, match="--worker-ranks"):
        WorkersConfig(ranks=(entry,))


def test_numbers_are_given_by_url() -> None:
    assert WorkersConfig(ranks=("http://w:1=4", "http://v:1=1")).given_ranks == {"http://w:1": 4, "http://v:1": 1}
