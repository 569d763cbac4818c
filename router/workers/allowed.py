"""The networks that workers may be in: `--worker-allow`.

A client that may add a worker makes the router send requests to an address of its choice; the networks limit that. A host
name is resolved when its worker is added, and all its addresses must be allowed. The address is checked again at each
connection, because the owner of a name can change it after the worker was admitted.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from router.errors import BadRequestError

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class AllowedWorkers:
    """The networks that workers may be in; without any, workers may be anywhere."""

    def __init__(self, networks: Sequence[Network]) -> None:
        self._networks = tuple(networks)

    async def check(self, url: str) -> None:
        """Raise BadRequestError if the host of a (normalized) URL is outside the networks, or unknown."""
        if self._networks:
            with _resolving(url) as (host, port):
                found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
            self._judge(url, found)

    def check_now(self, url: str) -> None:
        """Do the same as `check` without an event loop, and block meanwhile."""
        if self._networks:
            with _resolving(url) as (host, port):
                found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            self._judge(url, found)

    def permits(self, address: str) -> bool:
        """Return whether a worker may be at an IP address."""
        return not self._networks or self._outside(address) is None

    def _outside(self, host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        """Return the address if it is in none of the networks, None otherwise."""
        address = ipaddress.ip_address(host.partition("%")[0])  # the interface follows a link-local address
        mapped = getattr(address, "ipv4_mapped", None)
        return None if any((mapped or address) in network for network in self._networks) else address

    def _judge(self, url: str, found: Sequence[tuple[Any, ...]]) -> None:
        for *_, (host, *_) in found:
            address = self._outside(host)
            if address is not None:
                allowed = ", ".join(map(str, self._networks))
                raise BadRequestError(
                    f"worker {url} is at {address}, and workers may only be in {allowed} (--worker-allow)"
                )


@contextlib.contextmanager
def _resolving(url: str) -> Iterator[tuple[str, int]]:
    """Yield the host and port to resolve, and turn failures of that into BadRequestError."""
    parts = urlsplit(url)
    try:
        yield parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise BadRequestError(
            f"worker {url} cannot be looked up, which --worker-allow makes necessary: {why}"
        ) from error
