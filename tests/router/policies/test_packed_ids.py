"""Names of prefixes are those of SGLang's gateway."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from router.policies import path_hashes
from router.policies.path_hashes import GLOBAL_EVICTION_HASH, hash_node_path, hash_token_path, pack_ids, unpack_ids


def test_known_hashes() -> None:
    """The first eight bytes of what BLAKE3's own test vectors say: of nothing, of one byte 0, of 0 to 3."""
    assert hash_node_path("").to_bytes(8, "little").hex() == "af1349b9f5f9a1a6"
    assert hash_node_path("\0").to_bytes(8, "little").hex() == "2d3adedff11b61f1"
    assert hash_token_path([]) == hash_node_path("")
    assert hash_token_path([0x03020100]) == hash_node_path("\0\1\2\3")


def test_ids_are_little_endian() -> None:
    assert hash_token_path([0x64636261, 0x68676665]) == hash_node_path("abcdefgh")
    assert hash_token_path(array("I", [0x64636261])) == hash_node_path("abcd")


def test_text_is_hashed_as_utf8() -> None:
    assert hash_node_path("aé!") == hash_token_path(b"a\xc3\xa9!")
    assert hash_node_path("\ud83d!") == hash_token_path(b"\xed\xa0\xbd!")


def test_no_prefix_is_called_everything() -> None:
    """No text is known whose hash is 0, so this is about the digest alone."""
    assert GLOBAL_EVICTION_HASH == 0
    assert [path_hashes._name(digest) for digest in (bytes(8), b"\1" + bytes(7), bytes(7) + b"\1")] == [1, 1, 1 << 56]


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_packed_ids_come_back(ids: list[int]) -> None:
    assert unpack_ids(pack_ids(ids)) == ids
    assert pack_ids(array("i", ids)) == pack_ids(memoryview(array("i", ids))) == pack_ids(pack_ids(ids))
