"""Vocabularies of models that take images: any of `vocabularies`, with the embedded engine's tokens for images in it."""

from __future__ import annotations

import base64
import contextlib
import tempfile
from pathlib import Path

from scripts.make_embedded_data import make_image_tokenizer
from tests.support.vocabularies import Name, cache_folder, vocabulary

_FORMAT = 1  # raise it when what is built changes: the cache is keyed by it


def image_vocabulary(name: Name) -> Path:
    """The folder of a vocabulary for an `EmbeddedWorker` with images, and for the router before it. No id of `name` changes."""
    source = vocabulary(name)
    target = cache_folder() / "vocabularies" / f"{source.name}-images-{_FORMAT}"
    if not target.is_dir():
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as temporary:
            folder = Path(temporary) / "folder"
            make_image_tokenizer(source, folder)
            with contextlib.suppress(OSError):  # of several processes at once, the first one wins
                folder.rename(target)
    return target


def data_url(content: bytes, kind: str = "image/png") -> str:
    """An image as workers take it. The embedded engine takes any bytes."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
