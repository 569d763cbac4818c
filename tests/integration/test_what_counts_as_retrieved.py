"""What a client has taken away is forgotten first: each call that returns sampled tokens is noted in the store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from middleware_hub.client import Client
from middleware_hub.store.protocol import Forgotten, Store
from router.config import StoreConfig
from tests.middleware_hub.store.world import with_store
from tests.support.client import call, stream
from tests.support.lives import Router
from tests.support.redis_server import empty_redis
from worker.worker import EmbeddedWorker

SHORT = {"max_new_tokens": 6}


@pytest.fixture(scope="module")
def worker() -> Iterator[EmbeddedWorker]:
    with EmbeddedWorker(token_delay=0) as running:
        yield running


def say(url: str, text: str, **body: Any) -> Any:
    answer = call(f"{url}/generate", {"text": text, "sampling_params": SHORT, **body})
    assert answer.status == 200, answer.content
    return answer.json()


def nothing(url: str) -> None:
    say(url, "Once upon")


def retrieval(url: str) -> None:
    text = "Once upon" + say(url, "Once upon")["text"]
    assert call(f"{url}/retrieve_from_text", {"text": text}).status == 200


def cover(url: str) -> None:
    first, second = say(url, "Once upon"), say(url, "And another")
    asked = {
        "text": "Once upon" + first["text"],
        "cover": True,
        "expect_request_ids": [one["meta_info"]["id"] for one in (first, second)],
    }
    answer = call(f"{url}/retrieve_from_text", asked)
    assert len(answer.json()["trajectories"]) == 2, answer.content


def trajectory(url: str) -> None:
    say(url, "Once upon", return_trajectory=True)


def trajectories(url: str) -> None:
    say(url, ["Once upon", "And another"], return_trajectory=True)


def streamed(url: str) -> None:
    body = {"text": "Once upon", "sampling_params": SHORT, "stream": True, "return_trajectory": True}
    *_, last = stream(f"{url}/generate", body)
    assert "trajectory" in last["meta_info"]


def forgotten(address: str) -> tuple[int, int]:
    """Forget everything; return how many conversations were retrieved, and how many were not."""

    async def all_of_it(store: Store) -> Forgotten:
        return await store.forget(0)

    gone = with_store(address, all_of_it, None)
    return gone.retrieved, gone.unretrieved


def address_of(kind: str, folder: Path) -> str:
    return f"sqlite:{folder}" if kind == "sqlite" else empty_redis()


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
@pytest.mark.parametrize(
    ("ask", "retrieved", "unretrieved"),
    [(nothing, 0, 1), (retrieval, 1, 0), (cover, 2, 0), (trajectory, 1, 0), (trajectories, 2, 0), (streamed, 1, 0)],
)
def test_conversations_whose_tokens_a_client_got_go_first(
    worker: EmbeddedWorker, tmp_path: Path, kind: str, ask: Callable[[str], None], retrieved: int, unretrieved: int
) -> None:
    address = address_of(kind, tmp_path)
    router = Router(worker, StoreConfig(url=address))
    try:
        ask(router.stack.url)
    finally:
        router.stop()
    assert forgotten(address) == (retrieved, unretrieved)


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_samples_that_are_acknowledged_at_another_router_go_first(
    worker: EmbeddedWorker, tmp_path: Path, kind: str
) -> None:
    """The router that is told has never had their replies in memory."""
    address = address_of(kind, tmp_path)
    one, two = (Router(worker, StoreConfig(url=address)) for _ in range(2))
    try:
        with Client(one.stack.url) as workflow, Client(two.stack.url) as other:
            for group in ("kept", "left"):
                workflow.generate(f"Of {group}: ", SHORT, group_id=group, group_size=1, rollout_end=True)
            assert other.acknowledge(workflow.claim(groups=1)) == 1
    finally:
        one.stop()
        two.stop()
    assert forgotten(address) == (1, 1)
