"""A conversation of 200,000 tokens in the inspector: windows come within milliseconds, and nobody else waits."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import psutil
import pytest

from tests.support.client import call
from tests.support.programs import Program
from worker.models.ngram import shipped_tokenizer

pytestmark = pytest.mark.slow
API = "/inspect/api"
TOKENS = 200_000
TURN = 4_000
PATIENCE = 0.05
"""What nobody may wait longer for, in seconds."""
TRIES = 20
"""The machine does other things, too: the best of so many counts."""


def waiting(router: Program) -> Callable[[], float]:
    """Return what tells how many seconds one has waited for the router.

    Only those in which it ran, not those in which the machine did other things: without a store it waits for nothing itself.
    """
    program = psutil.Process(router.pid)
    begun, used = time.perf_counter(), program.cpu_times()

    def seconds() -> float:
        now = program.cpu_times()
        return min(time.perf_counter() - begun, now.user + now.system - used.user - used.system)

    return seconds


@dataclass
class Watch:
    """Asks for /liveness again and again, on a connection of its own."""

    router: Program
    waits: list[float] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        parts = urlsplit(self.router.url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
        while not self.over.is_set():
            wait = waiting(self.router)
            connection.request("GET", "/liveness")
            connection.getresponse().read()
            self.waits.append(wait())
            time.sleep(0.002)
        connection.close()


@contextlib.contextmanager
def watched(router: Program) -> Iterator[list[float]]:
    watch = Watch(router)
    thread = threading.Thread(target=watch.run)
    thread.start()
    try:
        yield watch.waits
    finally:
        watch.over.set()
        thread.join()


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    """A router that remembers one conversation of 200,000 tokens, most of them sampled."""
    folder = tmp_path_factory.mktemp("inspector")
    tokenizer = str(shipped_tokenizer())
    flags = ("demo-worker", "--scripted", "--context-length", str(2 * TOKENS))
    with Program("worker", *flags, folder=folder) as worker:
        worker.wait_until_up()
        with Program("router", "--tokenizer-path", tokenizer, "--worker-urls", worker.url, folder=folder) as made:
            made.wait_until_up()
            text, tokens = "Once", 0
            while tokens < TOKENS:
                body = {
                    "text": text,
                    "rid": f"r{tokens}",
                    "sampling_params": {"max_new_tokens": TURN, "ignore_eos": True},
                }
                answer = call(f"{made.url}/generate", body)
                assert answer.status == 200, answer.content
                text += answer.json()["text"] + "\nand then"
                tokens += TURN
            yield made


def get(made: Program, path: str) -> Any:
    answer = call(f"{made.url}{API}{path}")
    assert answer.status == 200, answer.content
    return answer


def branch_of(made: Program) -> tuple[str, dict[str, Any]]:
    (one,) = get(made, "/conversations").json()["conversations"]
    path = f"/conversations/{quote(one['id'], safe='')}"
    (branch,) = get(made, path).json()["branches_list"]
    assert branch["tokens"] >= TOKENS
    return f"{path}/branches/{branch['id']}", branch


def test_windows_come_at_once_wherever_they_are(router: Program) -> None:
    path, branch = branch_of(router)
    for start in (0, 100_000, branch["tokens"] - 2_000):
        best = 1.0
        for _ in range(TRIES):
            wait = waiting(router)
            window = get(router, f"{path}/tokens?start={start}&end={start + 2_000}")
            best = min(best, wait())
            if best < PATIENCE:
                break
        assert len(window.json()["ids"]) == 2_000
        assert best < PATIENCE


CALLS = (
    "/conversations",
    "/conversations?text=nowhere-at-all",
    "/conversations?token_ids=1,2,3",
    "{path}",
    "{path}/tokens?start=150000&end=155000",
    "{path}/find?text=nowhere-at-all",
    "{path}/find?token_ids=1,2,3,4,5,6",
    "{path}/find?text=e&limit=1000",
    "{path}/drift",
    "{path}/download?format=json",
    "{path}/download?format=parquet",
    "{path}/download?format=html",
    "/compare?a={id}&a_branch={branch}&b={id}&b_branch=r100000",
    "/run",
)


@pytest.mark.parametrize("asked", CALLS)
def test_nobody_waits_for_the_inspector(router: Program, asked: str) -> None:
    path, branch = branch_of(router)
    asked = asked.format(path=path, id=path.split("/")[2], branch=branch["id"])
    best = 1.0
    for _ in range(TRIES):
        with watched(router) as waits:
            get(router, asked)
            time.sleep(0.02)
        best = min(best, max(waits))
        if best < PATIENCE:
            return
    assert best < PATIENCE


def test_nobody_waits_for_the_first_drift_and_the_first_report(tmp_path: Path, router: Program) -> None:
    """What is computed beside requests is computed once, so that it is watched from its begin: on text nobody has seen."""
    best = 1.0
    for number in range(TRIES):
        text = f"{number}: " + "word and another, 12 " * 30_000
        body = {"text": text, "rid": f"x{number}", "sampling_params": {"max_new_tokens": 8}}
        with watched(router):
            assert call(f"{router.url}/generate", body).status == 200
        with watched(router) as waits:
            path = f"/conversations/text%3Ax{number}/branches/x{number}"
            while json.loads(get(router, path).content)["drift"] is None:
                time.sleep(0.01)
        best = min(best, max(waits))
        if best < PATIENCE:
            return
    assert best < PATIENCE
