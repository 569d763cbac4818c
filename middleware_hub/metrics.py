"""The metrics of the radix-tree middleware."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from middleware_hub.radix.tree import RadixTree
from router.observability.tallies import CountTally, HistogramTally

REASONS = ("version", "least_recently_hit", "never_retrieved", "abandoned")
"""Why replies are evicted. Each has a series from the start, so that alerts on it work."""


class RadixMetrics:
    """Counters of requests and replies, and a collector that reads the tree's own counts."""

    def __init__(self, registry: CollectorRegistry, tree: RadixTree) -> None:
        self.replies = CountTally(
            registry,
            "tito_radix_replies",
            "Replies of /generate by whether they were recorded (exact, inexact, no), and why not, as x-radix-recorded says",
            ("recorded", "reason"),
        )
        self._tokens = CountTally(
            registry,
            "tito_radix_tokens",
            "Tokens by what became of them: prompt tokens reused from memory or encoded, tokens sampled and recorded",
            ("kind",),
        )
        for kind in ("reused", "encoded", "sampled"):
            self._tokens.counts[kind,] = 0
        self._matches = CountTally(
            registry,
            "tito_radix_matches",
            "Prompts by how they were matched (continued, fresh), and remarks about them (cut_in_token, "
            "tail_left_out, ambiguous_parent, unknown_parent)",
            ("kind",),
        )
        self.retrievals = Counter(
            "tito_radix_retrievals_total", "Texts retrieved, by whether they were exact", ("exact",), registry=registry
        )
        self.retrieval_reasons = Counter(
            "tito_radix_retrieval_reasons_total",
            "Texts retrieved, by the reasons in the answer (unknown_reply, unknown_parent, retokenized, ...)",
            ("reason",),
            registry=registry,
        )
        self._staleness = HistogramTally(
            registry,
            "tito_radix_staleness_versions",
            "Weight versions between the oldest token of a reply and the current version when the reply was recorded",
            (),
            (0, 1, 2, 3, 5, 8, 13),
        )
        registry.register(_TreeCollector(tree))

    def prompted(self, reused: int, encoded: int, *kinds: str) -> None:
        """Count the tokens of a prompt. `kinds`: how it was matched, and the reasons of its match."""
        self._tokens.counts["reused",] += reused
        self._tokens.counts["encoded",] += encoded
        for kind in kinds:
            self._matches.counts[kind,] += 1

    def recorded(self, tokens: int, staleness: int) -> None:
        """Count the tokens of a recorded reply; `staleness` in weight versions."""
        self._tokens.counts["sampled",] += tokens
        self._staleness.observe((), staleness)


class _TreeCollector(Collector):
    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree

    def collect(self) -> Iterable[Metric]:
        stats = self._tree.stats
        for name, text, value in (
            ("held_tokens", "Tokens held", stats.tokens),
            ("generations", "Replies held", stats.generations),
            ("nodes", "Nodes of the tree", stats.nodes),
            ("bytes", "Bytes held, estimated from the counts", self._tree.estimated_bytes),
        ):
            yield GaugeMetricFamily(f"tito_radix_{name}", text, value=value)
        evicted = CounterMetricFamily(
            "tito_radix_evictions",
            "Replies collected, by reason: version or least_recently_hit; of these also never_retrieved, or "
            "abandoned where --radix-unretrieved-versions gave them up",
            labels=["reason"],
        )
        for reason in REASONS:
            evicted.add_metric([reason], stats.evicted[reason])
        yield evicted
        extras = CounterMetricFamily(
            "tito_radix_extras",
            "Per-token fields of recorded replies (routed_experts, indexer_topk, top_p), by what became of them: kept, "
            "shape (dropped: not the number of rows or tokens that the reply has), or evicted (over 1 GiB, without a store)",
            labels=["field", "outcome"],
        )
        for (name, outcome), count in self._tree.extras.counts.items():
            extras.add_metric([name, outcome], count)
        yield extras


class GroupsCollector(Collector):
    """The content of groups, and what trainers do with it.

    Args:
        counts: members and samples by outcome.
        held: returns the number of groups and of their members.
    """

    def __init__(self, counts: Mapping[str, int], held: Callable[[], tuple[int, int]]) -> None:
        self._counts = counts
        self._held = held

    def collect(self) -> Iterable[Metric]:
        members = CounterMetricFamily(
            "tito_groups_members",
            "Replies and sessions in groups, by what became of them: joined; dropped (by a client, or deleted), or evicted "
            "(too many waited)",
            labels=["event"],
        )
        samples = CounterMetricFamily(
            "tito_groups_samples",
            "Samples of groups, by what became of them: claimed (of these expired: from a trainer whose lease was over), "
            "acknowledged, released, or lost (their tokens were gone)",
            labels=["event"],
        )
        for family, events in (
            (members, ("joined", "dropped", "evicted")),
            (samples, ("claimed", "expired", "acknowledged", "released", "lost")),
        ):
            for event in events:
                family.add_metric([event], self._counts.get(event, 0))
            yield family
        groups, held = self._held()
        yield GaugeMetricFamily(
            "tito_groups_waiting", "Groups that are not settled, as of the last claim", value=groups
        )
        text = "Replies and sessions of these that wait for a trainer, or that one holds"
        yield GaugeMetricFamily("tito_groups_waiting_members", text, value=held)
