"""Which store `--store` names. A store's module is imported on demand, so its library is needed only then."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final, cast, get_args

from middleware_hub.store.errors import StoreUnreachableError
from middleware_hub.store.protocol import Durability, Store
from middleware_hub.store.redis.address import FORMS, PREFIX, shown
from router.errors import BadRequestError

_REDIS: Final = "middleware_hub.store.redis.store:RedisStore"
STORES: Final = {
    "sqlite": "middleware_hub.store.sqlite.store:SqliteStore",
    "redis": _REDIS,
    "rediss": _REDIS,
    "redis+sentinel": _REDIS,
    "redis+cluster": _REDIS,
}
"""Maps a scheme to the class of its stores."""


_PATIENCE: Final = 60.0
"""Seconds that a router waits at its start for a store on another machine, which may be starting too."""


def patience(address: str) -> float:
    """Return how many seconds a router waits at its start for an unreachable store: none for a file."""
    return 0.0 if address.startswith("sqlite:") else _PATIENCE


def open_store(address: str, *, durability: Durability = "process", prefix: str = PREFIX) -> Store:
    """Return the store of an address, not yet open. `prefix` begins the keys in a Redis. Raises BadRequestError."""
    scheme, _, rest = address.partition(":")
    if scheme not in STORES or not rest.removeprefix("//"):
        raise BadRequestError(f"--store {shown(address)}: write one of sqlite:PATH, {', '.join(FORMS)}")
    if rest == ":memory:":
        raise BadRequestError(f"--store {address}: it would end with this process; for that, leave --store out")
    if durability not in get_args(Durability):
        raise BadRequestError(f"--durability {durability}: one of {', '.join(get_args(Durability))}")
    module, _, name = STORES[scheme].partition(":")
    made: Any = getattr(import_module(module), name)
    return cast(Store, made(address, durability, prefix) if scheme.startswith("redis") else made(rest, durability))


def read_only(address: str, error: StoreUnreachableError | None = None) -> Store | None:
    """Return a store that only reads, if that of an address is a file that cannot be written; else None.

    `error`: the one with which it could not be opened, if that was tried.
    """
    scheme, _, rest = address.partition(":")
    if scheme != "sqlite":
        return None
    module: Any = import_module("middleware_hub.store.sqlite.read_only")
    return cast(Store, module.ReadOnlyStore(rest)) if module.cannot_write(rest, error) else None
