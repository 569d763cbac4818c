"""Replies that are compressed although nobody asked: they arrive whole, or break off in time."""

from __future__ import annotations

import gzip
import re
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.http.unpacking import FREE_BYTES, MAX_RATIO, PIECE_BYTES, Unpacker, UnpackingError


def unpacked(encoding: str, packed: bytes, step: int) -> bytes:
    unpacker, out = Unpacker(encoding), b""
    for at in range(0, len(packed), step):
        unpacker.feed(packed[at : at + step])
        while piece := unpacker.take():
            assert len(piece) <= PIECE_BYTES
            out += piece
    unpacker.end()
    return out


@settings(deadline=None)
@given(
    st.binary(max_size=3000),
    st.integers(1, 700),
    st.sampled_from([("gzip", gzip.compress), ("deflate", zlib.compress)]),
)
def test_what_was_packed_arrives_in_whatever_pieces(content: bytes, step: int, how: tuple) -> None:
    assert unpacked(how[0], how[1](content), step) == content


def test_a_little_that_stands_for_a_lot_ends_soon() -> None:
    packed = gzip.compress(bytes(100 * 1024 * 1024))
    with pytest.raises(UnpackingError, match="that is no reply") as caught:
        unpacked("gzip", packed, len(packed))
    told = int(re.findall(r"more than (\d+)", str(caught.value))[0])
    assert told <= max(FREE_BYTES, MAX_RATIO * len(packed)) + PIECE_BYTES
    assert told < 100 * 1024 * 1024 / 2


def test_what_breaks_off_or_is_no_gzip_is_told() -> None:
    for packed in (gzip.compress(b"hello" * 100)[:-9], b"hello, this is plain"):
        with pytest.raises(UnpackingError):
            unpacked("gzip", packed, 1000)
    with pytest.raises(UnpackingError, match="br"):
        Unpacker("br")


def test_no_body_at_all_is_none() -> None:
    assert unpacked("gzip", b"", 1) == b""
