"""The configuration: frozen dataclasses, made once, checked when they are made, and passed on in sections."""

from __future__ import annotations

from dataclasses import dataclass, field

from router.config.kv_salt import KvSaltConfig
from router.config.media import MediaConfig
from router.config.radix import RadixConfig, SpecialTokens, TokenizerBackend
from router.config.server import LogFormat, LogLevel, ServerConfig, TraceConfig
from router.config.sessions import CALL_PARSERS, REASONING_PARSERS, History, SessionsConfig
from router.config.store import Durability, StoreConfig
from router.config.workers import (
    AbortConfig,
    AbortPolicy,
    BreakerConfig,
    HealthConfig,
    QueueConfig,
    RetryConfig,
    WorkersConfig,
)
from router.errors import BadRequestError

__all__ = [
    "CALL_PARSERS",
    "MOVED",
    "RADIX_TREE_MIDDLEWARE",
    "REASONING_PARSERS",
    "SESSIONS_MIDDLEWARE",
    "AbortConfig",
    "AbortPolicy",
    "BreakerConfig",
    "Durability",
    "HealthConfig",
    "History",
    "KvSaltConfig",
    "LogFormat",
    "LogLevel",
    "MediaConfig",
    "QueueConfig",
    "RadixConfig",
    "RetryConfig",
    "RouterConfig",
    "ServerConfig",
    "SessionsConfig",
    "SpecialTokens",
    "StoreConfig",
    "TokenizerBackend",
    "TraceConfig",
    "WorkersConfig",
]

RADIX_TREE_MIDDLEWARE = "middleware_hub.radix_tree_middleware:RadixTreeMiddleware"
SESSIONS_MIDDLEWARE = "middleware_hub.sessions_middleware:SessionsMiddleware"
INSPECTOR = "middleware_hub.inspector.middleware:Inspector"
MOVED = {"middleware_hub.sessions.gateway:SessionsMiddleware": SESSIONS_MIDDLEWARE}
"""Former names of middlewares. Command lines that have them go on working."""


@dataclass(frozen=True)
class RouterConfig:
    """The whole configuration. `middlewares` are dotted paths, the outermost first."""

    server: ServerConfig = field(default_factory=ServerConfig)
    workers: WorkersConfig = field(default_factory=WorkersConfig)
    abort: AbortConfig = field(default_factory=AbortConfig)
    kv_salt: KvSaltConfig = field(default_factory=KvSaltConfig)
    radix: RadixConfig = field(default_factory=RadixConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    sessions: SessionsConfig = field(default_factory=SessionsConfig)
    media: MediaConfig = field(default_factory=MediaConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    middlewares: tuple[str, ...] = (SESSIONS_MIDDLEWARE, RADIX_TREE_MIDDLEWARE)

    @property
    def inspector(self) -> str | None:
        """Return the dotted path of what serves /inspect; None if it is off, or nothing is remembered that it could show."""
        remembering = {SESSIONS_MIDDLEWARE, RADIX_TREE_MIDDLEWARE} & set(self.middlewares)
        return INSPECTOR if self.radix.inspector and remembering else None

    def __post_init__(self) -> None:
        if self.server.processes > 1 and (self.store.url is None or not self.middlewares):
            raise BadRequestError(
                f"--processes {self.server.processes} needs --store: through it the processes share what they remember, and"
                " tell each other of workers and aborts. Add --store sqlite:PATH, or leave --processes out"
                + ("" if self.middlewares else "; with --middleware none nothing opens a store")
            )
