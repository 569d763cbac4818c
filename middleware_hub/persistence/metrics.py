"""The metrics of the store, read when they are asked for."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from middleware_hub.persistence.memory import Memory


def register(registry: CollectorRegistry, memory: Memory) -> None:
    """Add the metrics of a memory and its store to GET /metrics."""
    registry.register(_StoreCollector(memory))


class _StoreCollector(Collector):
    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def collect(self) -> Iterable[Metric]:
        memory, saving, size = self._memory, self._memory.saving, self._memory.size
        replies = CounterMetricFamily(
            "tito_store_replies",
            "Replies by what became of them: saved before the client had all of it; unsaved at that time; lost, because there "
            "was no room for them or the store refused them",
            labels=["kind"],
        )
        for kind, count in (("saved", saving.saved), ("unsaved", saving.unsaved), ("lost", saving.lost)):
            replies.add_metric([kind], count)
        yield replies
        lookups = CounterMetricFamily(
            "tito_store_lookups",
            "Look-ups of texts in the store: found, nothing, known (no look-up was needed), or failed",
            labels=["result"],
        )
        for result in ("known", "nothing", "found", "failed"):
            lookups.add_metric([result], memory.lookups[result])
        yield lookups
        away = CounterMetricFamily(
            "tito_store_away_seconds",
            "Time for which the store did not answer, by operation",
            labels=["what"],
        )
        away.add_metric(["lookups"], saving.store.away_seconds)
        away.add_metric(["writes"], saving.away_seconds)
        yield away
        forgotten = CounterMetricFamily(
            "tito_store_forgotten",
            "Conversations forgotten for --store-max-bytes, by whether they had been retrieved",
            labels=["retrieved"],
        )
        forgotten.add_metric(["true"], memory.forgotten - memory.forgotten_unretrieved)
        forgotten.add_metric(["false"], memory.forgotten_unretrieved)
        yield forgotten
        for name, text, value in (
            ("restored_records", "Records that were put into the tree", memory.restored),
            ("wait_seconds", "Time from a reply's recording to its acknowledgement, summed", saving.seconds),
            ("handed_over", "Batches that waited for the store and were written to it later", saving.handed_over),
            ("appends", "Batches written since the start", size.appends),
            ("groups", "Groups of batches written since the start: one commit each", size.groups),
            ("cut_off", "Look-ups that left records out, because there were too many", size.cut_off),
            ("damaged", "Records that look-ups left out, because they cannot be read", size.damaged),
            ("conflicts", "Records whose id the store already had with different content", size.conflicts),
        ):
            yield CounterMetricFamily(f"tito_store_{name}", text, value=value)
        for name, text, gauge in (
            ("away", "1 while the store does not answer, or takes no writes", int(saving.away)),
            (
                "waiting",
                "Batches (replies, and events of sessions) that wait for the store to take writes",
                saving.waiting,
            ),
            ("waiting_bytes", "Bytes of those, in a file; see --store-spool-max-bytes", saving.waiting_bytes),
            (
                "held_bytes",
                "Bytes of those that are in memory only, because neither the store nor the spool has room for them: "
                "new requests are refused meanwhile",
                saving.held_bytes,
            ),
            ("bytes", "Bytes in the store; this and the number of records are at most some seconds old", size.bytes),
            ("records", "Records in the store", size.records),
        ):
            yield GaugeMetricFamily(f"tito_store_{name}", text, value=gauge)
