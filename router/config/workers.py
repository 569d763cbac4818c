"""The workers: which there are, how one is chosen, and how long it may take."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

from router.config.cache_aware import CacheAwareConfig
from router.config.flag import Section, flag
from router.config.health import BreakerConfig, HealthConfig
from router.config.retries import QueueConfig, RetryConfig
from router.errors import BadRequestError

POLICY_NAMES = "least_inflight round_robin random power_of_two consistent_hashing manual cache_aware".split()


@dataclass(frozen=True)
class WorkersConfig(Section):
    """The workers, how one is chosen, and how long it may take. Times are in seconds, None means no limit."""

    TITLE = "workers"

    urls: tuple[str, ...] = flag(
        "--worker-urls", (), "workers to begin with; more can be added at run time", metavar="URL", many=True
    )
    allow: tuple[str, ...] = flag(
        "--worker-allow", (), "network that workers may be in; repeatable", metavar="CIDR", unset="anywhere"
    )
    policy: str = flag(
        "--policy", "least_inflight", f"how to choose the worker for a request: {', '.join(POLICY_NAMES)}"
    )
    max_idle: float = flag("--max-idle-secs", 3600.0, "policy manual: how long to remember a key that is not used")
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
    fleet_timeout: float = flag(
        "--fleet-timeout",
        30.0,
        "how long each worker may take to answer a call to all of them; a transfer of weights may take as long as its worker"
        " answers probes, and this long after the last answer",
    )
    cache_aware: CacheAwareConfig = field(default_factory=CacheAwareConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    breaker: BreakerConfig = field(default_factory=BreakerConfig)
    retry: RetryConfig = field(default_factory=RetryConfig)
    queue: QueueConfig = field(default_factory=QueueConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.networks
        if not self.routes_by_prompt:
            if self.cache_aware.kv_events:
                raise BadRequestError(f"--kv-events is of --policy cache_aware, not {self.policy}")
            if self.cache_aware.snapshot is not None:
                raise BadRequestError(f"--policy-snapshot is of --policy cache_aware, not {self.policy}")

    @property
    def routes_by_prompt(self) -> bool:
        """Whether the policy looks at prompts."""
        return self.policy == "cache_aware"

    @property
    def networks(self) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
        """The networks that workers may be in; empty means any. Raise BadRequestError for an entry that is not one."""
        try:
            return tuple(ipaddress.ip_network(network) for network in self.allow)
        except ValueError as error:
            raise BadRequestError(f"--worker-allow must be a network like 10.0.0.0/8 or fd00::/8: {error}") from error
