"""Health checks, over real sockets."""

from __future__ import annotations

import asyncio

import pytest

from router.config import HealthConfig
from router.engines.engine import EngineCall
from router.workers import health
from router.workers.worker import WorkerCheck, WorkerState
from tests.router.conftest import MODEL
from tests.router.workers.watched import AnsweringServer, until, watching
from tests.support.serving import serving


def test_a_late_worker_becomes_healthy_by_itself() -> None:
    async def main() -> None:
        server = AnsweringServer(ping=503, server_info=503)
        async with serving(server) as url, watching() as watched:
            worker = await watched.admission.admit(url)
            assert worker.state is WorkerState.STARTING
            assert worker.complaint is not None
            assert "503" in worker.complaint
            server.answers = {"/ping": {}, "/server_info": MODEL}
            await watched.until(worker, WorkerState.HEALTHY)

    asyncio.run(main())


def test_a_failing_worker_is_quarantined_until_it_recovers() -> None:
    async def main() -> None:
        server = AnsweringServer(ping={}, model_info=MODEL)
        async with serving(server) as url, watching() as watched:
            worker = await watched.admission.admit(url)
            server.answers.update({"/ping": 500, "/model_info": 500})
            await watched.until(worker, WorkerState.QUARANTINED)
            assert watched.pool.routable == ()
            assert watched.probes[-3:] == [False] * 3
            server.answers.update({"/ping": {}, "/model_info": MODEL})
            await watched.until(worker, WorkerState.HEALTHY)
            assert watched.probes[-2:] == [True] * 2
            assert not {"/health", "/ready"} & set(server.asked), "those fail in a pause"

    asyncio.run(main())


def test_with_the_gate_a_probe_reads_the_weight_version() -> None:
    async def main() -> None:
        server = AnsweringServer(model_info={"weight_version": "3"}, ping={})
        config = HealthConfig(interval=0.01, version_gate=True)
        async with serving(server) as url, watching(config) as watched:
            worker = await watched.admission.admit(url)
            watched.pool.new_version("4", {worker.id})
            assert watched.pool.routable == (worker,)
            await watched.until_version(worker, "3")
            assert watched.pool.routable == (), "it was restarted, and has the weights of its disk"
            server.answers["/model_info"] = {"weight_version": "4"}
            await watched.until_version(worker, "4")
            assert watched.pool.routable == (worker,)

    asyncio.run(main())


def test_without_the_gate_a_probe_reads_an_unknown_version() -> None:
    async def main() -> None:
        server = AnsweringServer(model_info={"weight_version": "3"}, ping={})
        async with serving(server) as url, watching() as watched:
            worker = await watched.admission.admit(url)
            await watched.until_version(worker, "3")
            watched.pool.may_have_restarted(worker)
            assert worker.version is None
            server.answers["/model_info"] = {"weight_version": "4"}
            await watched.until_version(worker, "4")

    asyncio.run(main())


def test_trouble_causes_a_probe_at_once() -> None:
    async def main() -> None:
        server = AnsweringServer(ping={}, model_info=MODEL)
        config = HealthConfig(interval=3600, failure_threshold=1)
        async with serving(server) as url, watching(config) as watched:
            worker = await watched.admission.admit(url)
            server.answers.update({"/ping": 500, "/model_info": 500})
            watched.checks.trouble(worker)
            await watched.until(worker, WorkerState.QUARANTINED)

    asyncio.run(main())


def test_a_removed_worker_is_not_probed() -> None:
    async def main() -> None:
        server = AnsweringServer(ping={}, model_info=MODEL)
        async with serving(server) as url, watching() as watched:
            worker = await watched.admission.admit(url)
            watched.pool.remove(url)
            async with asyncio.timeout(30):
                await asyncio.gather(*watched.checks._tasks.values())
            assert worker not in watched.checks._tasks

    asyncio.run(main())


def test_a_worker_is_quarantined_when_another_server_answers_in_its_place() -> None:
    async def main() -> None:
        server = AnsweringServer(ping={}, model_info=MODEL)
        async with serving(server) as url, watching() as watched:
            worker = await watched.admission.admit(url)
            server.answers.clear()
            await watched.until(worker, WorkerState.QUARANTINED)
            assert worker.complaint is not None
            assert "no engine" in worker.complaint
            assert not worker.worth_a_try
            server.answers["/ping"] = {}
            probes = len(watched.probes)
            await until(lambda: len(watched.probes) > probes + 3)
            assert worker.state is WorkerState.QUARANTINED, "anything may have that"
            assert "no engine" in worker.complaint
            server.answers["/model_info"] = MODEL
            await watched.until(worker, WorkerState.HEALTHY)

    asyncio.run(main())


def test_a_check_warns_and_changes_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        server = AnsweringServer(ping={}, model_info=MODEL, tokenize={"tokens": [1]})
        async with serving(server) as url, watching() as watched:
            judged: list[bytes] = []

            def judge(body: bytes) -> str:
                judged.append(body)
                return "it has another tokenizer"

            watched.worker_checks.append(WorkerCheck(EngineCall("POST", "/tokenize", b"{}"), judge))
            worker = await watched.admission.admit(url)
            await until(lambda: worker.warning == "it has another tokenizer")
            assert watched.pool.routable == (worker,)
            asked = len(server.asked)
            await until(lambda: len(server.asked) > asked + 2)
            assert judged == [b'{"tokens":[1]}'], "it is asked once"
            server.answers["/tokenize"] = {"tokens": [2]}
            watched.checks.trouble(worker)
            await until(lambda: len(judged) == 2)
            server.answers["/tokenize"] = 404
            watched.checks.trouble(worker)
            await until(lambda: worker.warning is None)
            assert len(judged) == 2, "not every version has the path"
            assert worker.state is WorkerState.HEALTHY

    asyncio.run(main())
    assert sum("it has another tokenizer" in one.message for one in caplog.records) == 1, "a warning is logged once"


def test_a_check_that_fails_ends_no_probes(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        server = AnsweringServer(ping={}, model_info=MODEL, tokenize={})
        async with serving(server) as url, watching() as watched:

            def judge(_: bytes) -> str:
                raise LookupError("a fault of a middleware")

            watched.worker_checks.append(WorkerCheck(EngineCall("POST", "/tokenize", b"{}"), judge))
            worker = await watched.admission.admit(url)
            server.answers["/ping"] = server.answers["/model_info"] = 500
            await watched.until(worker, WorkerState.QUARANTINED)

    asyncio.run(main())
    assert "a fault of a middleware" in caplog.text


def test_a_worker_is_checked_once_it_serves_by_every_check() -> None:
    async def main() -> None:
        server = AnsweringServer(ping=503, server_info=503, tokenize={})
        async with serving(server) as url, watching() as watched:
            for word in ("one", "", "other"):
                watched.worker_checks.append(
                    WorkerCheck(EngineCall("POST", "/tokenize", b"{}"), lambda _, word=word: word or None)  # type: ignore[misc]
                )
            worker = await watched.admission.admit(url)
            await until(lambda: len(watched.probes) > 2)
            assert "/tokenize" not in server.asked
            server.answers |= {"/ping": {}, "/server_info": MODEL}
            await until(lambda: worker.warning is not None)
            assert worker.warning == "one; other"

    asyncio.run(main())


def test_a_late_worker_gets_nothing_while_something_else_answers_there(caplog: pytest.LogCaptureFixture) -> None:
    """As a proxy does until the engine behind it is up."""

    async def main() -> None:
        server = AnsweringServer(ping=503, server_info=503)
        async with serving(server) as url, watching() as watched:
            worker = await watched.admission.admit(url)
            assert worker.worth_a_try
            server.answers.clear()
            await until(lambda: "no engine" in str(worker.complaint))
            probes = len(watched.probes)
            await until(lambda: len(watched.probes) > probes + 3)
            assert not any(watched.probes)
            assert (worker.state, worker.worth_a_try) == (WorkerState.STARTING, False)
            assert "GET /server_info is answered with 404" in str(worker.complaint)
            assert caplog.text.count("gets no requests") == 1, "that is told once"
            server.answers["/server_info"] = MODEL
            await watched.until(worker, WorkerState.HEALTHY)
            assert not worker.stranger

    asyncio.run(main())


def test_a_late_worker_that_turns_out_to_be_of_no_use_is_removed() -> None:
    """And its last probe was a bad one."""

    async def main() -> None:
        server = AnsweringServer(ping=503, server_info=503)
        async with serving(server) as url, watching() as watched:
            worker = await watched.admission.admit(url)
            server.answers = {"/server_info": {"skip_tokenizer_init": True}}
            await watched.until(worker, WorkerState.GONE)
            assert watched.pool.list() == ()
            assert watched.probes
            assert not any(watched.probes)

    asyncio.run(main())


def test_a_worker_that_is_removed_during_a_probe_stays_away() -> None:
    async def main() -> None:
        server = AnsweringServer(ping={}, model_info=MODEL)
        async with serving(server) as url, watching() as watched:
            worker = await watched.admission.admit(url)
            server.gate.clear()
            asked = len(server.asked)
            await until(lambda: len(server.asked) > asked)
            (task,) = watched.checks._tasks.values()
            watched.pool.remove(url)
            server.gate.set()
            await asyncio.wait([task], timeout=30)
            assert worker.state is WorkerState.GONE
            assert (watched.pool.list(), watched.pool.routable) == ((), ())

    asyncio.run(main())


@pytest.mark.parametrize(("interval", "down"), [(3600.0, 0.01), (0.01, 3600.0)])
def test_a_worker_that_gets_no_requests_is_probed_often(
    monkeypatch: pytest.MonkeyPatch, interval: float, down: float
) -> None:
    """It serves again as soon as it can; and never less often than a healthy one."""
    monkeypatch.setattr(health, "DOWN_INTERVAL", down)

    async def main() -> None:
        server = AnsweringServer(ping=503, server_info=503)
        async with serving(server) as url, watching(HealthConfig(interval=interval, failure_threshold=1)) as watched:
            worker = await watched.admission.admit(url)
            server.answers = {"/ping": {}, "/server_info": MODEL, "/model_info": MODEL}
            await watched.until(worker, WorkerState.HEALTHY)
            server.answers = {"/ping": 500, "/model_info": 500}
            watched.checks.trouble(worker)
            await watched.until(worker, WorkerState.QUARANTINED)
            server.answers = {"/ping": {}, "/server_info": MODEL, "/model_info": MODEL}
            await watched.until(worker, WorkerState.HEALTHY)

    asyncio.run(main())


def test_trouble_causes_one_probe() -> None:
    async def main() -> None:
        server = AnsweringServer(ping={}, model_info=MODEL)
        async with serving(server) as url, watching(HealthConfig(interval=3600)) as watched:
            worker = await watched.admission.admit(url)
            before = len(watched.probes)
            watched.checks.trouble(worker)
            await until(lambda: len(watched.probes) > before)
            asked = len(server.asked)
            for _ in range(50):
                await asyncio.sleep(0.001)
            assert len(server.asked) == asked

    asyncio.run(main())
