"""Packed ids are printed as the list that a JSON parser reads again, whatever the ids are."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from middleware_hub.spans.chain import PRINTED, pack_ids, printed_ids

EDGES = (
    0,
    9,
    10,
    99,
    100,
    999,
    1000,
    1001,
    9999,
    10_000,
    99_999,
    100_000,
    PRINTED - 1,
    PRINTED,
    2**31 - 1,
    -1,
    -(2**31),
)
IDS = st.integers(-(2**31), 2**31 - 1) | st.integers(0, PRINTED) | st.sampled_from(EDGES)


@given(st.lists(IDS))
def test_a_parser_reads_the_same_ids(ids: list[int]) -> None:
    written = printed_ids(pack_ids(ids))
    assert json.loads(written) == ids
    assert msgspec.json.decode(written, type=list[int]) == ids
    assert written[:1] + written[-1:] == b"[]"


def test_every_number_of_the_table_is_printed() -> None:
    numbers = list(range(PRINTED))
    assert json.loads(printed_ids(pack_ids(numbers))) == numbers


@pytest.mark.parametrize("wrong", [-1, PRINTED, PRINTED + 5, 2**31 - 1])
def test_one_id_outside_of_the_table_spoils_none_of_the_others(wrong: int) -> None:
    ids = [*range(2000), wrong, 7]
    assert json.loads(printed_ids(pack_ids(ids))) == ids
