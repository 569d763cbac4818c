"""Images: how many bytes of them to hold, and to take in a request."""

from __future__ import annotations

from dataclasses import dataclass

from router.config.flag import Section, flag
from router.config.token_budget import MEDIA_BUDGET, media_budget


@dataclass(frozen=True)
class MediaConfig(Section):
    """The limits on images, in bytes of their files."""

    TITLE = "images"

    max_bytes: int | None = flag(
        "--media-max-bytes",
        None,
        "most bytes of images to hold, each once as a file and once in base64; over it, those that no conversation needs go"
        " first",
        unset=MEDIA_BUDGET,
    )
    max_image_bytes: int = flag(
        "--media-max-image-bytes", 20_000_000, "largest file of an image; a larger one gets 400"
    )
    max_request_bytes: int = flag(
        "--media-max-request-bytes",
        128 * 1024 * 1024,
        "most bytes of images in a request, which as base64 count for --max-body-bytes, too",
    )

    @property
    def budget(self) -> int:
        """`max_bytes`, or an eighth of the memory."""
        return media_budget(self.max_bytes)
