"""Token ids as prefix trees keep them."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.prefix_tree.tree import pack_ids
from tests.router.prefix_tree.recount import unpack_ids


def test_ids_are_little_endian() -> None:
    assert pack_ids([0x64636261, 0xFFFFFFFE]) == b"abcd\xfe\xff\xff\xff"


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_packed_ids_come_back(ids: list[int]) -> None:
    assert unpack_ids(pack_ids(ids)) == ids
    assert pack_ids(array("I", ids)) == pack_ids(memoryview(array("I", ids))) == pack_ids(pack_ids(ids))


@pytest.mark.parametrize("wrong", [2**32, -1])
def test_invalid_ids_are_refused(wrong: int) -> None:
    with pytest.raises(ValueError, match="from 0 to"):
        pack_ids([1, wrong])
