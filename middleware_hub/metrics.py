"""The metrics of the hub: of the radix tree, of groups, and of sessions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge
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


logger = logging.getLogger(__name__)

_SESSION_EVENTS = ("created", "finalized", "deleted", "expired", "expired_unexported", "evicted", "loaded")
_HELD = {
    "tito_sessions_open": "Sessions held",
    "tito_sessions_nodes": "Messages held by sessions",
    "tito_sessions_samples": "Sampled turns held by sessions",
    "tito_sessions_tokens": "Tokens held by sessions",
}


class SessionMetrics:
    """Counters of events, and gauges of the tokens, messages and samples held. Tallies count what happens at every turn."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.sessions = Counter(
            "tito_sessions_total",
            "Sessions by what became of them: created, finalized, deleted, expired (expired_unexported: with samples that "
            "were not exported), evicted (finalized, and there was no room; with a store: any that was not in use), loaded "
            "(from the store)",
            ("event",),
            registry=registry,
        )
        for event in _SESSION_EVENTS:  # else no alert sees the first loss: a series that begins at 1 has not increased
            self.sessions.labels(event)
        self.turns = CountTally(
            registry,
            "tito_session_turns",
            "Prompts of chats by how they were made: first (nothing sampled before), continued, spliced and anew (for the "
            "reason given), and remarks about them: ambiguous, unknown_parent, left_out, rendered_whole, setting, "
            "system_in_place, arguments_text, prefix_changed, template_mismatch, edited_turn (stripped, reasoning, calls, "
            "edited; rewritten: nothing of the sampled turn is left)",
            ("kind", "reason"),
        )
        self.tokens = CountTally(
            registry,
            "tito_session_tokens",
            "Tokens of chats by what became of them: reused from a checkpoint (spliced: in a new rendering), encoded, "
            "sampled and committed",
            ("kind",),
        )
        self.spliced_turns = Counter(
            "tito_spliced_turns_total",
            "Earlier turns that kept their ids in a new rendering of their conversation",
            registry=registry,
        )
        self.fallbacks = Counter(
            "tito_splice_fallbacks_total",
            "Attempts to splice in which not all earlier turns kept their ids, by why: divergence (another text stands between "
            "them), scaffold, sentinel_collision, unfaithful, template_error",
            ("reason",),
            registry=registry,
        )
        self.replies = CountTally(
            registry,
            "tito_session_replies",
            "Generations of sessions by whether they were recorded (exact, inexact, no), and why not",
            ("recorded", "reason"),
        )
        self.resent = Counter(
            "tito_session_resent_requests_total",
            "Requests that were sent again, by what they got: adopted (an orphan), replayed (a reply that is kept)",
            ("kind",),
            registry=registry,
        )
        self.unsaved = Counter(
            "tito_session_unsaved_total",
            "Events of sessions that the store did not take when they happened; they are handed over when it does",
            registry=registry,
        )
        self.seconds = HistogramTally(
            registry,
            "tito_session_step_seconds",
            "Time a turn spends in each step: prepare, tokenize, generate (of each sample; waiting for a worker counts) and "
            "commit (of each reply that came)",
            ("step",),
            (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
        )

    def expired(self, session_id: str, ttl: float, *, lost: bool) -> None:
        """Count a session whose time to live is over; `lost`: it had samples that no client got, which the log says."""
        self.sessions.labels("expired_unexported" if lost else "expired").inc()
        if lost:
            logger.warning(
                "session %s was forgotten after %g s without a request, before it was exported", session_id, ttl
            )

    def watch(self, *held: Callable[[], float]) -> None:
        """Register gauges that read how many sessions, messages, sampled turns and tokens are held."""
        for (name, text), read in zip(_HELD.items(), held, strict=True):
            Gauge(name, text, registry=self._registry).set_function(read)
