"""Compressed bodies of requests are unpacked, and no further than they may be long."""

from __future__ import annotations

import gzip
import random
import tracemalloc
import zlib
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from router.errors import BadRequestError, BodyTooLargeError, UnsupportedEncodingError
from router.http import packed_bodies
from router.http.packed_bodies import MOST_MEMBERS, PIECE_BYTES, unpacker

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


def test_a_frame_of_zstd_that_breaks_off_before_its_first_byte_is_no_empty_body() -> None:
    """A pause without a body is one of mode `abort`."""
    packed = zstandard.compress(b'{"mode": "in_place"}' * 100)
    for end in range(1, len(packed) - 4):
        with pytest.raises(BadRequestError, match="cannot be unpacked as zstd"):
            unpacked("zstd", packed[:end])
    assert unpacked("zstd", zstandard.compress(b"")) == unpacked("zstd", b"") == b""


def test_many_members_cost_no_more_than_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream copies what it leaves: a megabyte of empty members, each given the rest of the body, took seconds."""
    given = 0

    class Counted:
        def __init__(self, wbits: int) -> None:
            self._stream = decompressobj(wbits=wbits)

        def decompress(self, data: bytes, most: int) -> bytes:
            nonlocal given
            given += len(data)
            return self._stream.decompress(data, most)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._stream, name)

    decompressobj = zlib.decompressobj
    monkeypatch.setattr(zlib, "decompressobj", Counted)
    parts = [b"%d" % number for number in range(MOST_MEMBERS)]
    packed = b"".join(map(gzip.compress, parts))
    assert unpacked("gzip", packed) == b"".join(parts)
    assert given <= MOST_MEMBERS * 4096
    with pytest.raises(BadRequestError, match="more than 10000 members"):
        unpacked("gzip", packed + gzip.compress(b""))
    given = 0
    large = gzip.compress(random.Random(0).randbytes(16 * PIECE_BYTES))
    assert len(unpacked("gzip", large, 1 << 25)) == 16 * PIECE_BYTES
    assert given < 3 * len(large)


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
