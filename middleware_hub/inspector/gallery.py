"""The images of a tenant as the inspector shows them. It never shows one to a tenant that has not sent it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec import Raw

from middleware_hub.media.shelf import Shelf
from middleware_hub.spans.media import MediaSpan


class Gallery:
    """See the top of this file. `shelf` has the files."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    def about(self, tenant: str, digest: str) -> dict[str, Any]:
        """Return what is known of an image. All but its digest is None if its file is not held; `size` is in bytes."""
        found = self._shelf.get(tenant, digest)
        if found is None:
            return {"digest": digest, "mime": None, "width": None, "height": None, "size": None}
        about = {"mime": found.mime, "width": found.width, "height": found.height, "size": len(found.data)}
        return {"digest": digest, **about}

    def shown(self, tenant: str, media: Iterable[MediaSpan]) -> list[dict[str, Any]]:
        """Return the images of a sequence, in order: `span` is half-open, and counts its tokens."""
        return [{**self.about(tenant, digest), "span": [start, start + length]} for start, length, digest in media]

    def embedded(self, tenant: str, digests: Iterable[str]) -> dict[str, Raw]:
        """Return the files that are held as `data:` URLs in JSON, each once, by the paths that a saved page asks for."""
        held = {digest: self._shelf.get(tenant, digest) for digest in digests}
        return {f"/media/{digest}": Raw(b'"%b"' % one.data_url) for digest, one in held.items() if one is not None}
