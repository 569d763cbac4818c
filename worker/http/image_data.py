"""The images of a request to /generate: `image_data` and `mm_content_hashes`, with SGLang's refusals."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from typing import Any

from worker.engine.prompt_images import digest_of
from worker.http.exchange import OutOfRange, Refused

_DATA_URL = re.compile(r"data:[^,]*;base64,")
_HASH = re.compile(r"sha256:[0-9a-fA-F]{64}")


def image_digests(body: Mapping[str, Any], count: int, *, batch: bool) -> list[list[str]]:
    """Return for each of the `count` prompts the digests of its images, in the order in which placeholders take them.

    One prompt has a data URL or a list of them. A batch has a list a prompt, or an image a prompt, or one image for all.
    (`GenerateReqInput._normalize_image_data`)

    Raises:
        Refused: the lists do not fit the batch, a hash is none, or it is not that of its image.
        OutOfRange: an image is no data URL. An engine would open it as a path or a URL, which no router may ask of it.
    """
    given: Any = body.get("image_data")
    if not isinstance(given, list):
        given = [given] if given else []
        rows = [given] * count
    elif not batch:
        rows = [given]
    elif not given:
        rows = [[]] * count
    elif len(given) != count:
        raise Refused("The length of image_data should be equal to the batch size.")
    else:
        rows = [one if isinstance(one, list) else [one] for one in given]
    digests = [[digest_of(image_content(one)) for one in row if one is not None] for row in rows]
    _check_hashes(body.get("mm_content_hashes"), digests, batch=batch)
    return digests


def image_content(image: Any) -> bytes:
    """Return the bytes of a data URL. Raise OutOfRange for anything else."""
    start = _DATA_URL.match(image) if isinstance(image, str) else None
    if start is None:
        raise OutOfRange("an image that is no data URL")
    try:
        return base64.b64decode(image[start.end() :], validate=True)
    except ValueError:
        raise OutOfRange("an image that is no base64") from None


def _check_hashes(given: Any, digests: Sequence[Sequence[str]], *, batch: bool) -> None:
    if given is None or not any(digests):
        return
    if not isinstance(given, list):
        raise Refused("mm_content_hashes must be a list")
    if batch and len(given) != len(digests):
        raise Refused("The length of mm_content_hashes should equal the batch size")
    for own, row in zip(given if batch else [given], digests, strict=True):
        hashes = own if isinstance(own, list) else [own]
        if len(hashes) != len(row):
            raise Refused(f"mm_content_hashes has {len(hashes)} entries for {len(row)} images")
        for place, (value, digest) in enumerate(zip(hashes, row, strict=True)):
            if value is not None and not (isinstance(value, str) and _HASH.fullmatch(value)):
                raise Refused("content_hash must use the form 'sha256:<64 hex digits>'")
            if value is not None and value.lower() != digest:
                raise Refused(f"content hash mismatch for media_data[{place}]: expected {value}, got {digest}")
