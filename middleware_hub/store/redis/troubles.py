"""The meaning of a server's refusals, and what to do about them."""

from __future__ import annotations

from typing import Final

from middleware_hub.store.errors import StoreError, StoreMismatchError, StoreUnreachableError

_PASSING: Final = ("LOADING", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "UNBLOCKED", "BUSY ")
"""These end in a moment: a server that starts, a failover."""
_WORDS: Final = {
    "NOAUTH": "it wants a password: write redis://:PASSWORD@HOST:PORT/DB, or redis://USER:PASSWORD@...",
    "WRONGPASS": "the user or the password is wrong",
    "NOPERM": "this user may not do what the store needs: see the ACL in docs/memory.md",
    "OOM": "its memory is full (maxmemory): give it more, or set --store-max-bytes below that",
    "MISCONF": "it takes no writes because it cannot save to its disk: make room there, or look at its log",
    "NOREPLICAS": "it takes no writes because too few replicas are there (min-replicas-to-write)",
    "LOADING": "it is reading its data from disk",
    "READONLY": "it is a replica, which takes no writes: name the master, or the Sentinels",
    "CLUSTERDOWN": "a part of the cluster has no master",
    "MASTERDOWN": "its master is down",
    "BUSY": "a script of another client is running in it for too long",
    "MOVED": "it is part of a cluster: write redis+cluster://HOST:PORT",
    "CROSSSLOT": "it is part of a cluster: write redis+cluster://HOST:PORT",
}
_TEXTS: Final = {
    "invalid DB index": "it has no such database: look at `databases` in its configuration",
    "DB index is out of range": "it has no such database: look at `databases` in its configuration",
    "SELECT is not allowed in cluster mode": "it is part of a cluster: write redis+cluster://HOST:PORT",
    "unknown command 'HELLO'": "it is too old: Redis 7.0, Valkey 7.2 or later is needed",
    "called with the client already authenticated": _WORDS["NOAUTH"],
    "AUTH <password> called without any password configured": "it has no password, and the address names one",
    "can't run this command": _WORDS["NOPERM"],
    "can't access": _WORDS["NOPERM"],
    "cluster support disabled": "it is no cluster: write redis://HOST:PORT/DB",
    "max number of clients reached": "it has too many clients (maxclients)",
}


def passing(refusal: str) -> bool:
    """Return whether a refusal will end in a moment."""
    return refusal.startswith(_PASSING)


def trouble(refusal: str, shown: str) -> StoreError:
    """Return the error for a refusal."""
    for text, words in _TEXTS.items():
        if text.lower() in refusal.lower():
            return StoreUnreachableError(f"the store {shown}: {words} ({refusal})")
    words = _WORDS.get(refusal.partition(" ")[0], "")
    if refusal.startswith("WRONGTYPE"):
        return StoreMismatchError(f"the store {shown}: another program uses keys of this prefix ({refusal})")
    if words:
        return StoreUnreachableError(f"the store {shown}: {words} ({refusal})")
    return StoreUnreachableError(f"the store {shown} refused a command: {refusal}")
