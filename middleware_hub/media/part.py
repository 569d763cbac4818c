"""The part of a message that is a picture, as all dialects read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from middleware_hub.media.errors import MediaError
from middleware_hub.media.picture import Picture

IMAGE = "image"
"""The type of a part that is a picture."""


class ImagePart(dict[str, Any]):
    """A part of a message that is a picture: `{"type": "image", "digest": "sha256:..."}`, which its key and templates see.

    Attributes:
        place: its place in the request, for errors; `kind` is the client's type of it.
        picture: its file, until the shelf has it; None for a picture that was named by its digest.
        fault: why it is no picture; None if it is.
    """

    __slots__ = ("fault", "kind", "picture", "place")

    def __init__(
        self, place: str, kind: str, digest: str, picture: Picture | None = None, fault: MediaError | None = None
    ) -> None:
        super().__init__(type=IMAGE, digest=digest)
        self.place = place
        self.kind = kind
        self.picture = picture
        self.fault = fault


_IMAGES = frozenset({"image_url", "input_image", "image"})
"""The types of parts that are pictures, in all dialects."""


def is_image(part: Any) -> bool:
    """Return whether a client's part is a picture, in the form of any dialect."""
    if type(part) is not dict:
        return False
    kind = part.get("type")
    return type(kind) is str and kind in _IMAGES


def given_in(part: Mapping[str, Any]) -> Any:
    """Return what a client's part names its picture by: `image_url` of chats and responses, or Anthropic's `source`."""
    source = part.get("source")
    if part["type"] == IMAGE and type(source) is dict:
        return source.get("url" if source.get("type") == "url" else "data")
    found = part.get("image_url")
    return found.get("url") if type(found) is dict else found


def image_parts(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the pictures of a message, in order: `ImagePart`s, and plain objects where the message comes out of a session."""
    content = message.get("content")
    return [part for part in content if part.get("type") == IMAGE] if type(content) is list else []
