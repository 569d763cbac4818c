"""The photos that the helpers find: a mountain each, drawn here, so that the demonstration needs no file and no library.

They are PNG files (ISO/IEC 15948) with a palette, whose data is stored and not compressed: so their bytes, and with them their
digests, are the same everywhere.
"""

from __future__ import annotations

import struct
import zlib

WIDTH, HEIGHT = 120, 80
SKY, SUN, SNOW, ROCK, WOOD = range(5)
_COLOURS = bytes((158, 197, 232, 250, 214, 120, 246, 249, 252, 96, 105, 122, 63, 99, 74))
_OUTLINES = {
    "Zugspitze": ((0, 52), (18, 40), (30, 46), (52, 17), (64, 30), (78, 12), (96, 36), (108, 31), (120, 48)),
    "Mount Fuji": ((0, 66), (24, 58), (52, 16), (68, 16), (96, 58), (120, 66)),
}


def photo(mountain: str) -> bytes:
    """Return the file of a photo of a mountain."""
    outline = _OUTLINES[mountain]
    tops = [_height(outline, x) for x in range(WIDTH)]
    rows = [bytes((0, *(_colour(x, y, tops[x]) for x in range(WIDTH)))) for y in range(HEIGHT)]
    header = struct.pack(">IIBBBBB", WIDTH, HEIGHT, 8, 3, 0, 0, 0)
    parts = ((b"IHDR", header), (b"PLTE", _COLOURS), (b"IDAT", _stored(b"".join(rows))), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*part) for part in parts)


def _height(outline: tuple[tuple[int, int], ...], x: int) -> int:
    """Return where the mountain begins in a column."""
    place = max(number for number, (left, _) in enumerate(outline) if left <= x)
    (left, top), (right, bottom) = outline[place], outline[place + 1]
    return top + (bottom - top) * (x - left) // (right - left)


def _colour(x: int, y: int, top: int) -> int:
    if y < top:
        return SUN if (x - 100) ** 2 + (y - 15) ** 2 < 60 else SKY
    if y > 62 + (x * 7 % 5):
        return WOOD
    return SNOW if y < 30 + (x * 5 % 7) else ROCK


def _stored(data: bytes) -> bytes:
    """Return data as a zlib stream of one stored block (RFC 1950, RFC 1951)."""
    size = struct.pack("<HH", len(data), len(data) ^ 0xFFFF)
    return b"\x78\x01\x01" + size + data + struct.pack(">I", zlib.adler32(data))


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
