"""The body of a reply that is compressed although nobody asked for that: unpacked piece by piece, and not without end.

A few hundred kilobytes can stand for gigabytes. What a worker says packs ten or twenty to one; what packs a hundred to one is
no reply of an engine.
"""

from __future__ import annotations

import zlib

MAX_RATIO = 100
"""Bytes that one byte may stand for, once there are `FREE_BYTES` of them."""

FREE_BYTES = 4 * 1024 * 1024
PIECE_BYTES = 1024 * 1024


class UnpackingError(Exception):
    """What came cannot be unpacked, or is not to be."""


class Unpacker:
    """One body, as `gzip` or `deflate`. Raises UnpackingError for another encoding."""

    def __init__(self, encoding: str) -> None:
        if encoding not in ("gzip", "x-gzip", "deflate"):
            raise UnpackingError(f"the reply is compressed ({encoding}), which nobody asked for")
        self._stream = zlib.decompressobj(wbits=32 + zlib.MAX_WBITS)
        self._waiting = b""
        self._fed = self._told = 0

    def feed(self, data: bytes) -> None:
        """More of what comes."""
        self._waiting += data
        self._fed += len(data)

    def take(self) -> bytes:
        """The next piece; empty if it takes more of what comes."""
        try:
            piece = self._stream.decompress(self._waiting, PIECE_BYTES)
        except zlib.error as error:
            raise UnpackingError(f"the reply cannot be unpacked: {error}") from error
        self._waiting = self._stream.unconsumed_tail
        self._told += len(piece)
        if self._told > max(FREE_BYTES, MAX_RATIO * self._fed):
            raise UnpackingError(f"{self._fed} bytes of the reply unpack to more than {self._told}: that is no reply")
        return piece

    def end(self) -> None:
        """Nothing more comes. Raises UnpackingError if something is missing."""
        if self._fed and not self._stream.eof:
            raise UnpackingError("the reply ends in the middle of what was compressed")
