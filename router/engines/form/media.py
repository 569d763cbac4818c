"""Pictures in a `/generate`: the field `image_data`, as SGLang (0.5.23) takes it.

One prompt has a picture, or a list of them in the order of its placeholders. A batch has a list with an entry of that form for
each prompt. A picture is a string here: a data URL, bare base64, or the digest of a picture that the router has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import Raw

from router.engines.json import JSON_ERRORS
from router.errors import BadRequestError

IMAGES = "image_data"
HASHES = "mm_content_hashes"
"""The digests of the pictures, in the same form: SGLang checks the bytes by them."""
OTHERS = ("video_data", "audio_data")

_NOTHING = re.compile(rb"(?:[\[\],\s]|null)*+")
"""A value of such a field that asks for nothing: null, or lists of nothing but null, for instance one for each prompt."""
_SHAPE = (
    f"`{IMAGES}` must be a string, or a list of them in the order of their placeholders; for a batch a list of these"
)


def asks(fields: Mapping[str, Raw], key: str) -> bool:
    """Return whether a request has something in a field of media."""
    return key in fields and not _NOTHING.fullmatch(fields[key])


def read(fields: Mapping[str, Raw], prompts: int, *, batch: bool) -> list[list[str]] | None:
    """Return the pictures of each prompt, as they were given; None if there are none. Raises BadRequestError."""
    if not asks(fields, IMAGES):
        return None
    try:
        given = msgspec.json.decode(fields[IMAGES], type=str | list[str | list[str | None] | None])
    except JSON_ERRORS as error:
        raise BadRequestError(_SHAPE, code="media_invalid") from error
    if not batch:
        return [_strings([given] if isinstance(given, str) else given)]
    if isinstance(given, str) or len(given) != prompts:
        raise BadRequestError(f"{_SHAPE}, with {prompts} entries here", code="media_count")
    return [_strings([one] if isinstance(one, str) else one or []) for one in given]


class ImageFile(Protocol):
    """A picture's file: what an adapter needs to know of it."""

    @property
    def digest(self) -> str:
        """`sha256:` and the hash of its bytes."""
        ...

    @property
    def data_url(self) -> bytes:
        """All of it, as `data:image/png;base64,...`."""
        ...


def printed(prompts: Sequence[Sequence[ImageFile]], *, batch: bool) -> Raw:
    """Return the pictures of each prompt as `image_data`, with all their bytes.

    In one join: each copy of a large picture takes milliseconds.
    """
    parts: list[bytes] = [b"["] if batch else []
    for number, pictures in enumerate(prompts):
        parts.append(b",[" if number else b"[")
        for place, one in enumerate(pictures):
            parts += (b',"' if place else b'"', one.data_url, b'"')
        parts.append(b"]")
    return Raw(b"".join((*parts, b"]") if batch else parts))


def _strings(given: list[Any]) -> list[str]:
    if not all(isinstance(one, str) for one in given):
        raise BadRequestError(_SHAPE, code="media_invalid")
    return given
