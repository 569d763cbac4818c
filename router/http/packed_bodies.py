"""Bodies of requests that are compressed: `gzip`, and `zstd` where the package `zstandard` is installed.

A few bytes can stand for gigabytes, so a body is unpacked piece by piece, and no further than it may be long.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

from router.errors import BadRequestError, BodyTooLargeError, UnsupportedEncodingError

try:
    import zstandard
except ImportError:
    zstandard = None  # type: ignore[assignment]

PIECE_BYTES = 1024 * 1024
_FIRST_BYTES = 4096
"""What a member of `gzip` is given at first; each time after that, twice as much."""
MOST_MEMBERS = 10_000
"""Members of one `gzip` body: a new one takes some microseconds, however short it is."""
_BROKEN_OFF = "it ends in the middle of what was compressed"
_LARGEST_WINDOW = 8 * 1024 * 1024
"""What an unpacker of HTTP has to support (RFC 9659, 3), and the memory that a body can make this one take."""


def unpacker(encoding: str) -> Callable[[bytes, int], bytes] | None:
    """Return `unpack(body, limit)` for a `content-encoding`; None for a body that is not packed.

    Raises UnsupportedEncodingError. `unpack` takes its time, and raises BodyTooLargeError for a body that unpacks to more than
    `limit` bytes, and BadRequestError for one that cannot be unpacked.
    """
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return None
    pieces = _unpackers().get(name)
    if pieces is None:
        known = ", ".join(sorted(_unpackers().keys() - {"x-gzip"}))
        raise UnsupportedEncodingError(
            f"content-encoding {encoding!r} is not supported: send the body uncompressed, or in one of {known}",
            headers=(("accept-encoding", known),),
        )

    def unpack(body: bytes, limit: int) -> bytes:
        found: list[bytes] = []
        size = 0
        try:
            for piece in pieces(body):
                size += len(piece)
                if size > limit:
                    raise BodyTooLargeError(f"the request body unpacks to more than {limit} bytes (--max-body-bytes)")
                found.append(piece)
        except _errors() as error:
            raise BadRequestError(f"the request body cannot be unpacked as {name}: {error}") from error
        return b"".join(found)

    return unpack


def _unpackers() -> dict[str, Callable[[bytes], Iterator[bytes]]]:
    found: dict[str, Callable[[bytes], Iterator[bytes]]] = {"gzip": _gzip, "x-gzip": _gzip}
    return found if zstandard is None else {**found, "zstd": _zstd}


def _errors() -> tuple[type[Exception], ...]:
    return (zlib.error,) if zstandard is None else (zlib.error, zstandard.ZstdError)


def _gzip(body: bytes) -> Iterator[bytes]:
    """Unpack the members of a file, one after the other (RFC 1952, 2.2).

    A stream copies what it was given and did not take. So it is given a little at first: there may be thousands of members.
    """
    at = members = 0
    while at < len(body):
        members += 1
        if members > MOST_MEMBERS:
            raise zlib.error(f"it has more than {MOST_MEMBERS} members")
        stream, size = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS), _FIRST_BYTES
        while not stream.eof:
            part = body[at : at + size]
            piece = stream.decompress(part, PIECE_BYTES)
            if not piece and not part and not stream.eof:
                raise zlib.error(_BROKEN_OFF)
            at += len(part) - len(stream.unconsumed_tail) - len(stream.unused_data)
            size = min(2 * size, PIECE_BYTES)
            yield piece


def _zstd(body: bytes) -> Iterator[bytes]:
    unpacks = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW)
    reader = unpacks.stream_reader(body, read_across_frames=True)
    piece = reader.read(PIECE_BYTES)
    if body and not piece:
        # The reader does not tell a frame that breaks off. Half a JSON object shows by itself; no body at all may mean `{}`.
        frame = unpacks.decompressobj()
        frame.decompress(body)
        if not frame.eof:
            raise zstandard.ZstdError(_BROKEN_OFF)
    while piece:
        yield piece
        piece = reader.read(PIECE_BYTES)
