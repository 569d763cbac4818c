"""Pictures in requests to a vLLM worker: `content_parts` of `/inference/v1/generate` (vLLM 0.32).

    {"token_ids": [.., 151655, ..], "content_parts": [{"type": "image_url", "url": "data:..", "uuid": NAME}]}

The ids have one placeholder for each picture, in order. `uuid` names a picture in the caches of the worker. Once it has
answered with it, the name alone is enough. A worker does not compare a known name with the bytes beside it: it takes the
picture that it has. So a name is made of the digest of the bytes, here alone, and no client can say one: the middleware gets
the fields from here, with a seal that this process has made up.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from hashlib import sha256
from typing import Any, Final

import msgspec
from msgspec import Raw

from router.engines.form import media
from router.engines.json import JSON_ERRORS
from router.errors import BadRequestError
from router.random_ids import random_id

_SEAL: Final = "image_seal"
_MISS: Final = b"Cache miss for"

NamedImage = tuple[str, Raw]
"""A picture's name, and its data URL as JSON."""


class NamedImages:
    """Makes the fields of pictures for a request in the common form, and reads them back on its way to a worker."""

    def __init__(self) -> None:
        self._seal = random_id()

    def fields(self, tenant: str, prompts: Sequence[Sequence[tuple[str, bytes]]], *, batch: bool) -> Mapping[str, Raw]:
        """Return the fields for the pictures (digest, data URL) of each prompt. Each tenant has names of its own.

        A shared name would tell by the time of an answer that another tenant has sent the same picture.
        """
        names = [[_name(tenant, digest) for digest, _ in each] for each in prompts]
        return {
            media.IMAGES: media.printed(prompts, batch=batch),
            media.NAMES: Raw(msgspec.json.encode(names if batch else names[0])),
            _SEAL: Raw(msgspec.json.encode(self._seal)),
        }

    def read(self, fields: Mapping[str, Raw], *, batch: bool) -> Sequence[Sequence[NamedImage]] | None:
        """Return the pictures of each prompt; None if `fields` did not make this request's. Raises BadRequestError."""
        if bytes(fields.get(_SEAL, b"")) != msgspec.json.encode(self._seal):
            return None
        try:
            if batch:
                named = msgspec.json.decode(fields[media.NAMES], type=list[list[str]])
                urls = msgspec.json.decode(fields[media.IMAGES], type=list[list[Raw]])
            else:
                named = [msgspec.json.decode(fields[media.NAMES], type=list[str])]
                urls = [msgspec.json.decode(fields[media.IMAGES], type=list[Raw])]
            return [list(zip(*each, strict=True)) for each in zip(named, urls, strict=True)]
        except (*JSON_ERRORS, KeyError, ValueError) as error:
            raise BadRequestError(f"`{media.IMAGES}` and `{media.NAMES}` do not fit each other: {error}") from error


def _name(tenant: str, digest: str) -> str:
    return f"sha256:{sha256(f'{tenant}/{digest}'.encode()).hexdigest()}" if tenant else digest


def content_parts(images: Sequence[NamedImage], known: Container[str]) -> list[dict[str, Any]]:
    """Return pictures as a worker gets them: those that it knows by their names alone."""
    return [
        {"type": "image_url", "uuid": name} if name in known else {"type": "image_url", "url": url, "uuid": name}
        for name, url in images
    ]


def was_missed(body: bytes) -> bool:
    """Return whether a worker refuses a request (400) because it does not know the name of a picture any more."""
    return _MISS in body
