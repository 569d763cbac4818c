"""Requests that a worker did not serve: retries, the queue, and aborted generations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from router.config.flag import FACTOR, NOT_NEGATIVE, SHARE, UNLIMITED, Section, flag
from router.errors import BadRequestError

AbortPolicy = Literal["retry", "return"]

_MILLISECONDS: dict[str, Any] = {"metavar": "MS", "scale": 1000, "limit": UNLIMITED}

_FULL_WORKERS = "full workers, and the queue"


@dataclass(frozen=True)
class RetryConfig(Section):
    """How often a request that met a full worker (429, 503) is sent, and the waits in between, in seconds.

    Each wait is `multiplier` times the one before it, `longest_wait` at most, and varies at random by the share `jitter`.
    With `enabled` False, `attempts` is 1.
    """

    TITLE = _FULL_WORKERS

    attempts: int = flag("--retry-max-retries", 5, "attempts in all at workers that answer 429 or 503")
    first_wait: float = flag("--retry-initial-backoff-ms", 0.05, "wait before the second attempt", **_MILLISECONDS)
    longest_wait: float = flag(
        "--retry-max-backoff-ms", 30.0, "longest wait, also where a worker's retry-after asks for more", **_MILLISECONDS
    )
    multiplier: float = flag("--retry-backoff-multiplier", 1.5, "factor from each wait to the next", limit=FACTOR)
    jitter: float = flag("--retry-jitter-factor", 0.2, "share by which a wait varies at random", limit=SHARE)
    enabled: bool = flag(
        "--disable-retries", True, "pass a 429 or 503 of a worker on; requests without a reply still go elsewhere"
    )

    def __post_init__(self) -> None:
        if not self.enabled:
            object.__setattr__(self, "attempts", 1)
        super().__post_init__()
        if not 0 <= self.first_wait <= self.longest_wait < math.inf:
            raise BadRequestError("--retry-initial-backoff-ms must be 0 to --retry-max-backoff-ms")


@dataclass(frozen=True)
class QueueConfig(Section):
    """How many requests are sent to workers at a time, and how many wait for room. None means no limit."""

    TITLE = _FULL_WORKERS

    max_inflight: int | None = flag("--max-inflight", None, "most requests at all workers together", unset="no limit")
    max_inflight_per_worker: int | None = flag(
        "--max-inflight-per-worker", None, "most requests at each worker; others wait", unset="no limit"
    )
    size: int = flag("--queue-size", 100, "most requests that wait for room; one more gets 429", limit=NOT_NEGATIVE)
    timeout: float = flag("--queue-timeout-secs", 60.0, "how long a request may wait for room; then it gets 408")


@dataclass(frozen=True)
class AbortConfig(Section):
    """Whether an aborted generation is sent again (`attempts` in all, `wait` seconds apart) or returned as it is."""

    TITLE = "aborted generations"

    policy: AbortPolicy = flag(
        "--abort-policy", "retry", "what to do with aborted generations; x-abort-policy overrules it for one request"
    )
    attempts: int = flag("--abort-retries", 5, "attempts in all, with the first one")
    wait: float = flag(
        "--abort-retry-wait", 30.0, "time between attempts; best as long as a weight update takes", limit=NOT_NEGATIVE
    )
