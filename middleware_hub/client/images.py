"""Images: how a client gives them to a router, and how exact sequences show them."""

from __future__ import annotations

import binascii
import io
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from middleware_hub.client.errors import InconsistentAnswerError

Image = Any
"""An image to send: `bytes` of its file; a path, as `str` or `os.PathLike`; a Pillow image, which is sent as PNG; a data URL;
or the digest (`sha256:...`) of an image that the router has. A web address is passed on, and refused by most routers."""

_SENT_AS_IT_IS = re.compile(r"sha256:|data:|https?://", re.IGNORECASE)


def sent(image: Image) -> str:
    """Return an image as the router takes it: a data URL, or a digest.

    The bytes of a file are sent as they are, because they are its identity. The same Pillow image always makes the same bytes.

    Raises:
        TypeError: it is nothing of what `Image` names.
        OSError: a path cannot be read, or Pillow cannot write the image as PNG.
    """
    if isinstance(image, str) and _SENT_AS_IT_IS.match(image):
        return image
    if isinstance(image, str | os.PathLike):
        with open(image, "rb") as file:
            data = file.read()
    elif isinstance(image, bytes | bytearray | memoryview):
        data = bytes(image)
    elif hasattr(image, "save") and hasattr(image, "getbands"):
        written = io.BytesIO()
        image.save(written, "PNG")
        data = written.getvalue()
    else:
        raise TypeError(
            f"{type(image).__name__} is no image: give bytes of a file, a path, a Pillow image, a data URL or a digest"
        )
    # The router reads the type off the first bytes.
    return f"data:application/octet-stream;base64,{binascii.b2a_base64(data, newline=False).decode()}"


def all_sent(images: Sequence[Image]) -> list[str]:
    """Return images as the router takes them. Raises as `sent` does, and TypeError for one image in place of a list."""
    if isinstance(images, str | bytes | bytearray | memoryview | os.PathLike) or not isinstance(images, Sequence):
        raise TypeError("`images` is a list: [image], not image")
    return [sent(one) for one in images]


def image_part(image: Image) -> dict[str, Any]:
    """Return an image as a part of a message's `content`, in OpenAI's form, for `Session.chat`."""
    return {"type": "image_url", "image_url": {"url": sent(image)}}


@dataclass(frozen=True)
class SequenceImage:
    """An image in an exact sequence.

    Attributes:
        digest: `sha256:` and the hash of its file.
        mime, width, height: of its file, in pixels as stored; None if the router does not hold it any more.
        span: its placeholder tokens, from the first to behind the last, counted in `Trajectory.tokens`.
        message, part: its place in the messages of a session's branch: the index of the message, and of the part in its
            content. None for sequences of text.
        data: its file, if the sequence was asked for with `media="inline"` and the router holds it.
    """

    digest: str
    mime: str | None
    width: int | None
    height: int | None
    span: tuple[int, int]
    message: int | None
    part: int | None
    data: bytes | None = field(repr=False)

    @property
    def tokens(self) -> int:
        """Return how many tokens the engine made of it."""
        return self.span[1] - self.span[0]

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> SequenceImage:
        """Read an entry of an answer. Raises KeyError, TypeError or ValueError if it is none."""
        start, end = found["span"]
        encoded = found["bytes"]
        return cls(
            **{name: found[name] for name in ("digest", "mime", "width", "height", "message", "part")},
            span=(start, end),
            data=None if encoded is None else binascii.a2b_base64(encoded),
        )


@dataclass(frozen=True)
class MultiModalData:
    """The media of a sequence: its images, in the order of their spans. An image that occurs twice has two entries."""

    images: tuple[SequenceImage, ...] = ()

    @classmethod
    def of(cls, found: Mapping[str, Any] | None) -> MultiModalData:
        """Read the field `multi_modal_data` of an answer; sequences without media have none."""
        return cls(tuple(SequenceImage.of(one) for one in (found or {}).get("images", ())))

    def check(self, loss_mask: Sequence[int]) -> None:
        """Raise InconsistentAnswerError if the spans overlap, leave the sequence, or hold a token with mask 1."""
        at = 0
        for one in self.images:
            start, end = one.span
            if not at <= start < end <= len(loss_mask) or any(loss_mask[start:end]):
                raise InconsistentAnswerError(
                    f"image {one.digest} has the tokens {start} to {end} of {len(loss_mask)}, which are not its own: the "
                    "router's version does not fit this client's"
                )
            at = end
