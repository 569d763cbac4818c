"""A picture: the bytes of an image file, and what its header says. It is named by the hash of these bytes.

The same pixels in other bytes are another picture. Everything that reads a file as a whole (base64, hash) costs some
milliseconds a megabyte, so callers run `read_picture` in a thread.
"""

from __future__ import annotations

import re
from binascii import Error as Base64Error
from binascii import a2b_base64, b2a_base64
from hashlib import sha256
from typing import Final

import msgspec
from msgspec.structs import force_setattr

from middleware_hub.media.errors import MediaInvalidError, MediaUrlError
from middleware_hub.media.image_header import read_header

MAX_PIXELS: Final = 178_956_970
"""Pillow opens no image with more, so no engine that reads images with it does."""

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_PATH = re.compile(r"(?:/|\.\.?/|~|\\\\).*|[^\s]*\.[A-Za-z0-9]{2,5}")
_LONGEST_PATH: Final = 4096
_SPACE: Final = b" \t\n\v\f\r"


class Picture(msgspec.Struct, frozen=True, gc=False):
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
            force_setattr(self, "_url", self._head + b2a_base64(self.data, newline=False))
        assert self._url is not None
        return self._url

    @property
    def held_bytes(self) -> int:
        """The memory that it takes: its file, and its data URL, whether that has been made yet or not."""
        return len(self.data) + len(self._head) + (len(self.data) + 2) // 3 * 4

    @property
    def _head(self) -> bytes:
        return b"data:%b;base64," % self.mime.encode()


def is_digest(given: str) -> bool:
    """Return whether a text names a picture: `sha256:` and 64 lower-case hex digits."""
    return _DIGEST.fullmatch(given) is not None


def read_picture(given: str, max_bytes: int) -> Picture:
    """Return the picture of a data URL (`data:image/png;base64,...`) or of bare base64.

    Base64 may have ASCII white space in it: some encoders break lines. The media type that the URL claims is not read.

    Args:
        given: by a client.
        max_bytes: of the file.

    Raises:
        MediaInvalidError: it is no base64, no image, larger than `max_bytes`, or has no pixels or too many.
        MediaUrlError: it is another URL, or a path.
    """
    bare = given[:5].lower() != "data:"
    if bare:
        if given.startswith("sha256:"):
            raise MediaInvalidError("a digest is `sha256:` and 64 lower-case hex digits")
        if _SCHEME.match(given):
            raise MediaUrlError(_NO_URL)
        encoded = given
    else:
        head, comma, encoded = given.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise MediaInvalidError("a data URL of an image must be in base64: data:image/png;base64,...")
    try:
        return make_picture(_decoded(encoded, max_bytes), max_bytes)
    except MediaInvalidError:
        # Base64 may begin like a path (that of a JPEG does), so a text counts as a path only if it is no image.
        if bare and len(given) <= _LONGEST_PATH and _PATH.fullmatch(given):
            raise MediaUrlError(_NO_URL) from None
        raise


_NO_URL = "an image must be sent as base64 or as a data URL: the router opens no address and no path"


def make_picture(data: bytes, max_bytes: int) -> Picture:
    """Return the picture of a file. Raises MediaInvalidError if it is no image, or larger than `max_bytes`."""
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
    return Picture(digest, found.mime, found.width, found.height, data, upright=found.orientation == 1)


def _decoded(encoded: str, max_bytes: int) -> bytes:
    longest = (max_bytes + 2) // 3 * 4
    try:
        characters = encoded.encode("ascii")
        if len(characters) > longest:
            characters = characters.translate(None, _SPACE)
            if len(characters) > longest:
                raise _too_large(max_bytes)
        try:
            return a2b_base64(characters, strict_mode=True)
        except Base64Error:  # to look for white space first would cost every image a copy
            return a2b_base64(characters.translate(None, _SPACE), strict_mode=True)
    except ValueError as error:
        raise MediaInvalidError(f"an image is no base64: {error}") from None


def _too_large(max_bytes: int) -> MediaInvalidError:
    return MediaInvalidError(f"an image is larger than {max_bytes} bytes (--media-max-image-bytes)")
