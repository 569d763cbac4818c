"""The data-parallel rank in bodies, headers and replies."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.engines.form import ranks
from router.engines.json import decode_object
from router.errors import BadRequestError

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.text(max_size=8)
    | st.just('"routed_dp_rank": 1, "dp_rank": 2}'),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(["text", "routed_dp_rank", "data_parallel_rank", "a"]) | st.text(max_size=4)


@given(
    st.dictionaries(NAMES, VALUES, max_size=5),
    st.integers(0, 1023),
    st.sampled_from([None, 1]),
    st.sampled_from(["", " \n"]),
)
def test_a_body_gets_a_rank_and_keeps_everything_else(
    body: dict[str, Any], rank: int, indent: int | None, space: str
) -> None:
    """Once: an engine may refuse a field that is there twice."""
    written = (space + json.dumps(body, indent=indent) + space).encode()
    pairs = json.loads(ranks.with_rank(written, rank), object_pairs_hook=list)
    assert dict(pairs)["routed_dp_rank"] == rank
    assert len({name for name, _ in pairs}) == len(pairs)
    assert json.loads(ranks.with_rank(written, rank)) == {**body, "routed_dp_rank": rank}


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"{}"', b"null", b'{"routed_dp_rank": 1,}', b"\xff"])
def test_what_is_no_object_is_the_workers_to_refuse(body: bytes) -> None:
    assert ranks.with_rank(body, 1) == body
    assert ranks.rank_in_body(body) is None


@pytest.mark.parametrize(
    ("body", "rank"),
    [
        ({}, None),
        ({"routed_dp_rank": 0}, 0),
        ({"data_parallel_rank": 3}, 3),
        ({"routed_dp_rank": None, "data_parallel_rank": 3}, 3),
        ({"routed_dp_rank": 1, "data_parallel_rank": 3}, 1),
        ({"text": '"routed_dp_rank": 7'}, None),
    ],
)
def test_the_newer_name_counts_first(body: dict[str, Any], rank: int | None) -> None:
    encoded = msgspec.json.encode(body)
    assert ranks.rank_in(decode_object(encoded)) == ranks.rank_in_body(encoded) == rank


@pytest.mark.parametrize("wrong", [-1, 1.0, True, "1", [1], {}])
def test_a_rank_is_a_number_from_0_on(wrong: Any) -> None:
    for name in ("routed_dp_rank", "data_parallel_rank"):
        with pytest.raises(BadRequestError, match=name):
            ranks.rank_in_body(msgspec.json.encode({name: wrong}))
    with pytest.raises(BadRequestError, match="x-data-parallel-rank"):
        ranks.rank_in_headers(
            {b"x-data-parallel-rank": str(wrong).encode()} if wrong != "1" else {b"x-data-parallel-rank": b" 1"}
        )


@given(st.lists(st.tuples(VALUES, st.none() | st.integers(0, 99)), max_size=4), st.booleans())
def test_a_reply_tells_the_rank_of_each_generation(replies: list[tuple[Any, int | None]], compact: bool) -> None:
    """Whatever its texts say."""
    body = [{"text": json.dumps(text), "meta_info": {"id": "a", "dp_rank": rank}} for text, rank in replies]
    written = json.dumps(body, separators=(",", ":") if compact else None).encode()
    assert ranks.ranks_in_reply(written) == [rank for _, rank in replies if rank is not None]
