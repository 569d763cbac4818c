"""Trainers that claim at another router than that through which workflows sample."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from middleware_hub.client import Client
from router.config import StoreConfig
from tests.support.redis_server import empty_redis
from tests.support.stack import Stack, stack

FEW = {"max_new_tokens": 4}
QUESTION = "Question: why?\n"


@pytest.fixture(params=["sqlite", "redis"])
def routers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Stack, Stack]]:
    address = empty_redis() if request.param == "redis" else f"sqlite:{tmp_path}/store.sqlite3"
    with ExitStack() as entered:
        one, two = (
            entered.enter_context(stack("qwen", styles=("cumulative",), store=StoreConfig(url=address)))
            for _ in range(2)
        )
        yield one, two


@pytest.fixture
def clients(routers: tuple[Stack, Stack], space: str) -> Iterator[tuple[Client, Client]]:
    with ExitStack() as entered:
        workflow, trainer = (entered.enter_context(Client(one.url, namespace=space)) for one in routers)
        yield workflow, trainer


def give_weights(routers: tuple[Stack, Stack], version: str) -> None:
    """Update all workers, which the routers share, directly."""
    for one in routers:
        one.set_weight_version(version)


def test_a_router_that_samples_nothing_knows_what_is_stale(
    routers: tuple[Stack, Stack], clients: tuple[Client, Client]
) -> None:
    """The workers were updated directly, so only the replies at the other router have shown the new version."""
    workflow, trainer = clients
    give_weights(routers, "1")
    reply = workflow.generate(QUESTION, FEW, group_id="g", group_size=1, rollout_end=True)
    claim = trainer.claim(max_staleness=0)
    assert len(claim) == 1
    trainer.release(claim)
    give_weights(routers, "2")
    workflow.generate("Anything else.\n", FEW)
    claim = trainer.claim(max_staleness=0)
    assert (len(claim), claim.filtered) == (0, {"stale": 1})
    found = trainer.retrieve(QUESTION + reply.text, expect_request_ids=[reply.id], max_staleness=0)
    assert found.stale_tokens == len(reply.output_ids)
    assert len(trainer.claim(max_staleness=1)) == 1
