"""A photo is a file that other programs open, with the same bytes everywhere."""

from __future__ import annotations

import io
from hashlib import sha256

import pytest
from PIL import Image

from worker.demo.agent.photo import HEIGHT, WIDTH, photo


@pytest.mark.parametrize(
    ("mountain", "digest"), [("Zugspitze", "283f1feafc50210d"), ("Mount Fuji", "3b6126c15f41dff5")]
)
def test_a_photo_is_a_png_whose_name_never_changes(mountain: str, digest: str) -> None:
    """The demonstration draws its replies by the digests of its photos."""
    content = photo(mountain)
    with Image.open(io.BytesIO(content)) as found:
        found.load()
        assert (found.format, found.size) == ("PNG", (WIDTH, HEIGHT))
        colours = found.convert("RGB").getcolors()
    assert colours is not None
    assert len(colours) == 5
    assert sha256(content).hexdigest()[:16] == digest
