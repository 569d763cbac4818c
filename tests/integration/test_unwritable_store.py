"""Sessions and groups while their store is locked by another program, which only reading gets past."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from middleware_hub.store.sqlite.file import connect
from tests.integration.test_store_trouble import NAME, router
from tests.support import templates
from tests.support.client import Answer, call
from tests.support.fleet import until
from tests.support.programs import Program
from tests.support.vocabularies import vocabulary
from worker.worker import EmbeddedWorker

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Program]:
    template = str(templates.folder() / "qwen2_5.jinja")
    with (
        EmbeddedWorker(vocabulary("qwen"), token_delay=0) as worker,
        router(worker, f"{tmp_path}/store/", tmp_path, "--chat-template", template) as program,
    ):
        program.wait_until_up()
        yield program


@contextmanager
def locked(store: Path) -> Iterator[None]:
    with closing(connect(store)) as other:
        other.execute("BEGIN EXCLUSIVE")
        yield
        other.execute("ROLLBACK")


def make(made: Program, **body: Any) -> Answer:
    return call(f"{made.url}/sessions", {"session_id": "s", **body})


def chat(made: Program) -> Answer:
    return call(f"{made.url}/sessions/s/v1/chat/completions", {"messages": HELLO, "max_tokens": 4})


def show(made: Program) -> Answer:
    return call(f"{made.url}/sessions/s")


def names(made: Program) -> list[str]:
    return [one["session_id"] for one in call(f"{made.url}/sessions").json()["sessions"]]


@pytest.mark.slow
def test_a_session_that_was_deleted_stays_deleted(made: Program, tmp_path: Path) -> None:
    assert make(made).status == 201
    assert chat(made).status == 200
    with locked(tmp_path / "store" / NAME):
        request = urllib.request.Request(f"{made.url}/sessions/s", method="DELETE")
        with urllib.request.urlopen(request) as answer:
            assert (answer.status, answer.headers["x-radix-saved"]) == (200, "no")
        assert show(made).status == 404
        assert chat(made).status == 404
        assert names(made) == []
    until(lambda: "takes writes again" in made.log, "the store takes writes again")
    assert show(made).status == 404
    made.kill()
    made.start()
    made.wait_until_up()
    assert show(made).status == 404
    assert make(made).status == 201


@pytest.mark.slow
def test_a_session_that_was_refused_can_be_made_again(made: Program, tmp_path: Path) -> None:
    """The store may take what it was sent after the client was refused. That is no session that is there already."""
    with locked(tmp_path / "store" / NAME):
        refused = make(made, metadata={"number": 1})
        assert (refused.status, refused.json()["error"]["type"]) == (503, "store_unreachable")
        assert show(made).status == 404
        assert call(f"{made.url}/generate", {"text": "Hello", "sampling_params": {"max_new_tokens": 2}}).status == 200
        assert make(made).status == 503
    until(lambda: "takes writes again" in made.log, "the store takes writes again")
    assert make(made, metadata={"number": 2}).status == 201
    assert chat(made).status == 200
    assert make(made, metadata={"number": 3}).status == 409
    made.kill()
    made.start()
    made.wait_until_up()
    found = show(made).json()
    assert (found["metadata"], found["num_generations"]) == ({"number": 2}, 1)
    assert names(made) == ["s"]


def generate(made: Program, name: str) -> Answer:
    body = {"text": f"Of {name}: ", "rid": name, "sampling_params": {"max_new_tokens": 3}}
    return call(f"{made.url}/generate", body, headers={"x-group-id": name, "x-group-size": "1"})


def reward(made: Program, name: str) -> Answer:
    return call(f"{made.url}/trajectories/reward", {"request_id": name, "reward": 1.0})


@pytest.mark.slow
def test_groups_wait_for_a_store_that_takes_nothing(made: Program, tmp_path: Path) -> None:
    """A claim hangs no trainer, and the reward of a reply that waits for the store is no unknown one."""
    assert generate(made, "early").status == 200
    assert reward(made, "early").status == 200
    with locked(tmp_path / "store" / NAME):
        late = generate(made, "late")
        assert (late.status, late.headers.get("x-radix-saved")) == (200, "no")
        for answer in (reward(made, "late"), call(f"{made.url}/trajectories/drop", {"group_id": "late"})):
            assert (answer.status, answer.json()["error"]["type"]) == (503, "store_unreachable"), answer.content
        refused = call(f"{made.url}/trajectories/claim", {"lease_seconds": 5}, timeout=20)
        assert (refused.status, refused.json()["error"]["type"]) == (503, "store_unreachable")
    until(lambda: "takes writes again" in made.log, "the store takes writes again")
    assert reward(made, "late").status == 200
    assert reward(made, "never").status == 404
    claims = [call(f"{made.url}/trajectories/claim", {"lease_seconds": 5}).json() for _ in range(2)]
    assert {group["group_id"] for claim in claims for group in claim["groups"]} == {"early", "late"}
