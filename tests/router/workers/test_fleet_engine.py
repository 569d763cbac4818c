"""Which engine a worker runs is found when it comes; a fleet has one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from router.config import HealthConfig, WorkersConfig
from router.config.workers import ENGINE_NAMES
from router.engines.engine import Engine
from router.engines.table import engines
from router.errors import BadRequestError
from router.http.upstream import AiohttpUpstream
from router.policies.least_inflight import LeastInflight
from router.workers.admission import Admission
from router.workers.fleet_engine import FleetEngine, known_worker
from router.workers.health import HealthChecks
from router.workers.pool import WorkerPool
from router.workers.probe import Prober
from router.workers.worker import ProbeResult, WorkerState
from tests.router.workers.watched import AnsweringServer
from tests.support.serving import serving

QUICK = HealthConfig(interval=0.01, timeout=5.0)
MODELS = {"object": "list", "data": [{"id": "m", "owned_by": "vllm"}]}
VLLM: dict[str, Any] = {
    "ping": {},
    "version": {"version": "0.32.0"},
    "v1/models": MODELS,
    "v1/completions": 400,
    "inference/v1/generate": (400, {"error": {"message": "output_mode: Input should be 'tokens' or 'text'"}}),
    "tokenize": {},
}
SGLANG: dict[str, Any] = {"server_info": {"weight_version": "3"}, "ping": {}}


class Fleet:
    """A pool whose workers are asked which engine they run."""

    def __init__(self, upstream: AiohttpUpstream, asked: str) -> None:
        self.spoken: list[str] = []
        self.pool = WorkerPool(LeastInflight(), health=QUICK)
        table = engines()
        self.engine = FleetEngine(self.pool, asked, table, self._speak)
        prober = Prober(upstream, seconds=5, engines=table.values(), checked=self.engine.checked)
        self.checks = HealthChecks(self.pool, prober, QUICK)
        self.admission = Admission(self.pool, prober, self.checks)

    def _speak(self, engine: Engine) -> None:
        self.spoken.append(engine.name)


@contextlib.asynccontextmanager
async def fleet(asked: str = "auto") -> AsyncIterator[Fleet]:
    async with AiohttpUpstream(connect_timeout=1) as upstream:
        found = Fleet(upstream, asked)
        try:
            yield found
        finally:
            await found.checks.close()


def test_the_workers_say_which_engine_they_run() -> None:
    async def main() -> None:
        async with serving(AnsweringServer(**VLLM)) as url, fleet() as found:
            assert found.spoken == ["sglang"]
            worker = await found.admission.admit(url)
            assert (worker.engine, worker.abilities) == ("vllm", {"scale-out"})
            assert found.spoken[-1] == "vllm"
            assert known_worker(found.pool, url).abilities == {"scale-out"}
            assert known_worker(found.pool, "http://nobody:1").abilities == frozenset()

    asyncio.run(main())


@pytest.mark.parametrize(
    "changes",
    [{"v1/models": 401}, {"server_info": {"vllm_config": "x"}}],
    ids=["with a key", "in the mode for developers"],
)
def test_vllm_is_recognised_however_it_was_started(changes: dict[str, Any]) -> None:
    async def main() -> None:
        async with serving(AnsweringServer(**{**VLLM, **changes})) as url, fleet() as found:
            assert (await found.admission.admit(url)).engine == "vllm"

    asyncio.run(main())


def test_what_is_not_recognised_is_sglang() -> None:
    async def main() -> None:
        server = AnsweringServer(**SGLANG)
        async with serving(server) as url, fleet() as found:
            worker = await found.admission.admit(url)
            assert (worker.engine, worker.version) == ("sglang", "3")
            assert server.asked == ["/server_info"], "it is not asked what it is not"

    asyncio.run(main())


@pytest.mark.parametrize(("first", "second"), [(VLLM, SGLANG), (SGLANG, VLLM)])
def test_a_mixed_fleet_is_refused(first: dict[str, Any], second: dict[str, Any]) -> None:
    """And once the last worker of an engine has left, another one may come."""

    async def main() -> None:
        async with (
            serving(AnsweringServer(**first)) as one,
            serving(AnsweringServer(**second)) as two,
            fleet() as found,
        ):
            worker = await found.admission.admit(one)
            with pytest.raises(BadRequestError, match="a fleet has one engine") as refused:
                await found.admission.admit(two)
            assert one in str(refused.value)
            assert [worker.url for worker in found.pool.list()] == [one]
            assert await found.admission.admit(one) is worker, "again is no error"
            found.pool.remove(one)
            assert (await found.admission.admit(two)).engine == found.spoken[-1] != worker.engine

    asyncio.run(main())


def test_the_one_that_is_late_is_removed() -> None:
    """Two engines may come in the same moment. The health checks find the second one."""

    async def main() -> None:
        async with serving(AnsweringServer(**VLLM)) as one, serving(AnsweringServer(**SGLANG)) as two, fleet() as found:
            both = [await found.admission.examine(url) for url in (one, two)]
            found.admission.take_in(one, both[0])
            late = found.admission.take_in(two, both[1])
            assert not late.routable
            async with asyncio.timeout(30):
                while late.state is not WorkerState.GONE:  # noqa: ASYNC110 - a pool is synchronous and reports no changes
                    await asyncio.sleep(0.001)
            assert found.pool.list()[0].engine == "vllm"

    asyncio.run(main())


@pytest.mark.parametrize(("asked", "there"), [("sglang", VLLM), ("vllm", SGLANG)])
def test_the_flag_decides(asked: str, there: dict[str, Any]) -> None:
    async def main() -> None:
        async with serving(AnsweringServer(**there)) as url, fleet(asked) as found:
            assert found.spoken == [asked]
            with pytest.raises(BadRequestError, match=f"--engine {asked}"):
                await found.admission.admit(url)

    asyncio.run(main())


def test_a_worker_of_another_router_brings_its_engine_along() -> None:
    """It is not asked again: the router that added it has done that."""

    async def main() -> None:
        async with fleet() as found:
            told = ProbeResult(engine="vllm", abilities=frozenset({"scale-out"}))
            worker = found.admission.take_in("http://10.0.0.1:1", told)
            assert (worker.routable, worker.engine, worker.abilities) == (True, "vllm", {"scale-out"})
            with pytest.raises(BadRequestError, match="a fleet has one engine"):
                await found.admission.check("http://10.0.0.2:1", ProbeResult(engine="sglang"))

    asyncio.run(main())


def test_a_worker_that_comes_back_is_asked_again() -> None:
    """It may have been started with other flags."""

    async def main() -> None:
        server = AnsweringServer(**VLLM)
        async with serving(server) as url, fleet() as found:
            worker = await found.admission.admit(url)
            found.pool.probed(worker, "gone", absent=True)
            server.answers["/inference/v1/generate"] = 403
            async with asyncio.timeout(30):
                while worker.abilities:  # noqa: ASYNC110 - the same
                    await asyncio.sleep(0.001)

    asyncio.run(main())


def test_a_vllm_that_generates_no_text_from_ids_is_asked_elsewhere() -> None:
    """Versions before 0.32 have the path, and ignore `output_mode`: they refuse an empty prompt, and not the mode."""

    async def main() -> None:
        refuses = {"inference/v1/generate": (400, {"error": {"message": "token_ids must not be empty"}})}
        async with serving(AnsweringServer(**{**VLLM, **refuses})) as url, fleet() as found:
            assert (await found.admission.admit(url)).abilities == frozenset()

    asyncio.run(main())


def test_a_worker_of_no_use_is_refused() -> None:
    async def main() -> None:
        async with serving(AnsweringServer(**{**VLLM, "version": {"version": "0.9.1"}})) as url, fleet() as found:
            with pytest.raises(BadRequestError, match=r"0\.11\.0"):
                await found.admission.admit(url)

    asyncio.run(main())


def test_of_the_workers_that_a_router_starts_with_those_of_the_second_engine_are_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All of them are asked at the same time, when the fleet has no engine yet. That none is unreachable is told rightly."""

    async def main() -> None:
        async with (
            serving(AnsweringServer(**SGLANG)) as one,
            serving(AnsweringServer(**VLLM)) as other,
            fleet() as found,
        ):
            await found.admission.admit_all([one, other])
            assert [worker.url for worker in found.pool.list()] == [one]

    asyncio.run(main())
    (told,) = [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    assert told.startswith("not routed to: worker ")
    assert "a fleet has one engine" in told


def test_a_silent_worker_says_it_later() -> None:
    async def main() -> None:
        server = AnsweringServer(**VLLM)
        server.gate.clear()
        async with serving(server) as url, fleet() as found:
            await found.admission.admit_all([url])
            (worker,) = found.pool.list()
            assert worker.engine is None
            server.gate.set()
            async with asyncio.timeout(30):
                while not worker.routable:  # noqa: ASYNC110 - the same
                    await asyncio.sleep(0.001)
            assert worker.engine == "vllm"

    asyncio.run(main())


def test_the_flag_knows_every_engine() -> None:
    assert tuple(engines()) == ENGINE_NAMES, "ENGINE_NAMES in router/config/workers.py"


def test_an_unknown_engine_is_no_configuration() -> None:
    with pytest.raises(BadRequestError, match="--engine must be one of auto, sglang, vllm"):
        WorkersConfig(engine="tgi")


@pytest.mark.parametrize("alone", [True, False])
def test_a_worker_that_does_not_generate_is_asked_again_what_it_is(alone: bool) -> None:
    """Among workers of its old engine it has no place. It is kept, with the reason, in case it comes back."""

    async def main() -> None:
        server = AnsweringServer(**VLLM)
        async with serving(server) as url, serving(AnsweringServer(**VLLM)) as other, fleet() as found:
            worker = await found.admission.admit(url)
            if not alone:
                await found.admission.admit(other)
            server.answers = AnsweringServer(**SGLANG).answers
            found.pool.does_not_generate(worker)
            found.checks.trouble(worker)
            while worker.engine == "vllm" and worker.state is not WorkerState.QUARANTINED:  # noqa: ASYNC110 - it reports no changes
                await asyncio.sleep(0.01)
            assert worker in found.pool.list()
            assert worker.engine == ("sglang" if alone else "vllm")
            assert (worker.complaint is None) is alone
            server.answers = AnsweringServer(**VLLM).answers
            while worker.complaint is not None:  # noqa: ASYNC110 - the same
                await asyncio.sleep(0.01)
            assert found.spoken[-1] == ("sglang" if alone else "vllm")
            for url in [worker.url for worker in found.pool.list()]:
                found.pool.remove(url)
            await asyncio.sleep(0.1)  # the last probes end by themselves

    asyncio.run(main())
