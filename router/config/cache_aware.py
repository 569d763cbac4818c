"""The policy cache_aware: its thresholds and its memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from router.config.flag import FACTOR, NOT_NEGATIVE, SHARE, Section, flag


@dataclass(frozen=True)
class CacheAwareConfig(Section):
    """The parameters of the policy cache_aware. Times are in seconds.

    The fleet is out of balance where the busiest worker has more than `balance_abs` requests in flight above the idlest,
    and more than `balance_rel` times as many. `max_tree_size` holds for characters and ids each.
    """

    TITLE = "the policy cache_aware"

    threshold: float = flag(
        "--cache-threshold", 0.3, "choose a worker that has more than this share of a prompt cached", limit=SHARE
    )
    balance_abs: int = flag(
        "--balance-abs-threshold", 64, "requests by which the busiest worker may exceed the idlest", limit=NOT_NEGATIVE
    )
    balance_rel: float = flag(
        "--balance-rel-threshold", 1.5, "and the factor; above both, the least loaded worker is chosen", limit=FACTOR
    )
    eviction_interval: float = flag(
        "--eviction-interval-secs", 60.0, "time between two checks whether too much is remembered"
    )
    max_tree_size: int = flag("--max-tree-size", 1 << 26, "most characters, and most ids, of prompts to remember")
    snapshot: Path | None = flag(
        "--policy-snapshot", None, "file that keeps the memory over restarts, written at intervals and at the end"
    )
    snapshot_interval: float = flag("--policy-snapshot-interval-secs", 60.0, "time between two snapshots")
    kv_events: bool = flag(
        "--kv-events", False, "follow the cache events of workers that were started with --kv-events-config"
    )
