"""The command line: from flags to configuration, and the whole process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from middleware_hub import parsers
from router.cli import COMMANDS, main
from router.config import (
    CALL_PARSERS,
    RADIX_TREE_MIDDLEWARE,
    REASONING_PARSERS,
    SESSIONS_MIDDLEWARE,
    RouterConfig,
    SessionsConfig,
    TraceConfig,
)
from router.errors import BadRequestError
from router.flags import config_from_args, parser
from tests.router.conftest import DONE, GatedWorker
from tests.support.serving import serving
from tests.support.usual import usual
from worker.models.ngram import shipped_image_tokenizer, shipped_tokenizer

ROOT = Path(__file__).parents[2]
PLAIN = ("--middleware", "none", "--port", "0")


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """`main` switches the garbage collector off for a start. Where that fails the process ends, but not here."""
    yield
    gc.enable()


def config(*argv: str) -> RouterConfig:
    return config_from_args(parser().parse_args(argv))


def test_defaults() -> None:
    made = config("--tokenizer-path", "t")
    assert made.middlewares == (SESSIONS_MIDDLEWARE, RADIX_TREE_MIDDLEWARE)
    assert made.sessions == RouterConfig().sessions
    assert made.server == RouterConfig().server
    assert made.workers == RouterConfig().workers
    assert made.abort == RouterConfig().abort
    assert made.radix.tokenizer_path == "t"
    assert made.radix.force_logprobs is True


def test_the_former_name_of_a_middleware_still_works() -> None:
    made = config("--tokenizer-path", "t", "--middleware", "middleware_hub.sessions.gateway:SessionsMiddleware")
    assert made.middlewares == (SESSIONS_MIDDLEWARE,)


def test_sessions_can_be_switched_off() -> None:
    assert config("--tokenizer-path", "t", "--no-sessions").middlewares == (RADIX_TREE_MIDDLEWARE,)


def test_every_flag_of_sessions_arrives() -> None:
    made = config(
        *("--tokenizer-path", "t", "--session-ttl-secs", "60", "--session-max-tokens", "1000"),
        *("--max-context", "4096", "--stream-interval", "8"),
        *("--session-match", "strict", "--history", "template", "--verify-rate", "0.5", "--orphan-grace", "3"),
        *("--chat-template", "x.jinja", "--tool-call-parser", "glm", "--reasoning-parser", "none"),
    )
    assert made.sessions == SessionsConfig(
        ttl=60,
        max_tokens=1000,
        max_context=4096,
        stream_interval=8,
        history="template",
        verify_rate=0.5,
        orphan_grace=3,
        match="strict",
        chat_template="x.jinja",
        tool_call_parser="glm",
        reasoning_parser="none",
    )


def test_the_parsers_in_the_help_exist() -> None:
    assert set(CALL_PARSERS) <= set(parsers.NAMES)
    assert set(REASONING_PARSERS) <= set(parsers.REASONING_NAMES)


def test_every_flag_arrives() -> None:
    made = config(
        *("--worker-urls", "http://a:1/", "http://b:2", "--host", "0.0.0.0", "--port", "31000", "--policy", "random"),
        *("--tokenizer-path", "t", "--trust-remote-code", "--abort-policy", "return", "--abort-retries", "7"),
        *("--abort-retry-wait", "1.5", "--radix-max-tokens", "1000", "--radix-keep-versions", "2"),
        *("--radix-unretrieved-versions", "4"),
        *("--force-logprobs", "off", "--add-special-tokens", "never", "--middleware", "a:B", "--middleware", "c:D"),
        *(
            "--api-key",
            "k1",
            "--api-key",
            "t:k2",
            "--admin-key",
            "k3",
            "--log-level",
            "debug",
            "--max-body-bytes",
            "99",
        ),
        *(
            "--max-header-bytes",
            "4096",
            "--max-connections",
            "9",
            "--worker-allow",
            "10.0.0.0/8",
            "--worker-allow",
            "::1",
        ),
        *("--log-format", "json", "--enable-trace", "--otlp-traces-endpoint", "collector:4318"),
        *("--shutdown-grace", "3"),
    )
    assert made.workers.urls == ("http://a:1", "http://b:2")
    assert made.workers.policy == "random"
    assert (made.server.host, made.server.port, made.server.api_keys) == ("0.0.0.0", 31000, ("k1", "t:k2"))
    assert (made.server.admin_keys, made.workers.allow) == (("k3",), ("10.0.0.0/8", "::1"))
    assert (made.server.max_header_bytes, made.server.max_connections) == (4096, 9)
    assert (made.server.log_level, made.server.max_body_bytes, made.server.shutdown_grace) == ("debug", 99, 3)
    assert (made.abort.policy, made.abort.attempts, made.abort.wait) == ("return", 7, 1.5)
    assert made.radix.trust_remote_code
    assert (made.radix.max_tokens, made.radix.keep_versions, made.radix.unretrieved_versions) == (1000, 2, 4)
    assert (made.radix.force_logprobs, made.radix.add_special_tokens) == (False, "never")
    assert made.middlewares == ("a:B", "c:D")
    assert (made.server.log_format, made.trace) == ("json", TraceConfig(enabled=True, endpoint="collector:4318"))


@pytest.mark.parametrize(
    ("name", "folder"), [("demo", shipped_tokenizer()), ("demo-images", shipped_image_tokenizer())]
)
def test_the_tokenizers_of_demo_workers_have_names(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert config("--tokenizer-path", name).radix.tokenizer_path == str(folder)
    (tmp_path / name).mkdir()  # somebody's own
    assert config("--tokenizer-path", name).radix.tokenizer_path == name


def test_without_the_package_of_the_demos_its_tokenizer_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "worker.models.ngram", None)
    with pytest.raises(SystemExit) as stop:
        main(("--tokenizer-path", "demo", "--port", "0"))
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install tito-worker" in line


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((), ("--tokenizer-path", "--middleware none")),
        ((*PLAIN, "--middleware", "a:B"), ("--middleware none",)),
        ((*PLAIN, "--host", "0.0.0.0"), ("--api-key", "--insecure")),
        ((*PLAIN, "--host", "example.org"), ("--api-key", "--insecure")),
        ((*PLAIN, "--host", "0.0.0.0", "--admin-key", "k"), ("--api-key", "--insecure", "--admin-key alone")),
        ((*PLAIN, "--api-key", ""), ("--api-key",)),
        ((*PLAIN, "--api-key", "name:"), ("--api-key",)),
        ((*PLAIN, "--admin-key", ""), ("--admin-key",)),
        ((*PLAIN, "--api-key", "a:k", "--api-key", "b:k"), ("'a'", "'b'", "the same key")),
        ((*PLAIN, "--api-key", "a:k", "--admin-key", "k"), ("--admin-key", "'a'")),
        ((*PLAIN, "--api-key", "@/no/such/file"), ("--api-key", "/no/such/file")),
        ((*PLAIN, "--admin-key", "@/dev/null"), ("--admin-key", "no key in the file")),
        ((*PLAIN, "--store", "@/dev/null"), ("--store", "no address in the file")),
        ((*PLAIN, "--store", "@/no/such/file"), ("--store", "/no/such/file")),
        ((*PLAIN, "--worker-allow", "10.0.0.1/8"), ("--worker-allow", "10.0.0.1/8")),
        (
            (*PLAIN, "--worker-allow", "10.0.0.0/8", "--worker-urls", "http://127.0.0.1:1"),
            ("--worker-allow", "127.0.0.1", "10.0.0.0/8"),
        ),
        (
            (*PLAIN, "--worker-allow", "10.0.0.0/8", "--worker-urls", "http://no-such-host.invalid:1"),
            ("--worker-allow", "no-such-host.invalid"),
        ),
        ((*PLAIN, "--max-header-bytes", "10"), ("--max-header-bytes",)),
        ((*PLAIN, "--max-connections", "0"), ("--max-connections",)),
        ((*PLAIN, "--policy", "best"), ("best", "least_inflight", "power_of_two")),
        ((*PLAIN, "--worker-urls", "10.0.0.1:3000"), ("10.0.0.1:3000", "http://")),
        ((*PLAIN, "--port", "70000"), ("--port",)),
        ((*PLAIN, "--max-body-bytes", "0"), ("--max-body-bytes",)),
        ((*PLAIN, "--shutdown-grace", "-1"), ("--shutdown-grace",)),
        ((*PLAIN, "--shutdown-grace", "inf"), ("--shutdown-grace", "inf")),
        ((*PLAIN, "--abort-retry-wait", "1e999"), ("--abort-retry-wait", "inf")),
        ((*PLAIN, "--abort-retries", "0"), ("--abort-retries",)),
        ((*PLAIN, "--api-key", "\udcff"), ("--api-key", "ASCII")),  # bytes of a command line that are no UTF-8
        ((*PLAIN, "--router-id", "\udcff"), ("--router-id", "UTF-8")),
        ((*PLAIN, "--host", "\udcff", "--insecure"), ("--host", "UTF-8")),
        (("--middleware", ".no:Thing", "--port", "0"), (".no:Thing", "pkg.mod:Class")),
        (("--middleware", "no.such:Thing", "--port", "0"), ("no.such",)),
        ((*PLAIN, "--port", "many"), ("--port", "--help")),
        ((*PLAIN, "--nonsense"), ("--nonsense", "--help")),
        ((*PLAIN, "--tokenizer", "t"), ("--tokenizer t", "did you mean --tokenizer-path?")),
        ((*PLAIN, "--worker_url=http://a"), ("--worker_url=http://a", "did you mean --worker-urls?")),
        ((*PLAIN, "--workers", "http://a"), ("--workers http://a", "did you mean --worker-urls?")),
        ((*PLAIN, "--model_path=m"), ("--model_path=m", "did you mean --tokenizer-path?")),
        ((*PLAIN, "--log-level", "loud"), ("--log-level",)),
        ((*PLAIN, "--log-format", "xml"), ("--log-format",)),
        ((*PLAIN, "--otlp-traces-endpoint", "grpc://host:1"), ("--otlp-traces-endpoint", "HOST:PORT")),
    ],
)
def test_bad_configuration_is_one_line_and_exit_2(
    argv: tuple[str, ...], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tito-router: error: ")
    for word in words:
        assert word in line


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    assert config("--middleware", "none", "--host", host).server.host == host


@pytest.mark.parametrize("flag", [("--insecure",), ("--api-key", "k")])
def test_other_addresses_need_a_key_or_a_flag(flag: tuple[str, ...]) -> None:
    assert config("--middleware", "none", "--host", "0.0.0.0", *flag).server.host == "0.0.0.0"
    with pytest.raises(BadRequestError):
        config("--middleware", "none", "--host", "0.0.0.0")


def test_keys_of_a_file(tmp_path: Path) -> None:
    """One key per line, together with keys on the command line and keys of tenants."""
    file = tmp_path / "keys"
    file.write_text("# the workflows'\n a:one \n\n#b:no\nb:two\n")
    made = config("--middleware", "none", "--api-key", f"@{file}", "--api-key", "c:three", "--admin-key", f"@{file}")
    assert made.server.api_keys == ("a:one", "b:two", "c:three")
    assert made.server.admin_keys == ("a:one", "b:two")


def test_a_taken_port_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """It is named before the tokenizer is loaded, which takes seconds."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit) as stop:
            main(("--tokenizer-path", "/no/such/folder", "--port", str(port)))
    assert stop.value.code == 2
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, word in (("--help", "--incremental-streaming-output"), ("--version", "tito-router")):
        with pytest.raises(SystemExit) as stop:
            main((flag,))
        assert stop.value.code == 0
        assert word in capsys.readouterr().out


def test_help_begins_with_the_commands() -> None:
    """All commands are on the first screen, before the first of two hundred flags."""
    first, _, rest = parser().format_help().partition("\noptions:\n")
    assert rest
    assert len(first.splitlines()) < 24
    assert re.findall(r"^  ([a-z-]+)  +\w", first, re.MULTILINE) == [*COMMANDS]


def test_a_missing_dependency_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Installed with --no-deps, as for a trainer's modules, the programs lack packages."""
    (tmp_path / "a_program.py").write_text("import no_such_package.part\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(COMMANDS, "drift", "a_program")
    with pytest.raises(SystemExit, match="2"):
        main(["drift"])
    assert "it needs no_such_package, which" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], ["--help"], ["store", "stats", "--store", "sqlite:x"]], ids=str)
def test_a_dependency_of_the_flags_is_named_as_well(argv: list[str]) -> None:
    """The policies, whose parameters are flags, need a package that no trainer has."""
    code = f"import sys; sys.modules['xxhash'] = None; from router.cli import main; main({argv!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("tito-router: error: it needs xxhash, which ")
    assert len(done.stderr.splitlines()) == 1


def test_a_router_without_the_worker_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A router's wheel has no demos."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "worker"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "worker", None)
    with pytest.raises(SystemExit, match="2"):
        main(["demo"])
    assert capsys.readouterr().err.endswith(
        "pip install 'tito-worker[agents]', or in a clone pip install './worker[agents]'\n"
    )


def test_disabled_retries_are_one_attempt() -> None:
    assert config("--middleware", "none", "--retry-max-retries", "7").workers.retry.attempts == 7
    assert config("--middleware", "none", "--disable-retries", "--retry-max-retries", "7").workers.retry.attempts == 1


def test_help_does_not_import_the_application() -> None:
    """The start of the application takes half a second, which a user who asks for help should not wait."""
    slow = {"router.app", "aiohttp", "transformers", "uvicorn", "zmq"}
    code = f"import sys, router.cli; router.cli.parser(); print(*{slow} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True).stdout.split() == []


class Process:
    """`python -m router`, started as a user starts it, but for a warning where it leaves something open."""

    def __init__(self, *argv: str) -> None:
        self._argv = argv
        self.log: list[str] = []

    async def __aenter__(self) -> Process:
        command = sys.executable, "-W", "always::ResourceWarning", "-m", "router", *PLAIN, *self._argv
        self._process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stderr=asyncio.subprocess.PIPE)
        found = await self.line_with(r"listening on (http://\S+)")
        self.url = found.group(1)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self.exit_code()

    async def line_with(self, pattern: str) -> re.Match[str]:
        assert self._process.stderr is not None
        async with asyncio.timeout(60):
            while line := (await self._process.stderr.readline()).decode():
                self.log.append(line)
                if found := re.search(pattern, line):
                    return found
        raise AssertionError("".join(self.log))

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def exit_code(self) -> int:
        assert self._process.stderr is not None
        async with asyncio.timeout(60):
            self.log.append((await self._process.stderr.read()).decode())
            return await self._process.wait()


def test_ctrl_c_while_it_loads_is_no_traceback(tmp_path: Path) -> None:
    """The middleware stands for what takes seconds to load."""
    source = "import sys, time\nprint('loading', file=sys.stderr, flush=True)\nwhile True: time.sleep(0.01)\n"
    (tmp_path / "slow_middleware.py").write_text(source)
    command = [sys.executable, "-m", "router", "--port", "0", "--middleware", "slow_middleware:Slow"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "loading\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == ""
    assert process.returncode == 130


def test_the_first_process_of_a_container_is_ended_while_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would load, serve, and be killed at the end of its time to stop."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    try:
        with pytest.raises(SystemExit):
            main(["--version"])
        with pytest.raises(SystemExit) as stop:
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert stop.value.code == 143


@pytest.mark.parametrize("number", usual([signal.SIGTERM, signal.SIGINT], signal.SIGTERM))
def test_idle_process_stops_with_0(number: signal.Signals) -> None:
    async def run() -> None:
        async with Process() as process, aiohttp.ClientSession(process.url) as client:
            async with client.get("/readiness") as reply:
                assert reply.status == 200
            process.signal(number)
            assert await process.exit_code() == 0
            assert "Traceback" not in "".join(process.log)

    asyncio.run(run())


@contextlib.asynccontextmanager
async def streaming(*flags: str) -> AsyncIterator[tuple[GatedWorker, Process, aiohttp.ClientResponse]]:
    """A worker, a router in front of it, and a stream that has begun."""
    worker = GatedWorker(first=b"data: 1\n\n")
    async with (
        serving(worker) as url,
        Process("--worker-urls", url, *flags) as process,
        aiohttp.ClientSession(process.url) as client,
        client.post("/generate", data=b"{}") as stream,
    ):
        assert await stream.content.readany() == b"data: 1\n\n"
        yield worker, process, stream


def test_sigterm_lets_streams_finish() -> None:
    async def run() -> None:
        async with streaming() as (worker, process, stream):
            process.signal(signal.SIGTERM)
            await process.line_with("stopping: 1 requests in flight")
            port = int(process.url.rsplit(":", 1)[1])
            async with asyncio.timeout(30):
                while await connects(port):
                    pass
            worker.release()
            assert await stream.read() == DONE
            assert await process.exit_code() == 0
            assert "Traceback" not in "".join(process.log)

    asyncio.run(run())


async def connects(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionError:  # refused, or reset while it was waiting to be accepted
        return False
    writer.close()
    return True


def test_streams_are_cut_after_the_grace() -> None:
    async def run() -> None:
        async with streaming("--shutdown-grace", "0") as (worker, process, stream):
            process.signal(signal.SIGTERM)
            with pytest.raises(aiohttp.ClientPayloadError):
                await stream.read()
            await worker.wait_for_disconnects(1)
            assert await process.exit_code() == 0

    asyncio.run(run())


def test_second_signal_stops_at_once() -> None:
    async def run() -> None:
        async with streaming() as (_, process, stream), aiohttp.ClientSession(process.url) as idle:
            await (await idle.get("/readiness")).read()  # its connection is kept
            process.signal(signal.SIGTERM)
            await process.line_with("stopping")
            process.signal(signal.SIGTERM)
            assert await process.exit_code() == 1
            assert not re.search("Traceback|ResourceWarning", "".join(process.log)), process.log
            with pytest.raises(aiohttp.ClientPayloadError):
                await stream.read()

    asyncio.run(run())


def test_the_address_of_a_store_may_stand_in_a_file(tmp_path: Path) -> None:
    """It may have a password, which the list of processes would show."""
    file = tmp_path / "store"
    file.write_text("# of the run\nredis://:secret@valkey:6379/0\n")
    assert config("--tokenizer-path", "m", "--store", f"@{file}").store.url == "redis://:secret@valkey:6379/0"
