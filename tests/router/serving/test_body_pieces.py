"""A large body is gathered without a copy, as a `bytearray` would gather it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.serving.body_pieces import BodyPieces


@given(st.lists(st.binary(max_size=9)))
def test_it_is_what_a_bytearray_would_be(pieces: list[bytes]) -> None:
    found, expected = BodyPieces(), bytearray()
    for piece in pieces:
        found += piece
        expected += piece
        assert (len(found), bytes(found), bool(found)) == (len(expected), bytes(expected), bool(expected))


def test_one_piece_is_not_copied() -> None:
    piece, found = bytes(100), BodyPieces()
    found += piece
    assert bytes(found) is piece
