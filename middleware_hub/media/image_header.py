"""The header of an image file: its format, its size in pixels, and how it is turned.

Of PNG (PNG 3, 11.2.1 and 11.3.2.4), JPEG (ITU T.81, B.1 and B.2.2), GIF (GIF89a, 18), WebP (RFC 9649) and BMP.
Cameras store a picture as the sensor had it, and note in EXIF (which has the form of TIFF 6.0, 2), or in XMP, how to turn it.

A file that ends before the first of its pixels is no image. One that is cut off later may be: decoders are lenient, each in its
own way, so an engine decides.

No library reads this for us. Pillow is 20 MB of decoders in C, which would see the bytes of every client. imagesize does not
tell how a PNG or a WebP is turned, and takes the sizes of large GIFs for negative ones. The tests compare with Pillow, because
engines read images with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from struct import error as CutOff
from struct import unpack_from
from typing import Final, NamedTuple

_MAX_BLOCKS: Final = 10_000
"""Chunks, segments or tags to look at. A PNG of 20 MB has 2,500; reading 10,000 takes some milliseconds."""


class ImageHeader(NamedTuple):
    """What the header of an image says.

    Attributes:
        mime: `image/png` and so on.
        width: in pixels, as stored.
        height: in pixels, as stored.
        orientation: 1 (upright) to 8, as EXIF counts; 1 if the file says nothing.
    """

    mime: str
    width: int
    height: int
    orientation: int = 1


def read_header(data: bytes) -> ImageHeader:
    """Return what the header of a file says.

    Raises:
        ValueError: the file is no image of a known format, or its header is damaged. The message says which.
    """
    for magic, reader in _READERS:
        if magic.match(data):
            try:
                return reader(data)
            except CutOff:
                raise ValueError("the image is cut off before its first pixel") from None
    raise ValueError("the bytes are no PNG, JPEG, GIF, WebP or BMP")


def _png(data: bytes) -> ImageHeader:
    kind, width, height = unpack_from(">4sII", data, 12)
    if kind != b"IHDR":
        raise ValueError("the PNG does not begin with its header")
    notes, at, has_pixels = list[bytes](), 8, False
    for _ in range(_MAX_BLOCKS):
        if at + 8 >= len(data):
            break
        length, kind = unpack_from(">I4s", data, at)
        if kind == b"eXIf" or (kind == b"iTXt" and data.startswith(b"XML:com.adobe.xmp\0", at + 8)):
            notes.append(data[at + 8 : at + 8 + length])
        has_pixels = has_pixels or (kind == b"IDAT" and length > 0)
        at += 12 + length  # four bytes of checksum
    else:
        has_pixels = True  # who knows
    if not has_pixels:
        raise CutOff
    return ImageHeader("image/png", width, height, _orientation(notes))


def _jpeg(data: bytes) -> ImageHeader:
    at, size, notes = 2, None, []
    for _ in range(_MAX_BLOCKS):
        at = data.find(b"\xff", at)  # decoders pass over what stands between two segments
        if at < 0:
            raise CutOff
        (marker,) = unpack_from("B", data, at + 1)
        if marker in (_START_OF_SCAN, _END_OF_IMAGE):
            break
        if marker in _WITHOUT_LENGTH:
            at += 1 if marker == 0xFF else 2
            continue
        (length,) = unpack_from(">H", data, at + 2)
        if marker in _SIZES:
            size = unpack_from(">HH", data, at + 5)
        elif marker == 0xE1:
            notes.append(data[at + 4 : at + 2 + length])
        at += 2 + length
    if size is None:
        raise ValueError("the JPEG says nothing about its size")
    height, width = size
    return ImageHeader("image/jpeg", width, height, _orientation(notes))


_START_OF_SCAN, _END_OF_IMAGE = 0xDA, 0xD9
_WITHOUT_LENGTH = frozenset((0x00, 0x01, *range(0xD0, 0xD9), 0xFF))
"""Markers that stand alone, and the byte that fills the space before a marker."""
_SIZES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""Start-of-frame markers: one for each way to compress. The three others are tables."""


def _gif(data: bytes) -> ImageHeader:
    width, height, flags = unpack_from("<HHB", data, 6)
    at, inside = 13 + _colours(flags), False
    for _ in range(_MAX_BLOCKS):
        (byte,) = unpack_from("B", data, at)
        if inside:  # of an extension: blocks, each with its length before it, until an empty one
            inside = byte > 0
            at += 1 + byte
        elif byte == 0x2C:  # a frame, which begins with its place, its colours, and the size of its codes
            unpack_from("2B", data, at + 10 + _colours(unpack_from("B", data, at + 9)[0]))
            break
        else:
            inside = byte == 0x21
            at += 1 + inside
    return ImageHeader("image/gif", width, height)


def _colours(flags: int) -> int:
    """Return the bytes of a table of colours of a GIF."""
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _webp(data: bytes) -> ImageHeader:
    size, kind = unpack_from("<I4x4s", data, 4)
    if size > len(data) - 8:  # decoders want all of it
        raise CutOff
    if kind == b"VP8 ":
        code, width, height = unpack_from("<3sHH", data, 23)
        if code != b"\x9d\x01\x2a":
            raise ValueError("the WebP does not begin with a key frame")
        width, height = width & 0x3FFF, height & 0x3FFF  # the two bits above say how to scale
    elif kind == b"VP8L":
        mark, bits = unpack_from("<BI", data, 20)
        if mark != 0x2F:
            raise ValueError("the WebP does not begin with its header")
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    elif kind == b"VP8X":
        low, high, low_height, high_height = unpack_from("<HBHB", data, 24)
        width, height = (low | high << 16) + 1, (low_height | high_height << 16) + 1
    else:
        raise ValueError("the WebP does not begin with its header")
    return ImageHeader("image/webp", width, height, _orientation(_webp_notes(data)))


def _webp_notes(data: bytes) -> Iterator[bytes]:
    at = 12
    for _ in range(_MAX_BLOCKS):
        if at + 8 > len(data):
            return
        kind, length = unpack_from("<4sI", data, at)
        if kind in (b"EXIF", b"XMP "):
            yield data[at + 8 : at + 8 + length]
        at += 8 + length + length % 2


def _bmp(data: bytes) -> ImageHeader:
    (size,) = unpack_from("<I", data, 14)
    if size not in (12, 40, 52, 56, 64, 108, 124):
        raise ValueError("the BMP has a header of no known version")
    width, height = unpack_from("<HH" if size == 12 else "<ii", data, 18)
    if len(data) <= max(14 + size, *unpack_from("<I", data, 10)):
        raise CutOff
    return ImageHeader("image/bmp", width, abs(height))  # a negative one says that the rows go down


_ORIENTATION = 274


def _tags(tiff: bytes) -> dict[int, int]:
    """Return the tags of the first directory that are one number of 16 or 32 bits. Raises struct.error if it is cut off."""
    order = ">" if tiff.startswith(b"MM") else "<"
    (start,) = unpack_from(f"{order}I", tiff, 4)
    (count,) = unpack_from(f"{order}H", tiff, start)
    found = {}
    for at in range(start + 2, start + 2 + 12 * min(count, _MAX_BLOCKS), 12):
        tag, kind, number = unpack_from(f"{order}HHI", tiff, at)
        if number == 1 and kind in (3, 4):
            (found[tag],) = unpack_from(f"{order}{'H' if kind == 3 else 'I'}", tiff, at + 8)
    return found


_XMP = re.compile(rb'tiff:Orientation(?:="|>)([1-8])')


def _orientation(notes: Iterator[bytes] | list[bytes]) -> int:
    """Return the orientation in EXIF or XMP, EXIF first; 1 if neither says one that exists."""
    in_xmp = 1
    for note in notes:
        note = note.removeprefix(b"Exif\0\0")
        if note.startswith((b"II", b"MM")):
            try:
                turned = _tags(note).get(_ORIENTATION, 0)
            except CutOff:
                continue  # a damaged note does not damage the picture
            if 1 <= turned <= 8:
                return turned
        elif (found := _XMP.search(note)) is not None:
            in_xmp = int(found[1])
    return in_xmp


_READERS: Final[tuple[tuple[re.Pattern[bytes], Callable[[bytes], ImageHeader]], ...]] = tuple(
    (re.compile(magic, re.DOTALL), reader)
    for magic, reader in (
        (rb"\x89PNG\r\n\x1a\n", _png),
        (rb"\xff\xd8\xff", _jpeg),
        (rb"GIF8[79]a", _gif),
        (rb"RIFF....WEBP", _webp),
        (rb"BM", _bmp),
    )
)
