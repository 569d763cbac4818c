"""Images: how many bytes of them to hold, and to take in a request, and where they may be fetched from."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from functools import cached_property

from router.config.flag import Section, flag
from router.config.token_budget import MEDIA_BUDGET, media_budget
from router.errors import BadRequestError

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True)
class MediaConfig(Section):
    """The limits on images, in bytes of their files, and the addresses that they are fetched from."""

    TITLE = "images"

    max_bytes: int | None = flag(
        "--media-max-bytes",
        None,
        "most bytes of images to hold, each once as a file and once in base64; over it, those that no conversation needs go"
        " first",
        unset=MEDIA_BUDGET,
    )
    max_image_bytes: int = flag(
        "--media-max-image-bytes", 20_000_000, "largest file of an image; a larger one gets 400"
    )
    max_request_bytes: int = flag(
        "--media-max-request-bytes",
        128 * 1024 * 1024,
        "most bytes of images in a request, besides --max-body-bytes, which is for all else",
    )
    ban_placeholders: bool = flag(
        "--ban-placeholders",
        False,
        "keep the model from sampling the placeholder of an image, behind which a conversation cannot go on with images: a"
        " logit_bias, which changes sampling",
    )
    fetch: bool = flag(
        "--fetch-media",
        False,
        "fetch images that clients name by an http or https address, each within --media-max-image-bytes; without it they"
        " get 400",
    )
    fetch_hosts: tuple[str, ...] = flag(
        "--fetch-media-host",
        (),
        "with --fetch-media: host that images may be fetched from; repeatable",
        metavar="NAME",
        unset="any",
    )
    fetch_private: tuple[str, ...] = flag(
        "--fetch-media-private",
        (),
        "with --fetch-media: network of addresses that are not public, from which images may be fetched; repeatable",
        metavar="CIDR",
        unset="only public addresses",
    )
    fetch_timeout: float = flag(
        "--fetch-media-timeout-secs",
        10.0,
        "with --fetch-media: how long all images of a request may take together, redirects included",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        given = {"--fetch-media-host": self.fetch_hosts, "--fetch-media-private": self.fetch_private}
        for name, values in given.items():
            if values and not self.fetch:
                raise BadRequestError(f"{name} needs --fetch-media")
        for host in self.fetch_hosts:
            if not host or not host.isascii() or set(host) & set(" /:@?#[]\\"):
                raise BadRequestError(f"--fetch-media-host {host!r} is no name of a host, such as images.example.org")
        _ = self.fetch_networks

    @property
    def budget(self) -> int:
        """`max_bytes`, or an eighth of the memory."""
        return media_budget(self.max_bytes)

    @cached_property
    def fetch_networks(self) -> tuple[Network, ...]:
        """The networks of `fetch_private`. Raises BadRequestError for one that is none."""
        try:
            return tuple(ipaddress.ip_network(one) for one in self.fetch_private)
        except ValueError as error:
            raise BadRequestError(f"--fetch-media-private: {error}") from error
