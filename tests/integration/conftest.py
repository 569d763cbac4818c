"""What the integration tests share.

Real workers and real routers are for the tests marked `sglang` or `vllm`, one set per session: a worker takes half a minute to
start. A module says in `ENGINES` on which engines its tests run; without it that is SGLang. What needs a `vision`, an engine
with a model that sees, is marked `vlm` as well, and runs on each family.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import engines
from tests.support.asking import Asking
from tests.support.chat_models import chat_model
from tests.support.client import call
from tests.support.engine_server import EngineServer, free_port
from tests.support.engines import Engine
from tests.support.stack import Stack, stack
from tests.support.vision import FAMILIES, SETUP, VISIONS, Vision

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def asks() -> Iterator[list[Asking]]:
    """Requests under way; whatever happens, they are closed."""
    under_way: list[Asking] = []
    yield under_way
    for asking in under_way:
        asking.close()


@pytest.fixture
def space() -> str:
    """A namespace that nobody else has."""
    return uuid.uuid4().hex


Stacks = Callable[..., Stack]
"""Returns the stack of a model, named by its chat template, whose sessions have these settings."""


@pytest.fixture(scope="module")
def stacks() -> Iterator[Stacks]:
    """Stacks of one worker each, one for each model and settings that a module asks for."""
    with contextlib.ExitStack() as entered:
        made: dict[tuple[str, str], Stack] = {}

        def one(name: str, radix: dict[str, Any] | None = None, **sessions: Any) -> Stack:
            key = name, repr((radix, sessions))
            if key not in made:
                found = stack("qwen", styles=("cumulative",), folder=chat_model(name), radix=radix, sessions=sessions)
                made[key] = entered.enter_context(found)
            return made[key]

        yield one
        assert all(one.idle() for one in made.values())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run what needs an `engine` on each engine of its module, marked with its name, but for what `CANNOT` lists.

    What needs a `vision` runs on each of them with each family, or with the `FAMILIES` of its module, marked `vlm` besides.
    """
    names = getattr(metafunc.module, "ENGINES", ("sglang",))
    test = f"{metafunc.module.__name__.rpartition('.')[2]}.{metafunc.function.__name__}"
    if "vision" in metafunc.fixturenames:
        families = getattr(metafunc.module, "FAMILIES", FAMILIES)
        kinds = [
            pytest.param(
                one, id=f"{name}-{one.family}", marks=[getattr(pytest.mark, name), pytest.mark.vlm, pytest.mark.slow]
            )
            for name in names
            for one in VISIONS[name]
            if one.family in families and not engines.cannot(name, test)
        ]
        metafunc.parametrize("vision", kinds, indirect=True, scope="session")
    if "engine" not in metafunc.fixturenames:
        return
    found = [
        pytest.param(engines.ENGINES[name], id=name, marks=[getattr(pytest.mark, name), pytest.mark.slow])
        for name in names
        if not engines.cannot(name, test)
    ]
    metafunc.parametrize("engine", found, indirect=True, scope="session")


@pytest.fixture(scope="session")
def engine(request: pytest.FixtureRequest) -> Engine:
    found: Engine = request.param
    return found


@pytest.fixture(scope="session")
def workers(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EngineServer]]:
    """Two real workers; of SGLang the first streams cumulatively, the second in deltas."""
    if not engine.kit.is_installed:
        pytest.skip(f"no {engine.kit.name} in {engine.kit.directory}: run {engine.kit.setup}")
    with engine.kit.servers(engine.flags, log_dir=tmp_path_factory.mktemp(engine.kit.name.lower())) as servers:
        yield servers


@pytest.fixture(scope="session")
def vision(request: pytest.FixtureRequest) -> Vision:
    found: Vision = request.param
    return found


@pytest.fixture(scope="session")
def vision_worker(vision: Vision, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    """A real worker with a model that sees. One is up at a time: the next kind starts when all tests on this one have run."""
    if not vision.kit.is_installed:
        pytest.skip(f"no {vision.kit.name} with images: run {SETUP}")
    with vision.kit.server(*vision.flags, log_dir=tmp_path_factory.mktemp(vision.family)) as server:
        yield server


@pytest.fixture(scope="session")
def sglang_workers(workers: list[EngineServer]) -> list[EngineServer]:
    """For tests of SGLang alone."""
    return workers


@contextlib.contextmanager
def real_router(urls: list[str], model: Path, log_path: Path, flags: Sequence[str] = ()) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "router", "--port", str(port), "--worker-urls", *urls]
    command += ["--tokenizer-path", str(model), "--shutdown-grace", "5", *flags]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "HF_HUB_OFFLINE": "1"}
        )
    try:
        deadline = time.monotonic() + 60
        while not _answers(f"http://127.0.0.1:{port}/health"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the router did not come up:\n{log_path.read_text()[-4000:]}")
            time.sleep(0.1)  # a poll of another process: there is nothing to wait on
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    with contextlib.suppress(OSError):
        return call(url, timeout=10).status == 200
    return False


RouterFor = Callable[..., str]


@pytest.fixture(scope="session")
def router_for(
    engine: Engine, workers: list[EngineServer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RouterFor]:
    """`router_for(0)`: the URL of a router in front of the first worker; `router_for(0, 1)`: of both. Started once each."""
    started: dict[tuple[object, ...], str] = {}
    with contextlib.ExitStack() as stack:

        def start(*numbers: int, flags: tuple[str, ...] = ()) -> str:
            key = (*numbers, *flags)
            if key not in started:
                urls = [workers[number].url for number in numbers]
                log_path = tmp_path_factory.mktemp("router") / "router.log"
                started[key] = stack.enter_context(real_router(urls, engine.kit.model, log_path, flags))
            return started[key]

        yield start


@pytest.fixture(scope="session")
def router(router_for: RouterFor) -> str:
    """A router in front of both workers."""
    return router_for(0, 1)


@pytest.fixture
def own_weights(engine: Engine, workers: list[EngineServer], router: str) -> Iterator[None]:
    """A test may give the workers other weights: they get theirs back, all of them under the first one's version."""
    version = engine.version(workers[0])
    yield
    update = {"model_path": str(engine.kit.model), "weight_version": version, "abort_all_requests": True}
    assert call(f"{router}/update_weights_from_disk", update).json()["success"]
