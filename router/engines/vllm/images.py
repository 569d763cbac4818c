"""Pictures in requests to a vLLM worker: `content_parts` of `/inference/v1/generate` (vLLM 0.32).

    {"token_ids": [.., 151655, ..], "content_parts": [{"type": "image_url", "url": "data:..", "uuid": NAME}]}

The ids have one placeholder for each picture, in order. `uuid` names a picture in the caches of the worker. Once it has
answered with it, the name alone is enough. A worker does not compare a known name with the bytes beside it: it takes the
picture that it has. So a name is made of the digest of the bytes, and here alone; under a cache salt of the salt, too.

In the common form `image_data` has names, too, and no bytes: most of them a worker knows. A name means the file that it was
made for, as long as a caller keeps that. A client that writes a name, where no middleware reads `image_data`, names nothing.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from hashlib import sha256
from typing import Any, Final
from weakref import WeakValueDictionary

import msgspec
from msgspec import Raw

from router.engines.form.media import IMAGES, ImageFile

_MISS: Final = b"Cache miss for"

NamedImage = tuple[str, ImageFile]
"""A picture's name, and its file."""


class NamedImages:
    """Gives pictures names in requests of the common form, and finds them by these names on the way to a worker."""

    def __init__(self) -> None:
        self._files = WeakValueDictionary[str, ImageFile]()

    def fields(self, tenant: str, prompts: Sequence[Sequence[ImageFile]], *, batch: bool) -> Mapping[str, Raw]:
        """Return the field for the pictures of each prompt. Each tenant has names of its own.

        A shared name would tell by the time of an answer that another tenant has sent the same picture.
        """
        names = [[self._named(tenant, one) for one in each] for each in prompts]
        return {IMAGES: Raw(msgspec.json.encode(names if batch else names[0]))}

    def _named(self, tenant: str, file: ImageFile) -> str:
        name = f"sha256:{sha256(f'{tenant}/{file.digest}'.encode()).hexdigest()}" if tenant else file.digest
        self._files[name] = file
        return name

    def found(self, names: Sequence[Any]) -> list[list[NamedImage]] | None:
        """Return the pictures of each prompt by their names; None if one of them is no name of a picture."""
        try:
            return [[(name, self._files[name]) for name in each] for each in names]
        except (KeyError, TypeError):
            return None


def salted(images: Sequence[NamedImage], salt: str | None) -> Sequence[NamedImage]:
    """Return pictures with names of their own under a cache salt.

    The cache of the vision tower's output goes by name alone, and outlives the weights: the salt of a request, which parts the
    rest of the worker's caches, does not part this one.
    """
    if not salt:
        return images
    return [(f"sha256:{sha256(f'{salt}/{name}'.encode()).hexdigest()}", file) for name, file in images]


def content_parts(images: Sequence[NamedImage], known: Container[str]) -> list[dict[str, Any]]:
    """Return pictures as a worker gets them: those that it knows by their names alone."""
    return [
        {"type": "image_url", "uuid": name}
        if name in known
        else {"type": "image_url", "url": Raw(b'"%b"' % file.data_url), "uuid": name}
        for name, file in images
    ]


def was_missed(body: bytes) -> bool:
    """Return whether a worker refuses a request (400) because it does not know the name of a picture any more."""
    return _MISS in body
