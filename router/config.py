"""All that can be configured: frozen dataclasses, made once by the command line, checked once, passed in slices."""

from __future__ import annotations

import ipaddress
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from router.errors import BadRequestError

RADIX_TREE_MIDDLEWARE = "middleware_hub.radix_tree_middleware:RadixTreeMiddleware"
SESSIONS_MIDDLEWARE = "middleware_hub.sessions_middleware:SessionsMiddleware"

CALL_PARSERS = ("hermes", "qwen-coder", "llama3", "glm", "deepseek", "harmony", "gemma4", "none")
"""Named parsers of tool calls; `auto` is one of them, and SGLang's own names for them are understood as well."""
REASONING_PARSERS = ("think", "gemma4", "harmony", "none")

_BYTES_PER_TOKEN = 16
"""What a cached token costs with all that belongs to it: 8 of id and logprob, about 4 of text, the rest of bookkeeping."""

AbortPolicy = Literal["retry", "return"]
LogFormat = Literal["text", "json"]
SpecialTokens = Literal["auto", "always", "never"]
TokenizerBackend = Literal["auto", "huggingface", "fastokens"]
History = Literal["keep", "template"]


@dataclass(frozen=True)
class ServerConfig:
    """Where to listen, and what to accept."""

    host: str = "127.0.0.1"
    port: int = 30000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_keys: tuple[str, ...] = field(default=(), repr=False)
    insecure: bool = False
    max_body_bytes: int = 32 * 1024 * 1024
    body_timeout: float = 30.0
    max_header_bytes: int = 64 * 1024
    max_connections: int | None = None  # None: what the process may have open
    idle_timeout: int = 120
    max_batch: int = 8192
    shutdown_grace: float = 180.0
    log_level: str = "info"
    log_format: LogFormat = "text"

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise BadRequestError(f"--port must be 0 to 65535, not {self.port}")
        if self.max_body_bytes < 1:
            raise BadRequestError(f"--max-body-bytes must be at least 1, not {self.max_body_bytes}")
        if self.max_header_bytes < 1024:
            raise BadRequestError(f"--max-header-bytes must be at least 1024, not {self.max_header_bytes}")
        if self.max_connections is not None:
            _at_least_one("--max-connections", self.max_connections)
        _positive("--body-timeout-secs", self.body_timeout)
        _at_least_one("--idle-timeout-secs", self.idle_timeout)
        _at_least_one("--max-batch", self.max_batch)
        if self.shutdown_grace < 0:
            raise BadRequestError(f"--shutdown-grace must not be negative, got {self.shutdown_grace}")
        if not self.api_keys and not self.insecure and not _is_loopback(self.host):
            raise BadRequestError(
                f"--host {self.host} lets other machines in: set --api-key, or --insecure to let everybody in"
                + (" (--admin-key alone leaves generating free)" if self.admin_keys else "")
            )


def _positive(flag: str, seconds: float) -> None:
    if not 0 < seconds < math.inf:
        raise BadRequestError(f"{flag} must be a positive number, not {seconds}")


def _at_least_one(flag: str, count: int) -> None:
    if count < 1:
        raise BadRequestError(f"{flag} must be at least 1, not {count}")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True)
class HealthConfig:
    """How workers are probed. Times in seconds; thresholds are probes in a row."""

    interval: float = 10.0
    timeout: float = 5.0
    failure_threshold: int = 3
    success_threshold: int = 2
    version_gate: bool = False

    def __post_init__(self) -> None:
        _positive("--health-check-interval-secs", self.interval)
        _positive("--health-check-timeout-secs", self.timeout)
        _at_least_one("--health-failure-threshold", self.failure_threshold)
        _at_least_one("--health-success-threshold", self.success_threshold)


@dataclass(frozen=True)
class BreakerConfig:
    """The circuit breaker of each worker: failures in a row that open it, seconds until it is tried, successes to close it."""

    failure_threshold: int = 10
    success_threshold: int = 3
    timeout: float = 60.0
    enabled: bool = True

    def __post_init__(self) -> None:
        _at_least_one("--cb-failure-threshold", self.failure_threshold)
        _at_least_one("--cb-success-threshold", self.success_threshold)
        _positive("--cb-timeout-duration-secs", self.timeout)


@dataclass(frozen=True)
class RetryConfig:
    """What a full worker (429, 503) costs: `attempts` in all, with waits in seconds that grow and are spread by `jitter`."""

    attempts: int = 5
    first_wait: float = 0.05
    longest_wait: float = 30.0
    multiplier: float = 1.5
    jitter: float = 0.2

    def __post_init__(self) -> None:
        _at_least_one("--retry-max-retries", self.attempts)
        if not 0 <= self.first_wait <= self.longest_wait < math.inf:
            raise BadRequestError("--retry-initial-backoff-ms must be 0 to --retry-max-backoff-ms")
        if not 1 <= self.multiplier < math.inf:
            raise BadRequestError(f"--retry-backoff-multiplier must be at least 1, not {self.multiplier}")
        if not 0 <= self.jitter <= 1:
            raise BadRequestError(f"--retry-jitter-factor must be 0 to 1, not {self.jitter}")


@dataclass(frozen=True)
class QueueConfig:
    """How much is sent to the workers at once, and what may wait for that. None: no limit."""

    max_inflight: int | None = None
    max_inflight_per_worker: int | None = None
    size: int = 100
    timeout: float = 60.0

    def __post_init__(self) -> None:
        for flag, value in (
            ("--max-inflight", self.max_inflight),
            ("--max-inflight-per-worker", self.max_inflight_per_worker),
        ):
            if value is not None:
                _at_least_one(flag, value)
        if self.size < 0:
            raise BadRequestError(f"--queue-size must not be negative, got {self.size}")
        _positive("--queue-timeout-secs", self.timeout)


@dataclass(frozen=True)
class CacheAwareConfig:
    """The policy `cache_aware`: the share of a prompt that has to be cached, and what the fleet being out of balance is.

    Requests in flight are out of balance where the most are more than `balance_abs` above the least, and more than
    `balance_rel` times as many. A tree is cut back to `max_tree_size` characters (or ids) every `eviction_interval` seconds,
    and written to `snapshot` every `snapshot_interval` seconds.
    """

    threshold: float = 0.3
    balance_abs: int = 64
    balance_rel: float = 1.5
    eviction_interval: float = 60.0
    max_tree_size: int = 1 << 26
    snapshot: Path | None = None
    snapshot_interval: float = 60.0
    kv_events: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise BadRequestError(f"--cache-threshold must be 0 to 1, not {self.threshold}")
        if self.balance_abs < 0:
            raise BadRequestError(f"--balance-abs-threshold must not be negative, got {self.balance_abs}")
        if not 1 <= self.balance_rel < math.inf:
            raise BadRequestError(f"--balance-rel-threshold must be at least 1, not {self.balance_rel}")
        _positive("--eviction-interval-secs", self.eviction_interval)
        _positive("--policy-snapshot-interval-secs", self.snapshot_interval)
        _at_least_one("--max-tree-size", self.max_tree_size)


@dataclass(frozen=True)
class WorkersConfig:
    """The workers, how one is chosen, and what is held against one. Times in seconds, None for ever."""

    urls: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    policy: str = "least_inflight"
    max_idle: float = 3600.0
    connect_timeout: float = 5.0
    probe_timeout: float = 2.0
    request_timeout: float | None = None
    stream_idle_timeout: float | None = None
    fleet_timeout: float = 30.0
    health: HealthConfig = field(default_factory=HealthConfig)
    breaker: BreakerConfig = field(default_factory=BreakerConfig)
    retry: RetryConfig = field(default_factory=RetryConfig)
    queue: QueueConfig = field(default_factory=QueueConfig)
    cache_aware: CacheAwareConfig = field(default_factory=CacheAwareConfig)

    def __post_init__(self) -> None:
        _ = self.networks
        for flag, given in (
            ("--kv-events", self.cache_aware.kv_events),
            ("--policy-snapshot", self.cache_aware.snapshot is not None),
        ):
            if given and not self.routes_by_prompt:
                raise BadRequestError(f"{flag} is of --policy cache_aware, not {self.policy}")
        _positive("--max-idle-secs", self.max_idle)
        _positive("--connect-timeout-secs", self.connect_timeout)
        _positive("--fleet-timeout", self.fleet_timeout)
        for flag, value in (
            ("--request-timeout-secs", self.request_timeout),
            ("--stream-idle-timeout-secs", self.stream_idle_timeout),
        ):
            if value is not None:
                _positive(flag, value)

    @property
    def routes_by_prompt(self) -> bool:
        """Whether the policy looks at prompts."""
        return self.policy == "cache_aware"

    @property
    def networks(self) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
        """Where workers may be; everywhere if there are none. BadRequestError for what is no network."""
        try:
            return tuple(ipaddress.ip_network(network) for network in self.allow)
        except ValueError as error:
            raise BadRequestError(f"--worker-allow must be a network like 10.0.0.0/8 or fd00::/8: {error}") from error


@dataclass(frozen=True)
class AbortConfig:
    """A generation that a worker aborted is retried (`attempts` in all, `wait` seconds apart) or returned."""

    policy: AbortPolicy = "retry"
    attempts: int = 5
    wait: float = 30.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.wait < 0:
            raise BadRequestError("--abort-retries must be at least 1 and --abort-retry-wait not negative")


_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Of version 2, and of version 1, as a container sees its own."""


def _memory() -> int:
    """Bytes that this process may come to have: of the machine, or of its container if that is less."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _CGROUP_LIMITS:
        try:
            limit = Path(path).read_text().strip()
        except OSError:
            continue
        if limit.isdigit():  # else it is `max`
            found = min(found, int(limit))
    return found


def _fitting() -> int:
    """Tokens that fit into a quarter of the memory."""
    return _memory() // 4 // _BYTES_PER_TOKEN


@dataclass(frozen=True)
class RadixConfig:
    """The memory of the middleware."""

    tokenizer_path: str | None = None
    trust_remote_code: bool = False
    max_tokens: int | None = None  # None: a quarter of the memory
    keep_versions: int = 5
    unretrieved_versions: int | None = None  # None: what nobody retrieved goes last, however old
    force_logprobs: bool = True
    add_special_tokens: SpecialTokens = "auto"
    max_text_tokens: int = 512 * 1024
    tokenizer_backend: TokenizerBackend = "auto"

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise BadRequestError(f"--radix-max-tokens must be at least 1, not {self.max_tokens}")
        if self.keep_versions < 0:
            raise BadRequestError(f"--radix-keep-versions must not be negative, got {self.keep_versions}")
        _at_least_one("--max-text-tokens", self.max_text_tokens)
        if self.unretrieved_versions is not None:
            _at_least_one("--radix-unretrieved-versions", self.unretrieved_versions)

    @property
    def token_budget(self) -> int:
        """`max_tokens`, or what fits into a quarter of the memory of the machine, or of the container."""
        return _fitting() if self.max_tokens is None else self.max_tokens


@dataclass(frozen=True)
class SessionsConfig:
    """Agent sessions. Times in seconds; None: of the model's own, or what fits."""

    ttl: float = 21_600.0
    max_tokens: int | None = None  # None: a quarter of the memory
    max_context: int | None = None
    history: History = "keep"
    verify_rate: float = 0.01
    orphan_grace: float = 30.0
    match: str = "canonical"
    implicit: bool = False
    chat_template: str | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"

    def __post_init__(self) -> None:
        _positive("--session-ttl-secs", self.ttl)
        for flag, value in (("--session-max-tokens", self.max_tokens), ("--max-context", self.max_context)):
            if value is not None:
                _at_least_one(flag, value)
        if not 0 <= self.verify_rate <= 1:
            raise BadRequestError(f"--verify-rate must be 0 to 1, not {self.verify_rate}")
        if not 0 <= self.orphan_grace < math.inf:
            raise BadRequestError(f"--orphan-grace must be 0 seconds or more, not {self.orphan_grace}")

    @property
    def token_budget(self) -> int:
        """`max_tokens`, or what fits into a quarter of the memory of the machine, or of the container."""
        return _fitting() if self.max_tokens is None else self.max_tokens


@dataclass(frozen=True)
class TraceConfig:
    """Whether spans are exported, and where to: HOST:PORT, or a URL. None leaves it to the exporter."""

    enabled: bool = False
    endpoint: str | None = None

    def __post_init__(self) -> None:
        try:
            _ = self.url
        except ValueError as error:
            raise BadRequestError(
                f"--otlp-traces-endpoint must be HOST:PORT or an http URL, not {self.endpoint!r}"
            ) from error

    @property
    def url(self) -> str | None:
        """Where spans are posted to. A URL without a path gets the one of the standard."""
        if self.endpoint is None:
            return None
        url = self.endpoint if "://" in self.endpoint else f"http://{self.endpoint}"
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError(url)
        return url if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}/v1/traces"


@dataclass(frozen=True)
class RouterConfig:
    """All of it."""

    server: ServerConfig = field(default_factory=ServerConfig)
    workers: WorkersConfig = field(default_factory=WorkersConfig)
    abort: AbortConfig = field(default_factory=AbortConfig)
    radix: RadixConfig = field(default_factory=RadixConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    sessions: SessionsConfig = field(default_factory=SessionsConfig)
    middlewares: tuple[str, ...] = (SESSIONS_MIDDLEWARE, RADIX_TREE_MIDDLEWARE)
