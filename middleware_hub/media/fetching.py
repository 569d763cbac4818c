"""Images by address: `--fetch-media`. The router fetches a file, and goes on with its bytes; no worker sees the address.

A client that may name an address makes the router send a request of its choice from inside of the operator's network. So:

- only http and https, without a user name in the address; only the hosts of `--fetch-media-host`, if there are any;
- no address that is not public, except in the networks of `--fetch-media-private`. It is checked where the connection is made,
  for the address that is connected to: what a name means may change between two questions;
- a redirect is another address, which is checked like the first;
- nothing of the client's request goes along, and of the answer only an image comes back;
- the time for all addresses of a request is limited, as are the bytes of a file, and the files on their way at once.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from typing import Final

from yarl import URL

from middleware_hub.media.errors import MediaInvalidError, MediaUrlError
from middleware_hub.media.picture import Picture, make_picture
from router.config.media import MediaConfig
from router.http.offload import offload
from router.http.upstream import AiohttpUpstream, ConnectFailedError, Headers, Upstream, UpstreamFailure

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address

MOST_ADDRESSES: Final = 256
"""In one request."""
_MOST_REDIRECTS: Final = 5
_AT_ONCE: Final = 16
"""Files on their way, of all requests together: each may take `--media-max-image-bytes` of memory."""
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_HEADERS: Final = (
    (b"user-agent", b"tito-router"),
    (b"accept", b"image/png, image/jpeg, image/gif, image/webp, image/bmp"),
    (b"accept-encoding", b"identity"),
)


class Fetcher:
    """Fetches images. See the top of this file."""

    def __init__(self, config: MediaConfig) -> None:
        self._hosts = frozenset(map(_host, config.fetch_hosts))
        self._networks = config.fetch_networks
        self._seconds = config.fetch_timeout
        self._max_image = config.max_image_bytes
        self._max_request = config.max_request_bytes
        self._places = asyncio.Semaphore(_AT_ONCE)

    async def pictures(self, addresses: Collection[str]) -> dict[str, Picture]:
        """Return the picture at each address.

        Raises:
            MediaUrlError: an address is refused, does not answer (in time), or answers without a file.
            MediaInvalidError: what it answers is too large, or no image.
        """
        if len(addresses) > MOST_ADDRESSES:
            raise MediaUrlError(f"a request may have {MOST_ADDRESSES} addresses of images, not {len(addresses)}")
        left = [self._max_request]

        def take(size: int) -> None:
            left[0] -= size
            if left[0] < 0:
                raise MediaInvalidError(
                    f"the images of this request have more than {self._max_request} bytes (--media-max-request-bytes)"
                )

        upstream = AiohttpUpstream(connect_timeout=self._seconds, permits=self.permits, refusal="{} is not public")
        try:
            async with asyncio.timeout(self._seconds), upstream:
                tasks = [asyncio.create_task(self._picture(upstream, one, take)) for one in addresses]
                try:
                    return dict(zip(addresses, await asyncio.gather(*tasks), strict=True))
                finally:
                    for task in tasks:
                        task.cancel()
        except TimeoutError:
            raise MediaUrlError(
                f"an image did not arrive within {self._seconds:g} s (--fetch-media-timeout-secs)"
            ) from None

    def permits(self, address: str) -> bool:
        """Return whether an image may be at an IP address."""
        found = ipaddress.ip_address(address.partition("%")[0])  # the interface follows a link-local address
        return all(_is_public(one) or any(one in network for network in self._networks) for one in _meant(found))

    async def _picture(self, upstream: Upstream, given: str, take: Callable[[int], None]) -> Picture:
        async with self._places:
            data = await self._file(upstream, given, take)
        picture = await offload(True, make_picture, data, self._max_image)
        await offload(True, lambda: picture.data_url)
        return picture

    async def _file(self, upstream: Upstream, given: str, take: Callable[[int], None]) -> bytes:
        url = _url(given)
        for _ in range(_MOST_REDIRECTS + 1):
            self._check(url)
            try:
                with closing(await upstream.send("GET", str(url.origin()) + url.raw_path_qs, _HEADERS)) as answer:
                    if answer.status in _REDIRECTS and (further := _location(answer.headers)):
                        url = _url(further, url)
                        continue  # to the same checks
                    if answer.status != 200:
                        raise MediaUrlError(f"an image cannot be fetched: {url.host} answers {answer.status}")
                    pieces, size = list[bytes](), 0
                    while piece := await answer.read():
                        size += len(piece)
                        if size > self._max_image:
                            raise MediaInvalidError(
                                f"an image is larger than {self._max_image} bytes (--media-max-image-bytes)"
                            )
                        take(len(piece))
                        pieces.append(piece)
                    return b"".join(pieces)
            except ConnectFailedError:  # why is not told: a client learns nothing about the operator's network
                raise MediaUrlError(
                    f"an image cannot be fetched: {url.host} cannot be reached, or has no public address (see"
                    " --fetch-media-private): send its bytes"
                ) from None
            except (UpstreamFailure, ValueError) as error:
                raise MediaUrlError(f"an image cannot be fetched from {url.host}: {error}") from None
        raise MediaUrlError(f"an image cannot be fetched: more than {_MOST_REDIRECTS} redirects")

    def _check(self, url: URL) -> None:
        """Raise MediaUrlError for an address that nothing is fetched from, whatever its host's name means."""
        if url.scheme not in ("http", "https") or not url.raw_host:
            raise MediaUrlError("an image is fetched by http and https only")
        if url.raw_user is not None or url.raw_password is not None:
            raise MediaUrlError("an address of an image must have no user name in it")
        if self._hosts and _host(url.raw_host) not in self._hosts:
            raise MediaUrlError(f"no image is fetched from {url.host}: it is none of the hosts of --fetch-media-host")


def _url(given: str, base: URL | None = None) -> URL:
    try:
        url = URL(given)
        return url if base is None else base.join(url)
    except ValueError as error:
        raise MediaUrlError(f"an image's address cannot be read: {error}") from None


def _location(headers: Headers) -> str:
    return next((value.decode("latin-1") for name, value in headers if name.lower() == b"location"), "")


def _host(name: str) -> str:
    return name.lower().rstrip(".")


def _meant(address: Address) -> Sequence[Address]:
    """Return an address, or that of version 4 that it stands for, and the one that it leads through."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    return [address] if address.sixtofour is None else [address, address.sixtofour]


def _is_public(address: Address) -> bool:
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)
