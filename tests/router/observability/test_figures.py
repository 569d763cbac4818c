"""What is counted somewhere arrives in the metrics, and what is not counted yet is there as 0."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry, generate_latest

from router.http.request_state import RequestPhase, RequestRecord
from router.kv_cache.index import KvIndex
from router.kv_cache.subscriptions import KvSubscriptions
from router.observability.kv_metrics import KvCollector
from router.observability.metrics import RouterMetrics
from router.peers.peers import PeersCollector
from tests.router.peers.fleets import routers
from tests.support.dictionary_store import DictionaryStore


def test_outcomes_of_generations_are_there_from_the_start() -> None:
    registry = CollectorRegistry()
    RouterMetrics(registry)
    shown = generate_latest(registry).decode()
    for outcome in ("answered", "failed", "orphaned"):
        assert f'tito_router_generations_total{{outcome="{outcome}"}} 0.0' in shown


def test_kv_events_that_were_skipped_are_counted_with_those_that_were_missed() -> None:
    registry, index = CollectorRegistry(), KvIndex()
    subscriptions = KvSubscriptions(index)
    registry.register(KvCollector(index, subscriptions))
    index.counts["unknown_parent"] += 2
    subscriptions.counts["gaps"] += 1
    shown = generate_latest(registry).decode()
    assert 'tito_router_kv_events_total{kind="unknown_parent"} 2.0' in shown
    assert 'tito_router_kv_events_total{kind="gaps"} 1.0' in shown


def test_a_router_that_cannot_reach_the_others_counts_itself_alone() -> None:
    async def main() -> None:
        async with routers(2, DictionaryStore()) as (one, _):
            registry = CollectorRegistry()
            registry.register(PeersCollector(one.peers))
            await one.peers.list()
            assert "tito_router_routers 2.0" in generate_latest(registry).decode()
            assert one.channel is not None
            one.channel.away = True
            assert not await one.peers.catch_up()
            assert "tito_router_routers 1.0" in generate_latest(registry).decode()
            one.channel.away = False

    asyncio.run(main())


def test_a_request_counts_its_attempts() -> None:
    record = RequestRecord("id", "POST", "/generate")
    for url in ("http://a:1", "http://b:1"):
        record.sent_to(url)
    assert (record.attempts, record.worker, record.phase) == (2, "http://b:1", RequestPhase.AT_WORKER)
