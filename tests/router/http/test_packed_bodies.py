"""Compressed bodies of requests are unpacked, and no further than they may be long."""

from __future__ import annotations

import gzip
import tracemalloc

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from router.errors import BadRequestError, BodyTooLargeError, UnsupportedEncodingError
from router.http import packed_bodies
from router.http.packed_bodies import PIECE_BYTES, unpacker

PACK = {"gzip": gzip.compress, "zstd": zstandard.compress}


def unpacked(encoding: str, body: bytes, limit: int = 1 << 20) -> bytes:
    unpack = unpacker(encoding)
    assert unpack is not None
    return unpack(body, limit)


@given(st.lists(st.binary(max_size=300), max_size=3), st.sampled_from(["gzip", "zstd"]))
def test_what_was_packed_comes_out_in_one_part_or_several(parts: list[bytes], encoding: str) -> None:
    assert unpacked(encoding, b"".join(map(PACK[encoding], parts))) == b"".join(parts)


@pytest.mark.parametrize("encoding", PACK)
def test_the_limit_is_on_what_comes_out(encoding: str) -> None:
    packed = PACK[encoding](bytes(5000))
    assert len(packed) < 100
    assert unpacked(encoding, packed, 5000) == bytes(5000)
    with pytest.raises(BodyTooLargeError, match="more than 4999 bytes"):
        unpacked(encoding, packed, 4999)


@pytest.mark.parametrize("encoding", PACK)
def test_no_more_is_unpacked_than_the_limit_allows(encoding: str) -> None:
    packed = PACK[encoding](bytes(64 * PIECE_BYTES))
    tracemalloc.start()
    try:
        with pytest.raises(BodyTooLargeError):
            unpacked(encoding, packed, 2 * PIECE_BYTES)
        assert tracemalloc.get_traced_memory()[1] < 8 * PIECE_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("encoding", PACK)
@pytest.mark.parametrize("body", [b"plain", b"{}"])
def test_what_is_not_packed_is_told(encoding: str, body: bytes) -> None:
    with pytest.raises(BadRequestError, match=f"cannot be unpacked as {encoding}"):
        unpacked(encoding, body)


def test_a_member_that_breaks_off_is_told() -> None:
    with pytest.raises(BadRequestError, match="in the middle"):
        unpacked("gzip", gzip.compress(b"abc" * 100)[:-9])


@pytest.mark.parametrize("encoding", ["", "identity", " Identity "])
def test_a_plain_body_needs_no_unpacking(encoding: str) -> None:
    assert unpacker(encoding) is None


@pytest.mark.parametrize("encoding", ["br", "deflate", "compress", "gzip, zstd", "gzip, gzip", "x"])
def test_other_encodings_are_refused_with_those_that_are_not(encoding: str) -> None:
    with pytest.raises(UnsupportedEncodingError, match="gzip, zstd") as caught:
        unpacker(encoding)
    assert caught.value.status == 415
    assert caught.value.headers == (("accept-encoding", "gzip, zstd"),)


def test_without_the_package_zstd_is_another_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_bodies, "zstandard", None)
    assert unpacked("gzip", gzip.compress(b"abc")) == b"abc"
    with pytest.raises(UnsupportedEncodingError, match="in one of gzip"):
        unpacker("zstd")
