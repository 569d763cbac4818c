"""What has come of a large body, without a copy of it."""

from __future__ import annotations

from typing import Final

LARGE: Final = 32 * 1024
"""Bytes of a piece that is kept as it came. Smaller ones cost less as a copy than as an object of their own."""


class BodyPieces:
    """Stands in for the `bytearray` in which uvicorn gathers a body until the application takes it.

    uvicorn adds to it (`+=`), asks for its length, and takes all of it as `bytes`: each of these would copy what has come.
    """

    __slots__ = ("_length", "_pieces")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._length = 0

    def __iadd__(self, piece: bytes) -> BodyPieces:
        self._pieces.append(piece)
        self._length += len(piece)
        return self

    def __len__(self) -> int:
        return self._length

    def __bytes__(self) -> bytes:
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
