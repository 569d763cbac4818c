"""Eight trainers' processes claim from two routers on one store. A trainer that holds a lease is killed, and so is a router.

What was answered to a workflow is acknowledged by one trainer, once. The judge is the log in the store, read by an oracle.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from middleware_hub.store.protocol import Store
from middleware_hub.store.records import Event
from middleware_hub.trajectories.events import Claimed, Sampled
from middleware_hub.trajectories.journal import log_key, read
from tests.middleware_hub.store.world import with_store
from tests.middleware_hub.trajectories.test_ledger_oracle import Oracle
from tests.support.client import call
from tests.support.programs import Process, Program
from tests.support.redis_server import empty_redis
from tests.support.vocabularies import vocabulary
from worker.worker import EmbeddedWorker

pytestmark = pytest.mark.slow

TRAINERS = 8
GROUPS = 40
SIZE = 4
SECONDS = 240.0
SLOW_HOLD = 60.0


class Workflow:
    """Asks for groups at whichever router answers. A request that got no answer is asked again, as another group."""

    def __init__(self, urls: list[str]) -> None:
        self.urls = urls
        self.answered: set[str] = set()
        self.unanswered = 0

    def run(self, first: int, count: int) -> None:
        for number in range(first, first + count):
            attempt = 0
            while not self._group(f"{number}.{attempt}", self.urls[(number + attempt) % len(self.urls)]):
                attempt += 1
                self.unanswered += 1
                time.sleep(0.05)

    def _group(self, name: str, url: str) -> bool:
        body = {"text": f"Number {name}: ", "sampling_params": {"max_new_tokens": 8, "n": SIZE}}
        headers = {"x-group-id": name, "x-group-size": str(SIZE), "x-rollout-end": "true"}
        with contextlib.suppress(OSError, http.client.HTTPException):
            answer = call(f"{url}/generate", body, headers=headers, timeout=30)
            if answer.status == 200:
                assert answer.headers.get("x-radix-saved") is None
                self.answered |= {one["meta_info"]["id"] for one in answer.json()}
                return True
        return False


def lines(path: Path) -> list[list[Any]]:
    """What a trainer wrote; one that was killed may have left half a line."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def events(address: str) -> Oracle:
    """The whole log."""

    async def work(store: Store) -> list[Event]:
        return await store.read(log_key("", ""), limit=100_000)

    return Oracle([read(event) for event in with_store(address, work, None)])


def acknowledged(paths: list[Path]) -> list[str]:
    return [sample for path in paths for line in lines(path) if line[0] == "acknowledged" for sample in line[2]]


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_no_sample_twice_and_none_lost(tmp_path: Path, kind: str) -> None:
    address = empty_redis() if kind == "redis" else f"sqlite:{tmp_path}/store.sqlite3"
    with contextlib.ExitStack() as stack:
        worker = stack.enter_context(EmbeddedWorker(vocabulary("qwen"), token_delay=0.001))
        flags = ["--worker-urls", worker.url, "--tokenizer-path", str(vocabulary("qwen")), "--store", address]
        routers = [Program(name, *flags, folder=tmp_path) for name in ("one", "two")]
        for router in routers:
            stack.enter_context(router)
        for router in routers:
            router.wait_until_up()
        urls = [router.url for router in routers]
        workflow = Workflow(urls)
        pool = stack.enter_context(ThreadPoolExecutor(2))
        paths = [tmp_path / f"trainer-{number}" for number in range(TRAINERS)]
        trainers = []
        for number, path in enumerate(paths):
            hold = SLOW_HOLD if number == 0 else 0.02 * number  # the first one is killed while it holds a lease
            mine = urls[number % 2 :] + urls[: number % 2]
            command = [sys.executable, "-m", "tests.support.trainer", str(path), str(hold), *mine]
            trainers.append(stack.enter_context(Process(f"log-{number}", *command, folder=tmp_path, up="")))
        running = [pool.submit(workflow.run, first, GROUPS // 2) for first in (0, GROUPS // 2)]

        until = time.monotonic() + SECONDS
        while not lines(paths[0]):
            assert time.monotonic() < until
            time.sleep(0.01)  # a poll of another process: there is nothing to wait on
        ((_, _, held),) = lines(paths[0])
        trainers[0].kill()
        while len(acknowledged(paths)) < 3 * SIZE:
            assert time.monotonic() < until
            time.sleep(0.01)
        routers[0].kill()
        time.sleep(0.5)
        routers[0].start()
        routers[0].wait_until_up()
        for one in running:
            one.result(SECONDS)

        while True:
            oracle = events(address)
            holder, parts, done = oracle.held()
            keys = {name: one.key for one in oracle.events if isinstance(one, Sampled) for name in one.names}
            assert workflow.answered <= keys.keys()
            if all(done[one] == 1 for one in keys.values()):
                break
            assert time.monotonic() < until, (len(keys), sum(done.values()), workflow.unanswered)
            time.sleep(0.2)
        while not set(held) <= set(acknowledged(paths)) and time.monotonic() < until:
            time.sleep(0.01)  # the log has it, and the trainer has still to hear and to note it
        for trainer in trainers:
            trainer.kill()
    found = acknowledged(paths)
    assert len(found) == len(set(found))
    assert max(done.values()) == 1
    assert not holder
    assert {bytes.fromhex(one) for one in found} <= set(parts)
    assert set(held) <= set(found), "what the killed trainer held was handed out again"
    assert all(
        sum(one in line[2] for path in paths for line in lines(path) if line[0] == "claimed") >= 2 for one in held
    )
    claims = [one for one in oracle.events if isinstance(one, Claimed)]
    print(
        len(keys),
        "samples",
        len(workflow.answered),
        "answered",
        workflow.unanswered,
        "unanswered",
        len(claims),
        "claims",
    )
