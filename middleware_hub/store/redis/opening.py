"""Opens a store in Redis: checks that the server keeps its data, and to which tokenizer its store belongs."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from middleware_hub.store.errors import StoreMismatchError, StoreUnreachableError
from middleware_hub.store.protocol import Durability
from middleware_hub.store.redis.address import Address
from middleware_hub.store.redis.connection import Command
from middleware_hub.store.redis.keys import Keys
from middleware_hub.store.redis.servers import Servers

logger = logging.getLogger(__name__)

FORMAT: Final = 1
"""The format of keys and values; for records see `records.FORMAT`."""
_SHARDS: Final = 16
"""Shards of the sets of roots and of logs in a cluster, where each is in another place."""
_OLDEST: Final = (7, 0)
_WAITS_FOR_AOF: Final = (7, 2)


async def open_keys(
    servers: Servers, address: Address, fingerprint: str | None, durability: Durability
) -> tuple[Keys, bool, bytes | None]:
    """Return the names of the keys of a store, which is made if it is not there; whether appends wait for its disk; its life.

    Raises StoreMismatchError, StoreUnreachableError.
    """
    synced = await check_servers(servers, address, durability)
    if any(info.get("aof_enabled") == "0" for info in await servers.infos(settings=False)):
        logger.warning(
            "the store %s writes no append-only file: what it has ends with its process, or goes back to its last snapshot. "
            "Set `appendonly yes`",
            address.shown,
        )
    keys = Keys(address.prefix)
    (flat,) = await servers.read([("HGETALL", keys.meta)])
    if not flat:
        if fingerprint is None:
            raise StoreUnreachableError(
                f"there is no store at {address.shown} with the prefix {address.prefix!r}: name the address that the "
                "router has in --store"
            )
        await servers.write(_beginning(keys, fingerprint, 1 if servers.together else _SHARDS))
        (flat,) = await servers.write([("HGETALL", keys.meta)])
    meta = {name.decode(): value.decode() for name, value in zip(flat[::2], flat[1::2], strict=True)}
    where = f"the store {address.shown} with the prefix {address.prefix!r}"
    if meta.get("format") != str(FORMAT):
        raise StoreMismatchError(
            f"{where} has format {meta.get('format')}, and this router knows {FORMAT}: update the router"
        )
    if fingerprint is not None and meta.get("fingerprint") != fingerprint:
        raise StoreMismatchError(
            f"{where} was made with another tokenizer ({meta.get('fingerprint')}, and this one is {fingerprint}): its ids mean "
            "other words. Start with the tokenizer it was made with, or name another database or --store-prefix"
        )
    shards = meta.get("shards", "1")
    if not (shards.isdecimal() and int(shards)):
        raise StoreMismatchError(
            f"{where} says that it has {shards!r} shards, which it was not made with: HSET {keys.meta.decode()} shards "
            f"{1 if servers.together else _SHARDS}"
        )
    life = meta.get("life")
    return Keys(address.prefix, int(shards)), synced, None if life is None else life.encode()


async def check_servers(servers: Servers, address: Address, durability: Durability) -> bool:
    """Refuse servers that would lose data; return whether appends have to wait for their disks.

    Raises StoreMismatchError, StoreUnreachableError.
    """
    synced = False
    for info in await servers.infos(settings=durability == "disk"):
        synced = _check_server(servers, address, info, durability) or synced
    return synced


def _beginning(keys: Keys, fingerprint: str, shards: int) -> list[Command]:
    """Return the command that begins a store if there is none. A store begun again after a loss has another `life`."""
    return [
        ("HSETNX", keys.meta, "fingerprint", fingerprint),
        ("HSETNX", keys.meta, "shards", shards),
        ("HSETNX", keys.meta, "format", FORMAT),
        ("HSETNX", keys.meta, "life", secrets.token_hex(8)),
    ]


class Ownership:
    """Ensures that a store stays that of its tokenizer while it is open.

    A server may lose everything: it is emptied, or starts again without a file. Then the first router that asks begins the
    store again. If that router has another tokenizer, no other router may use the store: its ids mean other words.

    Attributes:
        question: a command, whose answer `check` takes.
        lost: whether the store belonged to another tokenizer at the last check.
        life: that of the store; a new life begins when it was emptied.
        emptied: called when that is noticed.
    """

    def __init__(self, servers: Servers, keys: Keys, fingerprint: str, shown: str, life: bytes | None = None) -> None:
        self.question: Command = ("HMGET", keys.meta, "fingerprint", "life")
        self.lost = False
        self.life = life
        self.emptied: Callable[[], None] = lambda: None
        self._servers = servers
        self._own = fingerprint.encode()
        self._keys = keys
        self._shown = shown

    async def check(self, found: Sequence[bytes | None]) -> None:
        """Take the answer to the question. Raises StoreUnreachableError if the store is another tokenizer's."""
        fingerprint, life = found
        if fingerprint != self._own or life is None:
            await self.hold()
        else:
            self._live(life)
        self.lost = False

    async def hold(self) -> None:
        """Begin the store again if it is gone. Raises StoreUnreachableError if it is another tokenizer's."""
        beginning = _beginning(self._keys, self._own.decode(), self._keys.shards)
        (begun, *_, (found, life)) = await self._servers.write([*beginning, self.question])
        if begun:
            logger.error(
                "the store %s was emptied while it was in use: what it had is lost, but for what routers still know",
                self._shown,
            )
        self.lost = found != self._own
        if self.lost:
            raise StoreUnreachableError(
                f"the store {self._shown} was emptied, and begun by a router with another tokenizer "
                f"({found.decode(errors='replace')}, and this one is {self._own.decode()}): give each its own --store-prefix"
            )
        self._live(life)

    def _live(self, life: bytes) -> None:
        before, self.life = self.life, life
        if before not in (None, life):
            self.emptied()


def _check_server(servers: Servers, address: Address, info: Mapping[str, str], durability: Durability) -> bool:
    """Refuse a server that would lose data; return whether WAITAOF is needed."""
    version = tuple(int(part) for part in re.findall(r"\d+", info.get("redis_version", "0"))[:2])
    if version < _OLDEST:
        raise StoreMismatchError(
            f"the store {address.shown} is Redis {info.get('redis_version')}: Redis 7.0, Valkey 7.2 or later is needed"
        )
    if info.get("cluster_enabled") == "1" and servers.together:
        raise StoreMismatchError(f"the store {address.shown} is part of a cluster: write redis+cluster://HOST:PORT")
    policy = info.get("maxmemory_policy", "noeviction")
    if policy.startswith("allkeys") and info.get("maxmemory", "0") != "0":
        raise StoreMismatchError(
            f"the store {address.shown} forgets any key when its memory is full (maxmemory-policy {policy}), in the middle "
            "of a conversation, too: set maxmemory-policy to noeviction, and --store-max-bytes below maxmemory"
        )
    if durability != "disk":
        return False
    if info.get("aof_enabled") == "0":
        raise StoreMismatchError(f"--durability disk: the store {address.shown} writes no file: set `appendonly yes`")
    if version >= _WAITS_FOR_AOF and servers.together:
        return True
    if info.get("appendfsync") != "always":
        raise StoreMismatchError(
            f"--durability disk: the store {address.shown} is a cluster, or Redis {info.get('redis_version')}, and cannot "
            "say when something is on its disk: set `appendfsync always`, or take a single Redis 7.2 or later"
        )
    return False
