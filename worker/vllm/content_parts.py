"""The images of /inference/v1/generate: `content_parts`, and the names under which a worker remembers them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from worker.engine.prompt_images import digest_of
from worker.http.image_data import image_content
from worker.vllm.rejected import Rejected

_MOST = 384  # images that are remembered


class ImageMemory:
    """The images that a worker has seen under a `uuid`, as vLLM's multi-modal cache knows them: the name alone is enough then.

    A name that is known wins over the bytes beside it: whoever gives one name to two images gets the first one.
    """

    def __init__(self) -> None:
        self._digests: OrderedDict[str, str] = OrderedDict()  # the least recently used first

    def images(self, parts: Any) -> list[tuple[str, str | None]]:
        """Return digest and name of each image of `content_parts`, in order. Parts of an unknown type are skipped.

        Raises:
            Rejected: a part is malformed, or has no bytes and no known name.
            OutOfRange: an image is no data URL. vLLM would open it, which no router may ask of it.
        """
        if not isinstance(parts or [], list) or not all(isinstance(part, dict) for part in parts or []):
            raise Rejected("1 validation error:\n  'loc': 'body.content_parts', 'msg': 'Input should be a valid list'")
        images = [part for part in parts or [] if part.get("type") == "image_url"]
        if not all(isinstance(part.get("uuid"), str | None) for part in images):
            raise Rejected(
                "1 validation error:\n  'loc': 'body.content_parts', 'msg': 'Input should be a valid string'"
            )
        return [(self._digest(place, part), part.get("uuid")) for place, part in enumerate(images)]

    def _digest(self, place: int, part: dict[str, Any]) -> str:
        url, uuid = part.get("url"), part.get("uuid")
        if uuid is not None and uuid in self._digests:
            self._digests.move_to_end(uuid)
            return self._digests[uuid]
        if url is None:
            raise Rejected(f"Cache miss for image at index {place} but data is not provided.")
        digest = digest_of(image_content(url))
        if uuid is not None:
            self._digests[uuid] = digest
            if len(self._digests) > _MOST:
                self._digests.popitem(last=False)
        return digest

    def forget(self) -> None:
        """Begin anew, as a process that was started again."""
        self._digests.clear()
