"""The workers: their addresses, the choice of one, their health, and requests that they did not serve, or aborted."""

from __future__ import annotations

import ipaddress
import math
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from router.config.flag import FACTOR, NOT_NEGATIVE, SHARE, UNLIMITED, Section, flag
from router.config.token_budget import reply_budget
from router.errors import BadRequestError

ENGINE_NAMES = ("sglang", "vllm")

DpRanks = Literal["auto", "off"]

MOST_RANKS = 1024
"""No engine has more data-parallel ranks behind one URL."""

_MILLISECONDS: dict[str, Any] = {"metavar": "MS", "scale": 1000, "limit": UNLIMITED}

_FULL_WORKERS = "full workers, and the queue"

_HEALTH = "the health of workers"


@dataclass(frozen=True)
class HealthConfig(Section):
    """How workers are probed. Times are in seconds, thresholds are probes in a row."""

    TITLE = _HEALTH

    interval: float = flag("--health-check-interval-secs", 10.0, "time between two probes of a worker")
    timeout: float = flag("--health-check-timeout-secs", 5.0, "how long a worker may take to answer a probe")
    failure_threshold: int = flag(
        "--health-failure-threshold", 3, "bad probes in a row after which a worker gets no more requests"
    )
    success_threshold: int = flag(
        "--health-success-threshold", 2, "good probes in a row after which a worker gets requests again"
    )
    version_gate: bool = flag(
        "--version-gate", False, "send nothing to a worker at another weight version than this router set last"
    )


@dataclass(frozen=True)
class BreakerConfig(Section):
    """The circuit breaker of each worker. `timeout` is in seconds, thresholds are requests in a row."""

    TITLE = _HEALTH

    failure_threshold: int = flag(
        "--cb-failure-threshold", 10, "requests in a row, failed by a worker's fault, that open its circuit breaker"
    )
    timeout: float = flag(
        "--cb-timeout-duration-secs", 60.0, "how long a breaker stays open before it lets a trial request through"
    )
    success_threshold: int = flag("--cb-success-threshold", 3, "good trial requests in a row that close a breaker")
    enabled: bool = flag("--disable-circuit-breaker", True, "find bad workers by probes alone")


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
        "--max-inflight-per-worker",
        None,
        "most requests at each worker, or at each of its ranks; others wait",
        unset="no limit",
    )
    size: int = flag("--queue-size", 100, "most requests that wait for room; one more gets 429", limit=NOT_NEGATIVE)
    timeout: float = flag("--queue-timeout-secs", 60.0, "how long a request may wait for room; then it gets 408")


_SCORER = re.compile(r"[a-z][a-z0-9_]{0,31}")
_SCORED_AT = re.compile(r"(vllm\+)?https?://[^/\s?#]+/*")


@dataclass(frozen=True)
class WorkersConfig(Section):
    """The workers, how one is chosen, and how long it may take. Times are in seconds, None means no limit."""

    TITLE = "workers"

    urls: tuple[str, ...] = flag(
        "--worker-urls", (), "workers to begin with; more can be added at run time", metavar="URL", many=True
    )
    dns: tuple[str, ...] = flag(
        "--worker-dns",
        (),
        "name whose addresses are workers, looked up again and again: a headless service; those that vanish drain; repeatable",
        metavar="NAME:PORT",
    )
    dns_interval: float = flag("--worker-dns-interval", 5.0, "time between two look-ups of such a name")
    allow: tuple[str, ...] = flag(
        "--worker-allow", (), "network that workers may be in; repeatable", metavar="CIDR", unset="anywhere"
    )
    apart: bool = flag(
        "--pd-disaggregation",
        False,
        "the workers prefill or decode, and each request goes to one of both; without it the workers that come decide that",
    )
    prefill: tuple[tuple[str, int | None], ...] = flag(
        "--prefill",
        (),
        "prefill worker, with the port where decode workers find it if it does not tell that; repeatable",
        metavar="URL [PORT]",
        many=True,
    )
    decode: tuple[str, ...] = flag("--decode", (), "decode worker; repeatable", metavar="URL", many=True)
    prefill_policy: str | None = flag(
        "--prefill-policy", None, "how to choose the prefill worker for a request", unset="that of --policy"
    )
    decode_policy: str | None = flag(
        "--decode-policy", None, "how to choose the decode worker for a request", unset="that of --policy"
    )
    policy: str = flag("--policy", "least_inflight", "how to choose the worker for a request")
    parameters: Section | None = None
    """Those of the policy (`router.policies.base.Parameters`); None if it has none, or for its defaults."""
    prefill_parameters: Section | None = None
    decode_parameters: Section | None = None
    engine: str = flag(
        "--engine",
        "auto",
        f"what the workers run: {', '.join(ENGINE_NAMES)}, or auto, which asks them; a fleet is of one engine",
    )
    dp_ranks: DpRanks = flag(
        "--dp-ranks",
        "auto",
        "auto: each data-parallel rank of a worker is a place to route to, with a load and a cache of its own; off: its"
        " engine chooses the rank",
    )
    ranks: tuple[str, ...] = flag(
        "--worker-ranks",
        (),
        "how many data-parallel ranks a worker has that cannot say so; repeatable",
        metavar="URL=N",
        unset="ask them",
    )
    incremental_streams: bool = flag(
        "--incremental-streaming-output",
        False,
        "streams of /generate hold only what is new in each event; SGLang's workers have a flag of their own for that",
    )
    scorers: tuple[str, ...] = flag(
        "--scorer",
        (),
        "model that only scores, by a name: a teacher, a reference (POST /trajectories/score); vllm+http://... is a vLLM;"
        " repeatable",
        metavar="NAME=URL",
    )
    score_timeout: float = flag("--score-timeout-secs", 600.0, "how long a scorer may take for one sequence")
    connect_timeout: float = flag("--connect-timeout-secs", 5.0, "how long connecting to a worker may take")
    probe_timeout: float = 2.0
    request_timeout: float | None = flag(
        "--request-timeout-secs",
        None,
        "how long a reply may take, or a stream until its first event, with pauses; then another worker is tried",
        unset="no limit",
    )
    stream_idle_timeout: float | None = flag(
        "--stream-idle-timeout-secs", None, "longest pause between two pieces of a reply", unset="no limit"
    )
    max_reply_bytes: int | None = flag(
        "--max-reply-bytes",
        None,
        "largest reply of a worker in one piece, and largest event of a stream; a larger one counts as broken off",
        unset="a sixteenth of the memory",
    )
    fleet_timeout: float = flag(
        "--fleet-timeout",
        30.0,
        "how long each worker may take to answer a call to all of them; a transfer of weights may take as long as its worker"
        " answers probes, and this long after the last answer; one that is quarantined already has 3 s",
    )
    health: HealthConfig = field(default_factory=HealthConfig)
    breaker: BreakerConfig = field(default_factory=BreakerConfig)
    retry: RetryConfig = field(default_factory=RetryConfig)
    queue: QueueConfig = field(default_factory=QueueConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.networks, self.given_ranks, self.scorer_urls
        for name in ("prefill", "decode", "prefill_policy", "decode_policy"):
            if getattr(self, name) and not self.apart:
                raise BadRequestError(f"--{name.replace('_', '-')} is of a router with --pd-disaggregation")
        if self.engine not in ("auto", *ENGINE_NAMES):
            raise BadRequestError(f"--engine must be one of auto, {', '.join(ENGINE_NAMES)}, not {self.engine}")

    @property
    def reply_budget(self) -> int:
        """`max_reply_bytes`, or a sixteenth of the memory."""
        return reply_budget(self.max_reply_bytes)

    @property
    def given_ranks(self) -> dict[str, int]:
        """The numbers of ranks that are not to be asked for, by URL as it was given. Raise BadRequestError for a bad entry."""
        found: dict[str, int] = {}
        for entry in self.ranks:
            url, equals, count = entry.rpartition("=")
            if not (url and equals and count.isascii() and count.isdigit() and 0 < int(count) <= MOST_RANKS):
                raise BadRequestError(f"--worker-ranks must be like http://10.0.0.1:8000=4, not {entry}")
            found[url] = int(count)
        return found

    @property
    def scorer_urls(self) -> dict[str, str]:
        """The URLs of scorers by name. Raise BadRequestError for a bad entry: names are parts of fields."""
        found: dict[str, str] = {}
        for entry in self.scorers:
            name, _, url = entry.partition("=")
            # `ref_top_logprobs` are the likeliest tokens of `ref`.
            taken = name in (*found, "response") or name.endswith("_top")
            if not _SCORER.fullmatch(name) or taken or not _SCORED_AT.fullmatch(url):
                raise BadRequestError(
                    f"--scorer must be like teacher=http://10.0.0.1:30000 or ref=vllm+http://10.0.0.2:8000, each name once, "
                    f"in small letters, digits and _, not ending with _top, not {entry}"
                )
            found[name] = url.rstrip("/")
        return found

    @property
    def networks(self) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
        """The networks that workers may be in; empty means any. Raise BadRequestError for an entry that is not one."""
        try:
            return tuple(ipaddress.ip_network(network) for network in self.allow)
        except ValueError as error:
            raise BadRequestError(f"--worker-allow must be a network like 10.0.0.0/8 or fd00::/8: {error}") from error


AbortPolicy = Literal["retry", "return"]


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
