"""Reads bodies that may have images: the text of one is limited by itself, and its images are lifted out of it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Final

from starlette.types import Receive, Scope

from middleware_hub.media import passed_on
from middleware_hub.media.errors import MediaInvalidError
from middleware_hub.media.fetching import Fetcher
from middleware_hub.media.lifted import LiftedBody, Outline, PictureString, address, picture_at, places, without
from middleware_hub.media.picture import Base64Sample, Picture, payload
from middleware_hub.media.shelf import Shelf
from router.config.media import MediaConfig
from router.engines.json_cost import LIGHT, check_weight
from router.http.bodies import Replay, read_json, too_large, with_body
from router.http.offload import offload
from router.http.request_state import request_state
from router.plugins import MiddlewareContext

NO_PICTURES: Final[Mapping[str, Picture]] = {}


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h, glibc 2.39
_KEPT: Final = 128 * 1024 * 1024
"""Bytes of freed memory that each part of the heap keeps at most."""
_FROM_HEAP: Final = 32 * 1024 * 1024
"""Blocks up to this size come from the heap; glibc allows no more."""


def keep_large_blocks() -> None:
    """Let this process use the memory of large bodies again and again.

    By itself glibc gives most freed blocks as large as an image back to the operating system, and the next one comes in new
    pages, which take longer than all else that is done with an image. Other C libraries have no such function.
    """
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, _FROM_HEAP)
        library.mallopt(_M_TRIM_THRESHOLD, _KEPT)


_DECODED_HERE: Final = 1024 * 1024
"""Characters of new images that are decoded and hashed on the event loop, which takes a millisecond: a thread costs as much."""


class BodyReader:
    """Reads the bodies of requests. Decoding and hashing of large ones run in a thread.

    Args:
        config: the limits on images, and whether they are fetched.
        shelf: the images that are held.
        max_body_bytes: of all that is no image.
    """

    def __init__(self, config: MediaConfig, shelf: Shelf, *, max_body_bytes: int) -> None:
        keep_large_blocks()
        self._shelf = shelf
        self._max_body = max_body_bytes
        self._max_image = config.max_image_bytes
        self._max_media = config.max_request_bytes
        self._fetcher = Fetcher(config) if config.fetch else None

    @classmethod
    def of(cls, context: MiddlewareContext, shelf: Shelf | None) -> BodyReader | None:
        """Return the reader of this application, which the first call makes; None for a model that does not see.

        `shelf`: the images that are held; None for such a model.
        """
        found, config = context.shared.get(cls), context.config
        if shelf is not None and not isinstance(found, BodyReader):
            found = context.shared[cls] = cls(config.media, shelf, max_body_bytes=config.server.max_body_bytes)
        return found if isinstance(found, BodyReader) else None

    async def read(self, scope: Scope, receive: Receive, *, ids: bool = False) -> LiftedBody:
        """Return the body of a request, without its images. `ids`: as in `read_json`.

        Raises:
            BodyTooLargeError: more than `max_body_bytes` are no image; and what `read_json` raises.
            MediaError: what stands in the place of an image is none.
        """
        inside = request_state(scope).body_read
        body = await read_json(scope, receive, self._max_body, media=self._max_media, check=False)
        outline = Outline.light(body) if b"image" in body else None
        if outline is None and len(body) > LIGHT and not inside:
            await offload(True, check_weight, body, ids=ids)
        lifted = await self._lifted(body, outline, request_state(scope).caller.tenant)
        if len(lifted.body) > self._max_body and not inside:
            raise too_large(self._max_body)
        return lifted

    async def passed_on(self, scope: Scope, receive: Receive) -> tuple[Scope, Receive]:
        """Return a request that goes to a worker as its client wrote it, with its body checked; see `passed_on.check`.

        Raises MediaError, and what `read_json` raises.
        """
        body = await read_json(scope, receive, self._max_body, ids=True)
        await offload(len(body) > LIGHT, passed_on.check, body)
        return with_body(scope, body), Replay(body, receive)

    async def _lifted(self, body: bytes, outline: Outline | None, tenant: str) -> LiftedBody:
        """Return a body without its images. `outline`: if it is made in no time; then nothing but new images needs a thread."""
        heavy = outline is None and len(body) > LIGHT
        if outline is not None:
            wanted = places(outline)
        else:
            wanted = await offload(heavy, lambda: places(Outline.of(body))) if b"image" in body else []
        if not wanted:
            return LiftedBody(body, body, {})
        urls = {} if self._fetcher is None else {one: url for one in wanted if (url := address(body, one)) is not None}
        given = [one for one in wanted if one not in urls]
        alike = {one: self._shelf.alike(tenant, _sample(body, one)) for one in given}
        found = await offload(heavy, self._known, body, alike)
        new = [one for one in given if one not in found]
        if new:
            size = sum(one.end - one.start for one in new)
            found |= await offload(size > _DECODED_HERE, self._decoded, body, new)
        if urls and self._fetcher is not None:
            fetched = await self._fetcher.pictures(dict.fromkeys(urls.values()))
            found |= {place: fetched[url] for place, url in urls.items()}
        self._check(sum(map(_size, found.values())))
        left = len(body) - sum(place.end - place.start for place in found)
        return await offload(left > LIGHT, without, body, found) if found else LiftedBody(body, body, {})

    def _known(self, body: bytes, alike: Mapping[PictureString, Picture | None]) -> dict[PictureString, Picture]:
        """Return the held pictures that stand at these places, each with one that it may be: all of it is compared."""
        return {place: one for place, one in alike.items() if one is not None and self._is(one, body, place)}

    def _decoded(self, body: bytes, wanted: Iterable[PictureString]) -> dict[PictureString, Picture]:
        """Return the pictures at these places."""
        found, size = dict[PictureString, Picture](), 0
        for place in wanted:
            picture = picture_at(body, place, self._max_image)
            if picture is not None:
                size += len(picture.data)
                self._check(size)
                _ = picture.data_url  # made here, which may be a thread
                found[place] = picture
        return found

    def _is(self, picture: Picture, body: bytes, place: PictureString) -> bool:
        return len(picture.data) <= self._max_image and picture.stands_at(body, payload(body, place.start, place.end))

    def _check(self, size: int) -> None:
        if size > self._max_media:
            raise MediaInvalidError(
                f"the images of this request have more than {self._max_media} bytes (--media-max-request-bytes)"
            )


def _size(picture: Picture) -> int:
    return len(picture.data)


def _sample(body: bytes, place: PictureString) -> Base64Sample:
    return Base64Sample.of(body, payload(body, place.start, place.end), place.end)
