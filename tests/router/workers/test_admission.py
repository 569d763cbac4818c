"""Admission of workers, over real sockets."""

from __future__ import annotations

import asyncio
import http.server
import threading
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from router.config import HealthConfig
from router.errors import BadRequestError, NoWorkerError
from router.workers.policy import RouteQuery
from router.workers.worker import WorkerState
from tests.router.conftest import MODEL, json_app
from tests.router.workers.watched import (
    JSON_404,
    NO_ENGINES,
    PAGE,
    WELL_WITH_ANYTHING,
    AnsweringServer,
    states,
    until,
    watching,
    web_server,
)
from tests.support.serving import dead_url, serving, serving_socket


def test_workers_of_the_command_line_keep_their_order_and_refused_ones_are_left_out() -> None:
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


def test_a_worker_that_comes_twice_is_complained_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """As those of the command line do that the store names, too."""

    async def main() -> None:
        async with watching() as watched:
            dead = dead_url()
            await watched.admission.admit_all([dead])
            await watched.admission.admit(dead)
            assert states(watched) == [(dead, "starting")]

    asyncio.run(main())
    (told,) = [record.getMessage() for record in caplog.records if "is starting" in record.getMessage()]
    assert "Connect call failed" in told


@pytest.mark.parametrize("skip", [True, False])
def test_a_silent_worker_is_starting_until_it_answers(skip: bool) -> None:
    async def main() -> None:
        server = AnsweringServer(server_info={"skip_tokenizer_init": skip})
        server.gate.clear()
        async with serving(server) as url, watching(patience=0) as watched:
            await watched.admission.admit_all([url])
            (worker,) = watched.pool.list()
            assert worker.state is WorkerState.STARTING
            server.gate.set()
            await watched.until(worker, WorkerState.GONE if skip else WorkerState.HEALTHY)
            assert len(watched.pool.routable) == (0 if skip else 1)

    asyncio.run(main())


def test_a_worker_with_a_busy_scheduler_is_admitted_by_what_it_says_of_its_model() -> None:
    async def main() -> None:
        class Busy(AnsweringServer):
            async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
                if scope.get("path") == "/server_info":
                    await asyncio.Event().wait()
                await super().__call__(scope, receive, send)

        config = HealthConfig(interval=10, timeout=0.2)
        async with serving(Busy(ping={}, model_info=MODEL)) as url, watching(config) as watched:
            assert (await watched.admission.admit(url)).state is WorkerState.HEALTHY

    asyncio.run(main())


def test_a_bad_url_is_refused() -> None:
    async def main() -> None:
        async with watching() as watched:
            with pytest.raises(BadRequestError):
                await watched.admission.admit("nonsense")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("get", "post"),
    [*NO_ENGINES.values(), *WELL_WITH_ANYTHING.values()],
    ids=[*NO_ENGINES, *WELL_WITH_ANYTHING],
)
def test_the_refusal_of_another_server_quotes_its_answers(get: tuple[int, bytes], post: tuple[int, bytes]) -> None:
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
            assert states(watched) == [(url, "starting")], "a command line may be early"
            (worker,) = watched.pool.list()
            assert worker.complaint == said
            with pytest.raises(NoWorkerError, match="is no engine"):
                watched.pool.lease(RouteQuery())

    asyncio.run(main())


def test_a_file_server_is_refused() -> None:
    """`python -m http.server`, which got a third of all generations before."""

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
def test_a_server_without_http_is_refused(banner: bytes) -> None:
    """SSH, or a port of SGLang that speaks ZeroMQ."""

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
        ((401, b'{"error": "Unauthorized"}'), (401, b'{"error": "Unauthorized"}')),
    ],
)
def test_an_engine_without_a_description_is_admitted_and_stays(get: tuple[int, bytes], post: tuple[int, bytes]) -> None:
    async def main() -> None:
        async with serving(web_server(get, post)) as url, watching() as watched:
            worker = await watched.admission.admit(url)
            assert worker.state is WorkerState.HEALTHY
            async with asyncio.timeout(30):
                while len(watched.probes) < 5:  # noqa: ASYNC110 - probes are not reported
                    await asyncio.sleep(0.001)
            assert all(watched.probes)

    asyncio.run(main())


VLLM_OPEN: dict[str, Any] = {"version": {"version": "0.32.0"}, "ping": {}, "tokenize": {}}
LOCKED: list[dict[str, Any]] = [
    {"health": 200, "server_info": 401, "ping": 401, "generate": 401},  # SGLang
    {**VLLM_OPEN, **dict.fromkeys(("v1/models", "v1/completions", "inference/v1/generate"), 401)},
]


@pytest.mark.parametrize("answers", LOCKED, ids=["sglang", "vllm"])
def test_a_worker_that_asks_for_a_key_gets_no_requests_from_a_router_that_passes_none_on(
    answers: dict[str, Any],
) -> None:
    """It would refuse each of them at once, and so be the worker with the fewest in flight."""

    async def main() -> None:
        server = AnsweringServer(**answers)
        async with serving(server) as url, watching(passes_keys=False) as watched:
            with pytest.raises(BadRequestError, match=r"asks for a key .* 401.*start the worker without a key"):
                await watched.admission.admit(url)
            await watched.admission.admit_all([url])
            (worker,) = watched.pool.list()
            probed = len(watched.probes)
            await until(lambda: len(watched.probes) > probed + 3)
            assert worker.state is WorkerState.STARTING
            assert "asks for a key" in str(worker.complaint)
            server.answers = {"/server_info": MODEL, "/ping": 200}
            await watched.until(worker, WorkerState.HEALTHY)
            server.answers = {"/server_info": 401, "/ping": 401}  # it restarted, with a key
            await until(lambda: not watched.pool.routable)
            assert "asks for a key" in str(worker.complaint)

    asyncio.run(main())


@pytest.mark.parametrize("answers", LOCKED, ids=["sglang", "vllm"])
def test_a_worker_that_asks_for_a_key_is_admitted_by_a_router_that_passes_it_on(answers: dict[str, Any]) -> None:
    async def main() -> None:
        async with serving(AnsweringServer(**answers)) as url, watching() as watched:
            assert (await watched.admission.admit(url)).state is WorkerState.HEALTHY

    asyncio.run(main())


@pytest.mark.parametrize(
    ("get", "post"),
    [((404, b""), (503, PAGE)), ((503, PAGE), (404, b"")), ((429, b"{}"), (429, b"{}")), ((503, b"{}"), (503, b"{}"))],
)
def test_a_server_that_is_not_ready_is_admitted(get: tuple[int, bytes], post: tuple[int, bytes]) -> None:
    """A gateway in front of a worker answers with 503 meanwhile."""

    async def main() -> None:
        async with serving(web_server(get, post)) as url, watching() as watched:
            assert (await watched.admission.admit(url)).state is WorkerState.STARTING

    asyncio.run(main())


@pytest.mark.parametrize(
    "loading", [{"health": 503}, {"health": 503, "ping": 503}, {"health": 503, "server_info": 500}]
)
def test_an_engine_that_loads_its_model_is_admitted_and_healthy_once_it_tells_of_it(loading: dict[str, Any]) -> None:
    """It may have no other path yet than its health."""

    async def main() -> None:
        server = AnsweringServer(**loading)
        async with serving(server) as url, watching() as watched:
            worker = await watched.admission.admit(url)
            assert worker.state is WorkerState.STARTING
            assert "503" in str(worker.complaint) or "500" in str(worker.complaint)
            server.answers = {"/health": 200, "/ping": 200, "/server_info": MODEL}
            await watched.until(worker, WorkerState.HEALTHY)

    asyncio.run(main())


@pytest.mark.parametrize(
    "said",
    [
        {"server_info": {"model_path": "m", "version": "0.5.23", "context_length": None}},
        {"get_server_info": {"tokenizer_path": "m"}},
        {"model_info": {"is_generation": True}},
        {"get_model_info": {"model_path": "m"}},
        {"server_info": {}, "get_model_info": {"model_path": "m"}},
        {"v1/models": {"object": "list", "data": [{"id": "m", "owned_by": "sglang"}]}},
    ],
)
def test_any_description_of_an_engine_will_do(said: dict[str, Any]) -> None:
    """Old versions have other paths, and tell less."""

    async def main() -> None:
        async with serving(AnsweringServer(**said)) as url, watching() as watched:
            assert (await watched.admission.admit(url)).state is WorkerState.HEALTHY

    asyncio.run(main())
