"""How far a router is with the KV cache events of a worker: `kv_events` of `GET /workers`."""

from __future__ import annotations

import enum

import msgspec


class KvState(enum.Enum):
    """How far a router is with a worker's events. Of several ranks, the first of these that one of them is in counts."""

    FAILED = "failed"  # it is tried again
    UNKNOWN = "unknown"  # the worker has not said whether it publishes; it is asked again
    CONNECTING = "connecting"
    CONNECTED = "connected"
    NONE = "none"  # the worker publishes none


class KvFollowing(msgspec.Struct, frozen=True):
    """How far a router is with a worker's events, and why it is no further."""

    state: KvState
    error: str | None = None
