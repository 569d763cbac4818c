"""Which worker a URL names: `127.0.0.1`, `localhost` and a host's name can be one server.

Two URLs name one worker if scheme and port are equal, and each leads to one address, the same one. A name with several
addresses, as of a Kubernetes service, may lead to a different server each time, so only those count that accept connections:
`localhost` stands for IPv4 and IPv6, and a server may listen to one of them.

An address does not tell two names apart that a proxy serves (`Host`). So where both are names, the servers have to tell the
same of themselves, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from urllib.parse import urlsplit

import msgspec

from router.engines.json import JSON_ERRORS
from router.workers.worker import ProbeResult

LOOK_UP_SECONDS = 2.0
"""How long looking up a name, or connecting to an address, may take. A name that takes longer is no other worker's."""

DESCRIPTIONS = ("/server_info", "/get_server_info")

Describe = Callable[[str], Awaitable[bytes | ProbeResult | None]]


class _Described(msgspec.Struct):
    """Facts that tell a process of SGLang from another one: it draws a seed when it starts, unless it is given one."""

    model_path: str | None = None
    port: int | None = None
    random_seed: int | None = None


class WorkerNames:
    """Knows the addresses of the URLs that it was asked about. All URLs are normalized."""

    def __init__(self, describe: Describe) -> None:
        """`describe`: returns the description that the worker at a URL gives of itself."""
        self._describe = describe
        self._addresses: dict[str, frozenset[str]] = {}

    async def known_as(self, url: str, workers: Iterable[str]) -> str:
        """Return the URL of `workers` that leads to the worker at this URL; its own URL if none does."""
        others = [other for other in workers if _door(other) == _door(url)]
        if url in others or not others:
            return url
        await self._look_up(url)
        return await self._among(url, others)

    async def distinct(self, urls: Iterable[str]) -> dict[str, str]:
        """Map each of these URLs to the first of them that leads to the same worker."""
        found: dict[str, str] = dict.fromkeys(urls, "")
        await asyncio.gather(*map(self._look_up, found))
        for url in found:
            found[url] = await self._among(url, [other for other in found if found[other] == other])
        return found

    async def _among(self, url: str, others: Sequence[str]) -> str:
        own = self._addresses.get(url, frozenset())
        for other in others:
            # Known addresses may be old: they only spare looking up a thousand names for each new one.
            known = self._addresses.get(other)
            if _door(other) == _door(url) and (known is None or known & own) and await self._is_same(url, other):
                return other
        return url

    async def _is_same(self, url: str, other: str) -> bool:
        one, two = await asyncio.gather(self._look_up(url), self._look_up(other))
        if not one & two:
            return False
        local = _is_localhost(url) or _is_localhost(other)
        if one != two or len(one) > 1:
            heard = await asyncio.gather(*(self._listening(url, addresses) for addresses in (one, two)))
            if not any(heard) and local:
                return True  # nobody is there yet, and who says `localhost` means this machine
            one, two = heard
        single = one == two and len(one) == 1
        if single and not (_is_name(url) and _is_name(other)):
            return True
        if not one & two or not (single or local):
            return False
        mine, theirs = await asyncio.gather(self._identity(url), self._identity(other))
        return mine is not None and mine == theirs

    async def _look_up(self, url: str) -> frozenset[str]:
        host, port = urlsplit(url).hostname or "", _door(url)[1]
        try:
            async with asyncio.timeout(LOOK_UP_SECONDS):
                found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError, TimeoutError):
            return frozenset()
        addresses = frozenset(_plain(str(address[0])) for *_, address in found)
        self._addresses[url] = addresses
        return addresses

    async def _listening(self, url: str, addresses: frozenset[str]) -> frozenset[str]:
        each = sorted(addresses)
        found = await asyncio.gather(*(_accepts(address, _door(url)[1]) for address in each))
        return frozenset(address for address, accepts in zip(each, found, strict=True) if accepts)

    async def _identity(self, url: str) -> _Described | None:
        said = await self._describe(url)
        try:
            found = msgspec.json.decode(said, type=_Described) if isinstance(said, bytes) else None
        except JSON_ERRORS:
            return None
        return None if found is None or found.random_seed is None else found


def _door(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.scheme, parts.port or (443 if parts.scheme == "https" else 80)


def _plain(address: str) -> str:
    """Return IPv4 that is written as IPv6 as itself, and 0.0.0.0, to which servers bind, as the address to which it leads."""
    found = ipaddress.ip_address(address.partition("%")[0])
    found = getattr(found, "ipv4_mapped", None) or found
    if found.is_unspecified:
        return "127.0.0.1" if found.version == 4 else "::1"
    return address if found.version == 6 else str(found)


def _is_localhost(url: str) -> bool:
    return (urlsplit(url).hostname or "").rstrip(".") == "localhost"


def _is_name(url: str) -> bool:
    """Return whether the host is a name that a proxy may serve: no address, and not this machine."""
    host = urlsplit(url).hostname or ""
    return ":" not in host and not host.rstrip(".").rpartition(".")[2].isdigit() and not _is_localhost(url)


async def _accepts(address: str, port: int) -> bool:
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(LOOK_UP_SECONDS):
            _, writer = await asyncio.open_connection(address, port)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            return True
    return False
