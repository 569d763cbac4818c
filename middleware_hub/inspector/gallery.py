"""The images of a tenant as the inspector shows them. It never shows one to a tenant that has not sent it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Raw

from middleware_hub.media.picture import Picture
from middleware_hub.media.stock import Stock
from middleware_hub.spans.media import MediaSpan


class Gallery:
    """See the top of this file. `stock` has the files."""

    def __init__(self, stock: Stock) -> None:
        self._stock = stock

    async def about(self, tenant: str, digests: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Return what is known of images, by digest. All but the digest is None if a file is not there; `size` is in bytes."""
        wanted = list(dict.fromkeys(digests))
        await self._stock.ask(tenant, [one for one in wanted if self._stock.about(tenant, one) is None])
        return {one: self._known(tenant, one) for one in wanted}

    def _known(self, tenant: str, digest: str) -> dict[str, Any]:
        found = self._stock.about(tenant, digest)
        if found is None:
            return {"digest": digest, "mime": None, "width": None, "height": None, "size": None}
        size = len(found.data) if isinstance(found, Picture) else found.size
        return {"digest": digest, "mime": found.mime, "width": found.width, "height": found.height, "size": size}

    async def shown(self, tenant: str, media: Sequence[MediaSpan]) -> list[dict[str, Any]]:
        """Return the images of a sequence, in order: `span` is half-open, and counts its tokens."""
        about = await self.about(tenant, [one.digest for one in media])
        return [{**about[digest], "span": [start, start + length]} for start, length, digest in media]

    async def embedded(self, tenant: str, digests: Iterable[str]) -> dict[str, Raw]:
        """Return the files as `data:` URLs in JSON, each once, by the paths that a saved page asks for."""
        return embedded((await self._stock.bring(tenant, digests)).pictures)


def embedded(pictures: Iterable[Picture]) -> dict[str, Raw]:
    """See `Gallery.embedded`."""
    return {f"/media/{one.digest}": Raw(b'"%b"' % one.data_url) for one in pictures}
