"""What each of several processes gets of the limits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from router.config import RouterConfig, ServerConfig, StoreConfig
from router.config.token_budget import token_budget
from router.config.workers import QueueConfig, WorkersConfig
from router.errors import BadRequestError
from router.policies.cache_aware import CacheAwareParameters
from router.processes.shares import config_of
from router.processes.supervisor import Backoff


def shares(count: int = 3, **sections: Any) -> list[RouterConfig]:
    server = replace(sections.pop("server", ServerConfig()), processes=count)
    config = RouterConfig(server=server, store=StoreConfig(url="sqlite:x"), **sections)
    return [config_of(config, number) for number in range(1, count + 1)]


def test_limits_are_divided_to_the_last_one() -> None:
    queue = QueueConfig(max_inflight=10, max_inflight_per_worker=4, size=2)
    found = shares(workers=WorkersConfig(queue=queue), server=ServerConfig(max_connections=100))
    assert [each.workers.queue.max_inflight for each in found] == [4, 3, 3]
    assert [each.workers.queue.max_inflight_per_worker for each in found] == [2, 1, 1]
    assert [each.workers.queue.size for each in found] == [1, 1, 0]
    assert [each.server.max_connections for each in found] == [34, 33, 33]


def test_memory_is_divided_also_where_no_flag_says_how_much() -> None:
    found = shares()
    assert sum(each.radix.token_budget for each in found) == token_budget(None)
    assert sum(each.sessions.token_budget for each in found) == token_budget(None)
    parameters = [
        cast(CacheAwareParameters, each.workers.parameters)
        for each in shares(workers=WorkersConfig(policy="cache_aware"))
    ]
    assert sum(each.max_tree_size for each in parameters) == CacheAwareParameters().max_tree_size


def test_what_has_no_limit_gets_none() -> None:
    for each in shares():
        assert each.workers.queue.max_inflight is None
        assert each.workers.queue.max_inflight_per_worker is None
        assert each.server.max_connections is None


def test_each_has_a_snapshot_of_its_own() -> None:
    cache = CacheAwareParameters(snapshot=Path("a/b.snapshot"))
    found = shares(workers=WorkersConfig(policy="cache_aware", parameters=cache))
    assert [str(cast(CacheAwareParameters, each.workers.parameters).snapshot) for each in found] == [
        "a/b.snapshot",
        "a/b.snapshot.2",
        "a/b.snapshot.3",
    ]


def test_each_has_a_name_of_its_own() -> None:
    assert [each.server.router_id for each in shares(2, server=ServerConfig(router_id="a"))] == ["a-1", "a-2"]
    assert [each.server.router_id for each in shares(2)] == [None, None]


def test_nothing_can_be_divided_among_more_than_it_is() -> None:
    with pytest.raises(BadRequestError, match="--max-inflight 2 is divided among --processes 3: it must be at least 3"):
        shares(workers=WorkersConfig(queue=QueueConfig(max_inflight=2)))


def test_one_that_dies_again_and_again_waits_longer() -> None:
    backoff = Backoff()
    assert [backoff.after(1.0) for _ in range(9)] == [0, 0.5, 1, 2, 4, 8, 16, 30, 30]
    assert backoff.after(100.0) == 0
    assert backoff.after(1.0) == 0.5
