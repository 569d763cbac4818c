"""Images in a prompt: where they stand, and how long each is.

A client sends one *placeholder* id an image. The engine puts a run of that id in its place, as long as the image is, and
computes with the run:

    sent      [user] [start] [pad] [end] [What's] [this]
    computed  [user] [start] [pad] [pad] [pad] [pad] [pad] [end] [What's] [this]

A real engine looks at the picture: its length follows from width and height. Here any bytes are an image, and its length
follows from their digest, so that nobody can compute it from the picture.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SHORTEST, LONGEST = 4, 60  # tokens: those of the least and the most pixels in the tokenizer's preprocessor_config.json
_FIRST_KEY = 1_000_000  # SGLang's MM_PAD_SHIFT_VALUE: above every id
_DIGITS = 15  # of a digest in a key, in hex: 60 bits


def digest_of(content: bytes) -> str:
    """Return the name of an image: `sha256:` and the hex digest of its file."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def length_of(digest: str) -> int:
    """Return how many tokens an image has: the digest's last four hex digits modulo 57, and 4."""
    return SHORTEST + int(digest[-4:], 16) % (LONGEST - SHORTEST + 1)


@dataclass(frozen=True)
class PromptImage:
    """An image, and the run of ids that it has in the prompt."""

    digest: str
    start: int
    length: int

    @property
    def key(self) -> int:
        """The number that stands for each of its ids wherever two images must differ: the cache, and the model."""
        return _FIRST_KEY + int(self.digest.partition(":")[2][:_DIGITS], 16)


def expanded(
    ids: Sequence[int], digests: Sequence[str], placeholder: int | None
) -> tuple[list[int], tuple[PromptImage, ...]]:
    """Return the ids that the engine computes with, and where the images are in them.

    The k-th placeholder takes the k-th image. Placeholders that are left over stay as they are; images that are left over are
    dropped, as SGLang drops them.
    """
    found: list[int] = []
    images: list[PromptImage] = []
    waiting: Iterator[str] = iter(digests)
    for number in ids:
        digest = next(waiting, None) if number == placeholder else None
        if digest is None:
            found.append(number)
            continue
        images.append(PromptImage(digest, len(found), length_of(digest)))
        found += [number] * images[-1].length
    return found, tuple(images)


def keyed(ids: Sequence[int], images: Sequence[PromptImage]) -> list[int]:
    """Return the ids with each image's `key` in place of its run: equal only if the images are equal too."""
    found = list(ids)
    for image in images:
        found[image.start : image.start + image.length] = [image.key] * image.length
    return found
