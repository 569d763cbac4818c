"""A picture: the bytes of an image file, and what its header says. It is named by the hash of these bytes.

The same pixels in other bytes are another picture. Everything that reads a file as a whole (base64, hash) costs some
milliseconds a megabyte, so callers run `read_picture` in a thread, and base64 is done in steps, between which others have
their turn. The base64 that a client sends is kept: workers get it again.
"""

from __future__ import annotations

import re
from binascii import Error as Base64Error
from binascii import a2b_base64, b2a_base64
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import force_setattr

from middleware_hub.media.errors import MediaInvalidError, MediaUrlError
from middleware_hub.media.image_header import read_header

MAX_PIXELS: Final = 178_956_970
"""Pillow opens no image with more, so no engine that reads images with it does."""

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_SCHEME = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*:")
_PATH = re.compile(rb"(?:/|\.\.?/|~|\\\\).*|[^\s]*\.[A-Za-z0-9]{2,5}")
_LONGEST_PATH: Final = 4096
_LONGEST_HEAD: Final = 1024
"""Characters of a data URL up to its comma."""
_STEP: Final = 1 << 18
"""Characters of base64 to decode at once, and bytes to encode: a fraction of a millisecond."""
_PIECE: Final = 1 << 16
"""Characters to compare at once. The copy of more would come from new pages, and these take longer than to compare."""
_SAMPLE: Final = 24
_SPACE: Final = b" \t\n\v\f\r"
_STANDARD: Final = bytes.maketrans(b"-_", b"+/")
"""From the letters of base64 for addresses to those of the usual one."""


def base64_pieces(data: bytes) -> Iterator[bytes]:
    """Yield the base64 of a file in pieces, each of which takes a fraction of a millisecond."""
    view, step = memoryview(data), _STEP // 4 * 3
    for at in range(0, len(view), step):
        yield b2a_base64(view[at : at + step], newline=False)


class Base64Sample(NamedTuple):
    """The length of a base64 text and some characters of its middle: texts with other samples are other texts."""

    length: int
    middle: bytes

    @classmethod
    def of(cls, text: bytes, start: int, end: int) -> Base64Sample:
        """Return that of the base64 from `start` to `end` of a text."""
        middle = (start + end) // 2
        return cls(end - start, text[middle : min(middle + _SAMPLE, end)])


class Picture(msgspec.Struct, frozen=True, weakref=True):
    """An image file.

    Attributes:
        digest: `sha256:` and the hash of `data`, in 64 lower-case hex digits.
        mime: `image/png` and so on, by the first bytes.
        width: in pixels, as stored.
        height: in pixels, as stored.
        data: the bytes of the file.
        upright: whether it is shown as it is stored. Engines differ in whether they turn it.
    """

    digest: str
    mime: str
    width: int
    height: int
    data: bytes
    upright: bool
    _url: bytes | None = None

    @property
    def data_url(self) -> bytes:
        """The picture as `data:image/png;base64,...`, encoded at the first call, and kept: each turn sends all again."""
        if self._url is None:
            force_setattr(self, "_url", b"".join((_head(self.mime), *base64_pieces(self.data))))
        assert self._url is not None
        return self._url

    @property
    def sample(self) -> Base64Sample | None:
        """The sample of its base64; None as long as that has not been made."""
        return None if self._url is None else Base64Sample.of(self._url, len(_head(self.mime)), len(self._url))

    def stands_at(self, text: bytes, start: int) -> bool:
        """Return whether its base64, which has been made, stands in a text from `start` on."""
        url = self.data_url
        begin = len(_head(self.mime))
        return all(
            text.startswith(url[begin + at : begin + at + _PIECE], start + at)
            for at in range(0, len(url) - begin, _PIECE)
        )

    @property
    def held_bytes(self) -> int:
        """The memory that it takes: its file, and its data URL, whether that has been made yet or not."""
        return len(self.data) + len(_head(self.mime)) + (len(self.data) + 2) // 3 * 4


def is_digest(given: str) -> bool:
    """Return whether a text names a picture: `sha256:` and 64 lower-case hex digits."""
    return _DIGEST.fullmatch(given) is not None


def payload(body: bytes, start: int, end: int) -> int:
    """Return where the base64 begins of a data URL, or of bare base64, that stands in a body from `start` to `end`."""
    if not body.startswith(b"data:", start):
        return start
    comma = body.find(b",", start, min(end, start + _LONGEST_HEAD))
    return comma + 1 if comma >= 0 and body.endswith(b";base64", start, comma) else start


def read_picture(given: str | memoryview, max_bytes: int) -> Picture:
    """Return the picture of a data URL (`data:image/png;base64,...`) or of bare base64.

    Base64 may have ASCII white space in it: some encoders break lines. The media type that the URL claims is not read.

    Args:
        given: by a client.
        max_bytes: of the file.

    Raises:
        MediaInvalidError: it is no base64, no image, larger than `max_bytes`, or has no pixels or too many.
        MediaUrlError: it is another URL, or a path.
    """
    try:
        text = memoryview(given.encode("ascii")) if isinstance(given, str) else given
    except UnicodeEncodeError as error:
        raise MediaInvalidError(f"an image is no base64: {error}") from None
    head, start = bytes(text[:_LONGEST_HEAD]), 0
    bare = head[:5].lower() != b"data:"
    if bare:
        if head.startswith(b"sha256:"):
            raise MediaInvalidError("a digest is `sha256:` and 64 lower-case hex digits")
        if _SCHEME.match(head):
            raise MediaUrlError(_NO_URL)
    else:
        start = head.find(b",") + 1
        if not head[:start].lower().endswith(b";base64,"):
            raise MediaInvalidError("a data URL of an image must be in base64: data:image/png;base64,...")
    encoded = text[start:]
    try:
        data, once = _decoded(encoded, max_bytes)
        return make_picture(data, max_bytes, encoded if once else None)
    except MediaInvalidError:
        # Base64 may begin like a path (that of a JPEG does), so a text counts as a path only if it is no image.
        if bare and len(text) <= _LONGEST_PATH and _PATH.fullmatch(text):
            raise MediaUrlError(_NO_URL) from None
        raise


_NO_URL = (
    "an image must be sent as base64, as a data URL, or by the digest of one that was sent: the router opens no path, and"
    " addresses of http and https only with --fetch-media"
)


def make_picture(data: bytes, max_bytes: int, encoded: memoryview | None = None) -> Picture:
    """Return the picture of a file. Raises MediaInvalidError if it is no image, or larger than `max_bytes`.

    `encoded`: the file in base64, without white space, if the caller has it.
    """
    if len(data) > max_bytes:
        raise _too_large(max_bytes)
    try:
        found = read_header(data)
    except ValueError as error:
        raise MediaInvalidError(f"an image cannot be read: {error}") from None
    if found.width < 1 or found.height < 1 or found.width * found.height > MAX_PIXELS:
        raise MediaInvalidError(
            f"an image of {found.width} x {found.height} pixels is none: 1 to {MAX_PIXELS} are allowed"
        )
    digest = f"sha256:{sha256(data).hexdigest()}"
    url = None if encoded is None else b"".join((_head(found.mime), encoded))
    return Picture(digest, found.mime, found.width, found.height, data, found.orientation == 1, url)


def _head(mime: str) -> bytes:
    return b"data:%b;base64," % mime.encode()


def _decoded(encoded: memoryview, max_bytes: int) -> tuple[bytes, bool]:
    """Return the bytes of base64, and whether it is written as an encoder writes it.

    It may have white space in it, or be the form for addresses (RFC 4648, 5), which Google's library sends.
    """
    longest = (max_bytes + 2) // 3 * 4
    try:
        if len(encoded) <= longest:
            try:
                return undone(encoded), True
            except Base64Error:  # to look for other forms first would cost every image a copy
                pass
        steps = range(0, len(encoded), _STEP)
        characters = b"".join([bytes(encoded[at : at + _STEP]).translate(_STANDARD, _SPACE) for at in steps])
        if len(characters) > longest:
            raise _too_large(max_bytes)
        return undone(memoryview(characters)), False
    except ValueError as error:
        raise MediaInvalidError(f"an image is no base64: {error}") from None


def undone(encoded: memoryview) -> bytes:
    """Return what base64 stands for. Raises Base64Error. A call for all of it would hold up the event loop from a thread."""
    if len(encoded) <= _STEP:
        return _piece(encoded)
    pieces = []
    for at in range(0, len(encoded), _STEP):
        pieces.append(_piece(encoded[at : at + _STEP]))
        if len(pieces[-1]) != _STEP // 4 * 3 and at + _STEP < len(encoded):
            raise Base64Error("Excess data after padding")
    return b"".join(pieces)


def _piece(encoded: memoryview) -> bytes:
    """Return what base64 stands for. Raises Base64Error.

    msgspec takes half the time for it, and takes nothing that `binascii` does not, as long as there are no escapes of JSON.
    """
    quoted = b"".join((b'"', encoded, b'"'))
    if b"\\" not in quoted:
        with suppress(msgspec.DecodeError):
            return _decode(quoted)
    return a2b_base64(encoded, strict_mode=True)


_decode = msgspec.json.Decoder(bytes).decode


def _too_large(max_bytes: int) -> MediaInvalidError:
    return MediaInvalidError(f"an image is larger than {max_bytes} bytes (--media-max-image-bytes)")
