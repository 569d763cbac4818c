"""Where workers may be: `--worker-allow`.

Whoever may add a worker has requests sent to an address of their choice. Networks named by flags keep that within bounds. Names
are resolved when a worker is added, and all that a name stands for has to be allowed. What it stands for later is judged again
at each connection: whoever owns a name may give it another address as soon as it is let in.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from router.errors import BadRequestError

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class AllowedWorkers:
    """The networks that workers may be in; none stands for all."""

    def __init__(self, networks: Sequence[Network]) -> None:
        self._networks = tuple(networks)

    async def check(self, url: str) -> None:
        """Raises BadRequestError if a (normalized) URL names a host outside, or one that nobody knows."""
        if self._networks:
            host, port = _host(url)
            try:
                found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
            except (OSError, UnicodeError) as error:
                raise _unknown(url, error) from error
            self._judge(url, found)

    def check_now(self, url: str) -> None:
        """The same before there is an event loop."""
        if self._networks:
            host, port = _host(url)
            try:
                found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            except (OSError, UnicodeError) as error:
                raise _unknown(url, error) from error
            self._judge(url, found)

    def permits(self, address: str) -> bool:
        """Whether a worker may be at an IP address."""
        return not self._networks or self._outside(address) is None

    def _outside(self, host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        """The address if it is outside; None if it is in one of the networks."""
        address = ipaddress.ip_address(host.partition("%")[0])  # a link-local one has its interface behind it
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


def _host(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def _unknown(url: str, error: Exception) -> BadRequestError:
    why = getattr(error, "strerror", None) or error
    return BadRequestError(f"worker {url} cannot be looked up, which --worker-allow makes necessary: {why}")
