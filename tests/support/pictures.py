"""Pictures that tests send: small files with something to see in them, other ones for another seed."""

from __future__ import annotations

import base64
import hashlib
import io
from typing import Any

from PIL import Image, ImageDraw


def picture(width: int, height: int, seed: int = 0, kind: str = "PNG", **options: Any) -> bytes:
    """Return an encoded picture of so many pixels; the options are of Pillow's encoder, which changes bytes, not pixels."""
    made = Image.new("RGB", (width, height), ((seed * 31) % 256, 90, 160))
    draw = ImageDraw.Draw(made)
    for number in range(12):
        left, top = (seed * 37 + number * 13) % width, (seed * 11 + number * 7) % height
        colour = ((seed * 97 + number * 40) % 256, (seed * 31 + number * 70) % 256, (seed * 5 + number * 90) % 256)
        draw.rectangle([left, top, left + width // 8, top + height // 8], fill=colour)
    encoded = io.BytesIO()
    made.save(encoded, kind, **options)
    return encoded.getvalue()


def data_url(content: bytes) -> str:
    """Return the picture as a data URL, which names its kind by its first bytes."""
    kind = "png" if content.startswith(b"\x89PNG") else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def digest(content: bytes) -> str:
    """Return the name of the file by its bytes."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"
