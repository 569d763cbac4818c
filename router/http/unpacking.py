"""Unpacks the body of a worker's reply that is compressed though the router asked for none.

A few hundred kilobytes can stand for gigabytes. Replies of an engine are packed ten or twenty to one; a hundred to one is no
reply of an engine.
"""

from __future__ import annotations

import zlib

MAX_RATIO = 100
"""Bytes that one compressed byte may stand for, once more than `FREE_BYTES` are unpacked."""

FREE_BYTES = 4 * 1024 * 1024
PIECE_BYTES = 1024 * 1024


class UnpackingError(Exception):
    """A reply cannot be unpacked, or must not be."""


class Unpacker:
    """Unpacks one body, `gzip` or `deflate`. Raises UnpackingError for another encoding."""

    def __init__(self, encoding: str) -> None:
        if encoding not in ("gzip", "x-gzip", "deflate"):
            raise UnpackingError(f"the reply is compressed ({encoding}), which the router did not ask for")
        self._stream = zlib.decompressobj(wbits=32 + zlib.MAX_WBITS)
        self._waiting = b""
        self._fed = self._taken = 0

    def feed(self, data: bytes) -> None:
        self._waiting += data
        self._fed += len(data)

    def take(self) -> bytes:
        """Return the next piece; empty if more has to be fed first. Raises UnpackingError."""
        try:
            piece = self._stream.decompress(self._waiting, PIECE_BYTES)
        except zlib.error as error:
            raise UnpackingError(f"the reply cannot be unpacked: {error}") from error
        self._waiting = self._stream.unconsumed_tail
        self._taken += len(piece)
        if self._taken > max(FREE_BYTES, MAX_RATIO * self._fed):
            raise UnpackingError(f"{self._fed} bytes of the reply unpack to more than {self._taken}: that is no reply")
        return piece

    def end(self) -> None:
        """Note the end of the body. Raises UnpackingError if something is missing."""
        if self._fed and not self._stream.eof:
            raise UnpackingError("the reply ends in the middle of what was compressed")
