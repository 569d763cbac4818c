"""Reads bodies that may have images: the text of one is limited by itself, and its images are lifted out of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from starlette.types import Receive, Scope

from middleware_hub.media.errors import MediaInvalidError
from middleware_hub.media.fetching import Fetcher
from middleware_hub.media.lifted import LiftedBody, Place, address, picture_at, places, without
from middleware_hub.media.picture import Picture
from router.config.media import MediaConfig
from router.engines.json_cost import LIGHT
from router.http.bodies import read_json, too_large
from router.http.offload import offload
from router.http.request_state import request_state
from router.plugins import MiddlewareContext

NO_PICTURES: Final[Mapping[str, Picture]] = {}


class BodyReader:
    """Reads the bodies of requests. Decoding and hashing of large ones run in a thread.

    Args:
        config: the limits on images, and whether they are fetched.
        max_body_bytes: of all that is no image.
    """

    def __init__(self, config: MediaConfig, *, max_body_bytes: int) -> None:
        self._max_body = max_body_bytes
        self._max_image = config.max_image_bytes
        self._max_media = config.max_request_bytes
        self._fetcher = Fetcher(config) if config.fetch else None

    @classmethod
    def of(cls, context: MiddlewareContext, *, sees: bool) -> BodyReader | None:
        """Return the reader of this application, which the first call makes; None for a model that does not see."""
        found, config = context.shared.get(cls), context.config
        if sees and not isinstance(found, BodyReader):
            found = context.shared[cls] = cls(config.media, max_body_bytes=config.server.max_body_bytes)
        return found if isinstance(found, BodyReader) else None

    async def read(self, scope: Scope, receive: Receive, *, ids: bool = False) -> LiftedBody:
        """Return the body of a request, without its images. `ids`: as in `read_json`.

        Raises:
            BodyTooLargeError: more than `max_body_bytes` are no image; and what `read_json` raises.
            MediaError: what stands in the place of an image is none.
        """
        inside = request_state(scope).body_read
        body = await read_json(scope, receive, self._max_body, ids=ids, media=self._max_media)
        lifted = await self._lifted(body)
        if len(lifted.body) > self._max_body and not inside:
            raise too_large(self._max_body)
        return lifted

    async def _lifted(self, body: bytes) -> LiftedBody:
        heavy = len(body) > LIGHT
        wanted = await offload(heavy, places, body)
        if not wanted:
            return LiftedBody(body, body, {})
        urls = {} if self._fetcher is None else {one: url for one in wanted if (url := address(body, one)) is not None}
        found = await offload(heavy, self._decoded, body, [one for one in wanted if one not in urls])
        if urls and self._fetcher is not None:
            fetched = await self._fetcher.pictures(dict.fromkeys(urls.values()))
            found |= {place: fetched[url] for place, url in urls.items()}
            self._check(sum(len(one.data) for one in found.values()))
        return await offload(heavy, without, body, found) if found else LiftedBody(body, body, {})

    def _decoded(self, body: bytes, wanted: Iterable[Place]) -> dict[Place, Picture]:
        found, size = dict[Place, Picture](), 0
        for place in wanted:
            picture = picture_at(body, place, self._max_image)
            if picture is not None:
                size += len(picture.data)
                self._check(size)
                _ = picture.data_url  # made here, in the thread
                found[place] = picture
        return found

    def _check(self, size: int) -> None:
        if size > self._max_media:
            raise MediaInvalidError(
                f"the images of this request have more than {self._max_media} bytes (--media-max-request-bytes)"
            )
