"""Letting workers in, and keeping an eye on them: over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import threading
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from router.config import HealthConfig
from router.errors import BadRequestError
from router.http.upstream import AiohttpUpstream
from router.policies.least_inflight import LeastInflight
from router.workers.admission import Admission
from router.workers.health import HealthChecks
from router.workers.pool import WorkerPool
from router.workers.probe import Prober
from router.workers.worker import Worker, WorkerState
from tests.router.conftest import answer, json_app
from tests.support.serving import dead_url, serving, serving_socket

QUICK = HealthConfig(interval=0.01, timeout=5.0)


class Told:
    """A worker that answers by path what it is told to: a status, or a body; nothing while its gate is shut."""

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
        await answer(send, found if isinstance(found, int) else 200, msgspec.json.encode(found))


class Watched:
    """A pool, who lets workers into it, and who looks after them."""

    def __init__(self, upstream: AiohttpUpstream, config: HealthConfig, patience: float) -> None:
        self.pool = WorkerPool(LeastInflight(), health=config)
        prober = Prober(upstream, seconds=config.timeout)
        self.probes: list[bool] = []
        self.checks = HealthChecks(self.pool, prober, config, self.probes.append)
        self.admission = Admission(self.pool, prober, self.checks, startup_patience=patience)

    async def until(self, worker: Worker, state: WorkerState) -> None:
        async with asyncio.timeout(10):
            while worker.state is not state:  # noqa: ASYNC110 - a pool is synchronous and tells nobody of its changes
                await asyncio.sleep(0.001)

    async def until_version(self, worker: Worker, version: str) -> None:
        async with asyncio.timeout(10):
            while worker.version != version:  # noqa: ASYNC110 - the same
                await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def watching(config: HealthConfig = QUICK, patience: float = 1.0) -> AsyncIterator[Watched]:
    async with AiohttpUpstream(connect_timeout=1) as upstream:
        watched = Watched(upstream, config, patience)
        try:
            yield watched
        finally:
            await watched.checks.close()


def states(watched: Watched) -> list[tuple[str, str]]:
    return [(worker.url, worker.state.value) for worker in watched.pool.list()]


def test_workers_of_the_command_line_keep_their_order_and_useless_ones_are_left_out() -> None:
    async def main() -> None:
        async with (
            serving(json_app({})) as one,
            serving(json_app({"/server_info": {"skip_tokenizer_init": True}})) as useless,
            watching() as watched,
        ):
            dead = dead_url()
            await watched.admission.admit_all([dead, useless, one])
            assert states(watched) == [(dead, "starting"), (one, "healthy")]

    asyncio.run(main())


@pytest.mark.parametrize("skip", [True, False])
def test_a_worker_that_is_slow_to_tell_is_starting_until_it_does(skip: bool) -> None:
    async def main() -> None:
        told = Told(server_info={"skip_tokenizer_init": skip})
        told.gate.clear()
        async with serving(told) as url, watching(patience=0) as watched:
            await watched.admission.admit_all([url])
            (worker,) = watched.pool.list()
            assert worker.state is WorkerState.STARTING
            told.gate.set()
            await watched.until(worker, WorkerState.GONE if skip else WorkerState.HEALTHY)
            assert len(watched.pool.routable) == (0 if skip else 1)

    asyncio.run(main())


def test_a_worker_whose_scheduler_is_busy_is_let_in_by_its_ping() -> None:
    async def main() -> None:
        class Busy(Told):
            async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
                if scope.get("path") == "/server_info":
                    await asyncio.Event().wait()
                await super().__call__(scope, receive, send)

        config = HealthConfig(interval=10, timeout=0.2)
        async with serving(Busy(ping={})) as url, watching(config) as watched:
            assert (await watched.admission.admit(url)).state is WorkerState.HEALTHY

    asyncio.run(main())


def test_one_that_comes_up_late_is_found_by_itself() -> None:
    async def main() -> None:
        told = Told(ping=503, server_info=503)
        async with serving(told) as url, watching() as watched:
            worker = await watched.admission.admit(url)
            assert worker.state is WorkerState.STARTING
            assert worker.complaint is not None
            assert "503" in worker.complaint
            told.answers = {"/ping": {}, "/server_info": {}}
            await watched.until(worker, WorkerState.HEALTHY)

    asyncio.run(main())


def test_one_that_fails_is_quarantined_and_taken_back() -> None:
    async def main() -> None:
        told = Told(ping={}, model_info={})
        async with serving(told) as url, watching() as watched:
            worker = await watched.admission.admit(url)
            told.answers.update({"/ping": 500, "/model_info": 500})
            await watched.until(worker, WorkerState.QUARANTINED)
            assert watched.pool.routable == ()
            assert watched.probes[-3:] == [False] * 3
            told.answers.update({"/ping": {}, "/model_info": {}})
            await watched.until(worker, WorkerState.HEALTHY)
            assert watched.probes[-2:] == [True] * 2
            assert not {"/health", "/ready"} & set(told.asked), "those fail in a pause"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("answers", "asked"),
    [
        ({"ping": {}}, ["/ping"]),
        ({"ping": 401}, ["/ping"]),
        ({"model_info": {}}, ["/ping", "/model_info"]),
        ({"get_model_info": {}}, ["/ping", "/model_info", "/get_model_info"]),
        ({"server_info": {}}, ["/ping", "/model_info", "/get_model_info", "/server_info"]),
    ],
)
def test_an_engine_that_answers_is_there(answers: dict[str, Any], asked: list[str]) -> None:
    async def main() -> None:
        told = Told(**answers)
        async with serving(told) as url, AiohttpUpstream(connect_timeout=1) as upstream:
            found = await Prober(upstream, seconds=5).probe(url)
            assert found.complaint is None
            assert told.asked == asked

    asyncio.run(main())


def test_with_the_gate_a_probe_reads_the_weight_version() -> None:
    async def main() -> None:
        told = Told(model_info={"weight_version": "3"}, ping={})
        config = HealthConfig(interval=0.01, version_gate=True)
        async with serving(told) as url, watching(config) as watched:
            worker = await watched.admission.admit(url)
            watched.pool.new_version("4", {worker.id})
            assert watched.pool.routable == (worker,)
            await watched.until_version(worker, "3")
            assert watched.pool.routable == (), "it was restarted, and has the weights of its disk"
            told.answers["/model_info"] = {"weight_version": "4"}
            await watched.until_version(worker, "4")
            assert watched.pool.routable == (worker,)

    asyncio.run(main())


def test_without_the_gate_a_version_is_asked_for_where_none_is_known() -> None:
    async def main() -> None:
        told = Told(model_info={"weight_version": "3"}, ping={})
        async with serving(told) as url, watching() as watched:
            worker = await watched.admission.admit(url)
            await watched.until_version(worker, "3")
            watched.pool.may_have_restarted(worker)
            assert worker.version is None
            told.answers["/model_info"] = {"weight_version": "4"}
            await watched.until_version(worker, "4")

    asyncio.run(main())


def test_trouble_is_looked_into_at_once() -> None:
    async def main() -> None:
        told = Told(ping={}, model_info={})
        config = HealthConfig(interval=3600, failure_threshold=1)
        async with serving(told) as url, watching(config) as watched:
            worker = await watched.admission.admit(url)
            told.answers.update({"/ping": 500, "/model_info": 500})
            watched.checks.trouble(worker)
            await watched.until(worker, WorkerState.QUARANTINED)

    asyncio.run(main())


def test_who_has_left_is_not_asked_any_more() -> None:
    async def main() -> None:
        told = Told(ping={}, model_info={})
        async with serving(told) as url, watching() as watched:
            worker = await watched.admission.admit(url)
            watched.pool.remove(url)
            async with asyncio.timeout(5):
                await asyncio.gather(*watched.checks._tasks.values())
            assert worker not in watched.checks._tasks

    asyncio.run(main())


def test_a_bad_url_is_refused() -> None:
    async def main() -> None:
        async with watching() as watched:
            with pytest.raises(BadRequestError):
                await watched.admission.admit("nonsense")

    asyncio.run(main())


# -- what is no engine -----------------------------------------------------------------------------------------------------

PAGE = b"<!DOCTYPE HTML><title>Directory listing</title>"
JSON_404 = b'{"detail":"Not Found"}'


def web_server(get: tuple[int, bytes], post: tuple[int, bytes]) -> ASGIApp:
    """Something that answers any GET, and any POST, in one way."""

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
}


@pytest.mark.parametrize(("get", "post"), NO_ENGINES.values(), ids=NO_ENGINES)
def test_what_is_no_engine_is_refused_with_what_it_answered(get: tuple[int, bytes], post: tuple[int, bytes]) -> None:
    async def main() -> None:
        async with serving(web_server(get, post)) as url, watching() as watched:
            with pytest.raises(BadRequestError) as refused:
                await watched.admission.admit(url)
            said = str(refused.value)
            assert f"{url} is no engine" in said
            assert f"GET /server_info is answered with {get[0]}" in said
            assert f"POST /generate is answered with {post[0]}" in said
            assert ("Directory listing" in said) == (PAGE in (get[1], post[1]))
            await watched.admission.admit_all([url])
            assert states(watched) == [], "from the command line it is left out"

    asyncio.run(main())


def test_a_file_server_is_refused() -> None:
    """`python -m http.server`, which took a third of all generations."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    async def main(url: str) -> None:
        async with watching() as watched:
            with pytest.raises(BadRequestError, match="404"):
                await watched.admission.admit(url)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            asyncio.run(main(f"http://127.0.0.1:{server.server_port}"))
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("banner", [b"SSH-2.0-OpenSSH_9.6\r\n", b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03"])
def test_what_does_not_even_speak_http_is_refused(banner: bytes) -> None:
    """A shell, or a port of SGLang's own that speaks ZeroMQ."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(banner)
        await writer.drain()
        await reader.read(1)

    async def main() -> None:
        async with serving_socket(handle) as url, watching() as watched:
            with pytest.raises(
                BadRequestError, match="is no engine: GET /server_info is answered with not a valid HTTP"
            ):
                await watched.admission.admit(url)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("get", "post"),
    [
        ((404, b""), (400, b'{"error": {"message": "no prompt"}}')),
        ((404, JSON_404), (422, b'{"detail": []}')),
        ((404, b""), (500, b"Internal Server Error")),
        ((405, b""), (200, b'{"text": "", "meta_info": {}}')),
        ((401, b""), (401, b"")),
        ((403, PAGE), (403, PAGE)),
    ],
)
def test_an_engine_that_tells_nothing_of_itself_is_let_in_and_stays(
    get: tuple[int, bytes], post: tuple[int, bytes]
) -> None:
    async def main() -> None:
        async with serving(web_server(get, post)) as url, watching() as watched:
            worker = await watched.admission.admit(url)
            assert worker.state is WorkerState.HEALTHY
            async with asyncio.timeout(10):
                while len(watched.probes) < 5:  # noqa: ASYNC110 - nobody tells of probes
                    await asyncio.sleep(0.001)
            assert all(watched.probes)

    asyncio.run(main())


def test_one_that_is_not_ready_yet_is_no_stranger() -> None:
    """A gateway in front of it says so with a 503."""

    async def main() -> None:
        async with serving(web_server((404, b""), (503, PAGE))) as url, watching() as watched:
            assert (await watched.admission.admit(url)).state is WorkerState.STARTING

    asyncio.run(main())


def test_a_worker_in_whose_place_something_else_answers_is_quarantined() -> None:
    async def main() -> None:
        told = Told(ping={}, model_info={})
        async with serving(told) as url, watching() as watched:
            worker = await watched.admission.admit(url)
            told.answers.clear()
            await watched.until(worker, WorkerState.QUARANTINED)
            assert worker.complaint is not None
            assert "no engine" in worker.complaint
            assert not worker.worth_a_try
            told.answers["/ping"] = {}
            await watched.until(worker, WorkerState.HEALTHY)

    asyncio.run(main())


@pytest.mark.parametrize(("get", "post"), NO_ENGINES.values(), ids=NO_ENGINES)
def test_a_probe_of_what_is_no_engine_is_a_bad_one(get: tuple[int, bytes], post: tuple[int, bytes]) -> None:
    """A page with a 200, for one, where a worker's ping was before."""

    async def main() -> None:
        async with serving(web_server(get, post)) as url, AiohttpUpstream(connect_timeout=1) as upstream:
            for wants_version in (False, True):
                found = await Prober(upstream, seconds=5).probe(url, wants_version=wants_version)
                assert found.refusal is None, "it was a worker once, and may be one again"
                assert found.complaint is not None
                assert f"no engine: GET /server_info is answered with {get[0]}" in found.complaint

    asyncio.run(main())
