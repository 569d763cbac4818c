"""The images of a sequence as JSON: `multi_modal_data` of answers and trajectories, with the files or without."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from middleware_hub.media.picture import base64_pieces


def images_json(images: Iterable[Mapping[str, Any]]) -> Iterator[bytes]:
    """Yield `multi_modal_data` as JSON, in pieces that take little time: whole, the files are a hundred megabytes and more.

    Args:
        images: as `Viewer.shown` returns them.
    """
    yield b'{"images":['
    for number, image in enumerate(images):
        about = {name: value for name, value in image.items() if name != "bytes"}
        yield (b"," if number else b"") + msgspec.json.encode(about)[:-1]
        if image["bytes"] is None:
            yield b',"bytes":null}'
        else:
            yield b',"bytes":"'
            yield from base64_pieces(image["bytes"])
            yield b'"}'
    yield b"]}"


def has_files(images: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether some of these images, as `Viewer.shown` returns them, come with their bytes."""
    return any(one["bytes"] is not None for one in images)
