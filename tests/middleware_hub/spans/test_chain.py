"""Spans and chains: what goes in comes out."""

from __future__ import annotations

import math
import random
import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from middleware_hub.spans.chain import (
    SpanFlag,
    TokenSpan,
    Versions,
    links,
    pack_ids,
    pack_logprobs,
    unpack_ids,
    version_names,
)
from middleware_hub.spans.trajectory import flatten

INT32 = st.integers(-(2**31), 2**31 - 1)
DOUBLES = st.floats(allow_nan=False)
SINGLES = st.floats(width=32, allow_nan=False)


def bits(values: list[float]) -> list[bytes]:
    return [struct.pack("<d", value) for value in values]


def context(
    ids: list[int], parent: TokenSpan | None = None, take: int = 0, flags: SpanFlag = SpanFlag.NONE
) -> TokenSpan:
    start = 0 if parent is None else parent.text_end
    return TokenSpan(parent, take, start, pack_ids(ids), len(ids), flags=flags)


def sampled(
    ids: list[int],
    parent: TokenSpan | None = None,
    take: int | None = None,
    *,
    versions: Versions = "1",
    logprobs: list[float] | None = None,
    flags: SpanFlag = SpanFlag.NONE,
) -> TokenSpan:
    if take is None:
        take = 0 if parent is None else len(parent)
    start = 0 if parent is None else parent.text_end
    packed = None if logprobs is None else pack_logprobs(logprobs)
    return TokenSpan(parent, take, start, pack_ids(ids), len(ids), packed, versions, flags)


# Packing -----------------------------------------------------------------------------------------------------------------


@given(st.lists(INT32))
def test_ids_come_back_as_they_were(ids: list[int]) -> None:
    assert unpack_ids(pack_ids(ids)) == ids


@pytest.mark.parametrize("wrong", [2**31, -(2**31) - 1, 10**30])
def test_an_id_beyond_int32_is_refused_and_not_wrapped(wrong: int) -> None:
    with pytest.raises(OverflowError):
        pack_ids([1, wrong])


@given(st.lists(DOUBLES | SINGLES, min_size=1))
@example([-0.0])
@example([0.0, -0.0, 5e-324, -5e-324])
@example([1.401298464324817e-45, 1.1754943508222875e-38, -1.1754942106924411e-38])
@example([3.4028234663852886e38, 3.4028235677973366e38, -1.7976931348623157e308])
@example([-3.3467748165130615, -0.1])
@example([math.inf, -math.inf])
def test_every_float_comes_back_as_the_same_float(values: list[float]) -> None:
    """To the bit, the sign of zero included: float32 is only how it is kept where nothing is lost by it."""
    span = sampled(list(range(len(values))), logprobs=values)
    flat = flatten(span, len(span))
    assert flat.logprobs is not None
    assert bits(flat.logprobs.tolist()) == bits(values)


@given(st.lists(SINGLES, min_size=1))
def test_float32_logprobs_take_four_bytes_each(values: list[float]) -> None:
    assert len(pack_logprobs(values)) == 4 * len(values)


def test_one_double_makes_all_of_a_span_doubles() -> None:
    assert len(pack_logprobs([-0.5, -0.1, -2.0])) == 24


# Chains ---------------------------------------------------------------------------------------------------------------


def test_links_go_from_the_last_span_to_the_first() -> None:
    first = context([1, 2])
    second = sampled([3], first, 1)
    assert list(links(second, 1)) == [(second, 1), (first, 1)]


def test_repr_says_what_a_span_is() -> None:
    assert repr(context([1, 2])) == "<TokenSpan context: 2 tokens at 0, characters 0..2>"
    assert repr(sampled([1], context([1, 2]), 2)) == "<TokenSpan sampled under '1': 1 tokens at 2, characters 2..3>"


def test_where_the_first_sampled_span_begins_is_known_without_walking_the_chain() -> None:
    chance = random.Random(5)
    for _ in range(100):
        span: TokenSpan | None = None
        first = -1
        for at in range(chance.randint(1, 12)):
            sampled = chance.random() < 0.5
            take = 0 if span is None else span.count
            span = TokenSpan(span, take, 3 * at, pack_ids([7]), 3, versions="1" if sampled else None)
            first = 3 * at if sampled and first < 0 else first
            assert span.answered == first


def test_a_span_names_each_of_its_weight_versions_once() -> None:
    assert version_names(None) == []
    assert version_names("7") == ["7"]
    assert version_names((("8", 2), ("7", 3), ("8", 5))) == ["8", "7"]
