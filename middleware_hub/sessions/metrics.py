"""The metrics of sessions."""

from __future__ import annotations

import logging
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge

from router.observability.tallies import CountTally, HistogramTally

logger = logging.getLogger(__name__)

_EVENTS = ("created", "finalized", "deleted", "expired", "expired_unexported", "evicted", "loaded")
_HELD = {
    "tito_sessions_open": "Sessions held",
    "tito_sessions_nodes": "Messages held by sessions",
    "tito_sessions_samples": "Sampled turns held by sessions",
    "tito_sessions_tokens": "Tokens held by sessions",
}


class SessionMetrics:
    """Counters of events, and gauges of what is held. What every turn counts is in tallies."""

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
        for event in _EVENTS:  # else no alert sees the first loss: a series that begins at 1 has not increased
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
