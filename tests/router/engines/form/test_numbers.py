"""Lists of numbers that are cut out of a reply, and read without a Python object for each number.

The oracle is the reader of whole replies: it gets the same reply with a space in it, which SGLang does not print.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.engines import json as numbers
from router.engines.form import reply as replies
from router.engines.form.reply import LOGPROB_FIELDS, Numbers, UnreadableReplyError, edit_meta, read_numbers, read_reply
from tests.router.engines.form.json_values import compact


@pytest.fixture(autouse=True, scope="module", params=["simdjson", "msgspec"])
def _none_is_short(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replies, "SHORT_BYTES", 0)
        if request.param == "msgspec":  # as on a Python for which simdjson has no wheel
            patch.setattr(numbers, "_parser", None)
        elif numbers._parser is None:
            pytest.skip("simdjson is not installed")
        yield


KEY, SPACED = b'"output_ids":[', b'"output_ids" :['


def read(body: bytes) -> Any:
    try:
        reply, short = read_reply(body)
    except UnreadableReplyError:
        return "unreadable"
    # Equal numbers may differ: -0.0 and 0.0.
    exact = [value if value is None else float(value).hex() for value in reply.logprobs or ()]
    return reply, exact, edit_meta(short.body, drop=LOGPROB_FIELDS, ids=short.ids).replace(SPACED, KEY)


def read_whole(body: bytes) -> Any:
    return read(body.replace(KEY, SPACED))


def is_cut(body: bytes) -> bool:
    try:
        return read_reply(body)[1].ids is not None
    except UnreadableReplyError:
        return False


def body_of(pairs: Sequence[tuple[str, int]], **meta: Any) -> bytes:
    """Return a reply whose logprobs are printed as given."""
    entries = ",".join(f"[{logprob},{token},null]" for logprob, token in pairs)
    ids = [token for _, token in pairs]
    made = compact({"text": "ab", "output_ids": ids, "meta_info": {"id": "x", "output_token_logprobs": "HERE", **meta}})
    return made.replace(b'"HERE"', b"[%b]" % entries.encode())


PRINTED = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.floats(-20, 0, width=32).map(lambda value: repr(struct.unpack("f", struct.pack("f", value))[0])),
    st.from_regex(r"-?(0|[1-9][0-9]{0,30})(\.[0-9]{1,30})?([eE][-+]?[0-9]{1,3})?", fullmatch=True),
    st.sampled_from(["-0.0", "-0", "0", "1e-3", "1E+2", "-1", "5e-324", "1e999", "-1e-999", "01", "1.", "+1", "NaN"]),
)
PAIRS = st.lists(st.tuples(PRINTED, st.sampled_from([0, 7, 151_645, 2**31 - 1])), min_size=1, max_size=6)


@given(PAIRS)
def test_a_number_is_the_same_however_it_is_printed(pairs: list[tuple[str, int]]) -> None:
    body = body_of(pairs)
    assert read(body) == read_whole(body)


@given(st.lists(st.tuples(st.floats(-30, 0).map(repr), st.integers(0, 2**31 - 1)), min_size=1, max_size=40))
def test_what_sglang_prints_is_cut(pairs: list[tuple[str, int]]) -> None:
    body = body_of(pairs)
    assert is_cut(body)
    assert read(body) == read_whole(body)


@pytest.mark.parametrize("token", [2**31 - 1, 2**31, 2**31 + 1, 2**32])
def test_an_id_beyond_int32_is_not_cut(token: int) -> None:
    """Within a column of 32 bits it would be another id."""
    body = body_of([("-1.0", 7), ("-2.0", token)])
    assert is_cut(body) is (token < 2**31)
    assert read(body) == read_whole(body)


@given(PAIRS)
def test_a_short_reply_is_read_as_it_is(pairs: list[tuple[str, int]]) -> None:
    """It is the same reply as if it had been cut."""
    body = body_of(pairs)
    expected = read(body)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replies, "SHORT_BYTES", len(body))
        assert not is_cut(body)
        assert read(body) == expected


EDITS = st.lists(
    st.tuples(
        st.integers(0, 10_000),
        st.integers(0, 2),
        st.sampled_from(
            [*'[]nul,-0.e1 "}{', "null", "],[", "null,", "[[", "]]", ",null]", "\x00", "0,", "[1.0,7,null],"]
        ),
    ),
    min_size=1,
    max_size=3,
)


@given(PAIRS, EDITS)
@example([("-1.0", 7), ("-2.0", 7)], [(80, 2, "")])
def test_a_broken_reply_is_read_as_if_nothing_had_been_cut(pairs: list[tuple[str, int]], edits: list[Any]) -> None:
    body = body_of(pairs)
    begin = body.index(KEY)
    for place, removed, put in edits:
        place = begin + place % (len(body) - begin)
        body = body[:place] + put.encode() + body[place + removed :]
    if KEY in body:
        assert read(body) == read_whole(body)


NEARLY = st.tuples(
    st.sampled_from([-1.5, -1.5, 0, None]),
    st.sampled_from([7, 7, 7, None, [7]]),
    st.sampled_from([None, None, None, True, "a", 0, "],["]),
)
ENTRY = st.one_of(st.just((-1.5, 7, None)), NEARLY, NEARLY.map(lambda entry: (*entry, None)), st.just(()), st.none())


@given(
    st.lists(ENTRY, min_size=1, max_size=4),
    st.booleans(),
    st.permutations(["text", "output_ids", "meta_info", "more"]),
)
@example([(-1.5, 7, True), (-1.5, 7, None)], False, ["text", "output_ids", "meta_info", "more"])
def test_other_entries_are_not_taken_for_numbers(entries: list[Any], tops: bool, order: list[str]) -> None:
    meta = {"output_token_logprobs": entries, **({"output_top_logprobs": [[[-1.0, 7, None]]]} if tops else {})}
    made = {
        "text": '"output_ids":[7],',
        "output_ids": [7] * len(entries),
        "meta_info": meta,
        "more": {"output_ids": [7]},
    }
    body = compact({key: made[key] for key in order})
    assert read(body) == read_whole(body)
    if is_cut(body):
        assert {entry[2] for entry in entries} == {None}


@pytest.mark.parametrize(
    "ids",
    [
        b"[7]",
        b"[7,8,9]",
        b"[8,7]",
        b"[7,8.0]",
        b"[7,[8]",
        b"[7,-8]",
        b"[7,4294967304]",
        b"[7,null]",
        b'[7,"8"]',
        b"{}",
        b"7",
    ],
)
def test_numbers_with_other_ids_are_not_read(ids: bytes) -> None:
    entries = b"[[-1.0,7,null],[-2.0,8,null]]"
    assert read_numbers(b"[7,8]", memoryview(entries)) == ([7, 8], [-1.0, -2.0])
    assert read_numbers(ids, memoryview(entries)) is None


@pytest.mark.parametrize(
    "entries", [b"[[,null]]", b"[[7,null]]", b"[[-1.0,7,8,null]]", b"[[],null]]", b"[[-1.0,7],null]]"]
)
@pytest.mark.parametrize("ids", [b"[]", b"[7]"])
def test_a_broken_list_has_no_numbers(ids: bytes, entries: bytes) -> None:
    assert read_numbers(ids, memoryview(entries)) is None


def test_numbers_stand_for_a_list() -> None:
    numbers = Numbers("i", [1, 2])
    assert numbers == [1, 2] == numbers
    assert numbers == Numbers("i", [1, 2]) == array("i", [1, 2]) == numbers == (1, 2)
    assert numbers != [1]
    assert numbers != Numbers("i", [2, 1])
    assert numbers != 1
    assert json.dumps(numbers.tolist()) == "[1, 2]"
