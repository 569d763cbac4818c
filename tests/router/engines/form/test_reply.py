"""Replies of `/generate`: reading, checking and editing them."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from router.engines.form import reply as replies
from router.engines.form.reply import LOGPROB_FIELDS, Reply, UnreadableReplyError, edit_meta, read_reply, split_list
from tests.router.engines.form.json_values import JSON, compact
from tests.support.depths import limited

# Replies -----------------------------------------------------------------------------------------------------------------

META: dict[str, Any] = {
    "id": "55469d",
    "finish_reason": {"type": "stop", "matched": 7},
    "prompt_tokens": 4,
    "weight_version": "3",
    "output_token_logprobs": [[-3.3467748165130615, 5, None], [-0.1, 7, None]],
    "completion_tokens": 2,
    "weight_versions": [{"version": "2", "start": 0, "end": 1}, {"version": "3", "start": 1, "end": 2}],
    "e2e_latency": 0.0346,
}
WHOLE: dict[str, Any] = {"text": "ab", "output_ids": [5, 7], "meta_info": META}


def parse_reply(body: bytes) -> Reply:
    return read_reply(body)[0]


def changed(**meta: Any) -> Reply:
    """Return the reply above with other meta_info; a field of None is left out."""
    kept = {key: value for key, value in {**META, **meta}.items() if value is not None}
    return parse_reply(json.dumps({**WHOLE, "meta_info": kept}).encode())


def test_a_reply_is_read() -> None:
    assert parse_reply(json.dumps(WHOLE).encode()) == Reply(
        ids=[5, 7],
        text="ab",
        logprobs=[-3.3467748165130615, -0.1],
        logprob_ids=[5, 7],
        request_id="55469d",
        prompt_tokens=4,
        completion_tokens=2,
        version="3",
        versions=[("2", 0, 1), ("3", 1, 2)],
        finish_type="stop",
        matched=7,
    )


def test_absent_fields_of_a_reply_are_none() -> None:
    assert parse_reply(b'{"text": "", "output_ids": [], "meta_info": {}}') == Reply(
        [], "", None, None, None, None, None, "default", None, None, None
    )


@pytest.mark.parametrize(
    ("finish", "kind", "matched"),
    [
        ({"type": "length", "length": 2}, "length", None),
        ({"type": "stop", "matched": "ll"}, "stop", "ll"),
        ({"type": "stop", "matched": None}, "stop", None),
        ({"type": "stop", "matched": [1]}, "stop", None),
        ({"type": "stop", "matched": True}, "stop", None),
        ({"type": 7}, None, None),
        ({"type": "abort", "message": "Aborted", "status_code": None}, "abort", None),
        ("stop", None, None),
        (None, None, None),
    ],
)
def test_how_a_reply_ended(finish: Any, kind: str | None, matched: Any) -> None:
    reply = changed(finish_reason=finish)
    assert (reply.finish_type, reply.matched) == (kind, matched)


@pytest.mark.parametrize(("sent_as", "read"), [("7", "7"), (7, "7"), (None, "default")])
def test_a_weight_version_is_a_string(sent_as: Any, read: str) -> None:
    assert changed(weight_version=sent_as).version == read


@pytest.mark.parametrize("runs", [None, []])
def test_without_runs_only_the_last_version_is_known(runs: Any) -> None:
    assert changed(weight_versions=runs).versions is None


@pytest.mark.parametrize("ids", [{}, {"output_ids": None}])
def test_without_output_ids_the_ids_of_the_logprobs_count(ids: dict[str, Any]) -> None:
    """The Rust frontend omits an empty list, and older versions always omit it."""
    body = {key: value for key, value in WHOLE.items() if key != "output_ids"} | ids
    assert parse_reply(json.dumps(body).encode()).ids == [5, 7]
    del body["meta_info"]
    assert parse_reply(json.dumps({**body, "meta_info": {"id": "x"}}).encode()).ids == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"Internal Server Error",
        b'{"error": {"message": "x"}}',
        b'{"text": "a"}',
        b'{"output_ids": [1], "meta_info": {}}',
        b'{"text": null, "meta_info": {}}',
        b'{"text": "a", "meta_info": null}',
        b'{"text": "a", "output_ids": ["1"], "meta_info": {}}',
        b'{"text": "a", "output_ids": [1.5], "meta_info": {}}',
        b'{"text": "a", "meta_info": {"output_token_logprobs": [[-1.0]]}}',
        b'{"text": "a", "meta_info": {"output_token_logprobs": [[NaN, 1, null]]}}',
        b'{"text": "a", "meta_info": {"prompt_tokens": "4"}}',
        b'{"text": "a", "meta_info": {"weight_versions": [{"version": "1"}]}}',
        b'{"text": "\xff", "meta_info": {}}',
        b'{"text": "\\ud800", "meta_info": {}}',
        pytest.param(b'{"text": "a", "meta_info": {"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}", marks=limited),
    ],
    ids=lambda body: repr(body[:60]),
)
def test_an_invalid_reply_is_unreadable(body: bytes) -> None:
    with pytest.raises(UnreadableReplyError):
        parse_reply(body)


ODD = st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.just("x]],["), st.lists(st.integers(0, 2), max_size=2))
ENTRY = st.one_of(
    st.tuples(st.floats(-9, 0), st.integers(0, 9), st.none()),
    st.tuples(
        st.one_of(st.floats(-9, 0), st.none()),
        st.integers(0, 9),
        st.one_of(st.none(), st.sampled_from(["a", "]]", "],["])),
    ),
    st.lists(st.one_of(ODD, st.floats(-9, 0)), max_size=6),
)
LOGPROBS = '"output_token_logprobs":[[-1.0,1,null]]'


@given(
    entries=st.one_of(st.lists(ENTRY, max_size=4), ODD),
    text=st.one_of(st.just("ab"), st.just(LOGPROBS), st.just(", " + LOGPROBS)),
    before=st.one_of(
        st.just({}), st.just({"other": {"output_token_logprobs": [[-9.0, 9, None]]}}), st.just({LOGPROBS: 1})
    ),
    ids=st.sampled_from([{"output_ids": [5, 7]}, {}]),
)
def test_logprobs_are_read_in_any_place_and_layout(
    entries: Any, text: str, before: dict[str, Any], ids: dict[str, Any]
) -> None:
    """They are cut out of SGLang's own layout, and parsed in place in any other. A short reply is always parsed in place."""
    body = {"text": text, **before, **ids, "meta_info": {**before, **META, "output_token_logprobs": entries}}

    def read(raw: bytes) -> Any:
        try:
            reply, short = read_reply(raw)
        except UnreadableReplyError:
            return "unreadable"
        return reply, json.loads(edit_meta(short.body, drop=LOGPROB_FIELDS, ids=short.ids))

    found = read(compact(body))
    assert found == read(json.dumps(body).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replies, "SHORT_BYTES", 0)
        assert found == read(compact(body))
    if found != "unreadable":
        assert found[1] == json.loads(edit_meta(compact(body), drop=LOGPROB_FIELDS))


def test_cutting_a_long_reply_changes_nothing() -> None:
    entries = [[-number / 64, number, None] for number in range(2000)]
    meta = {**META, "output_token_logprobs": entries, "last": 1}
    body = compact({**WHOLE, "output_ids": list(range(2000)), "meta_info": meta})
    reply, short = read_reply(body)
    assert len(short.body) < len(body) / 100
    assert edit_meta(short.body, drop=LOGPROB_FIELDS, ids=short.ids) == edit_meta(body, drop=LOGPROB_FIELDS)
    assert (reply.logprobs, reply.logprob_ids) == ([entry[0] for entry in entries], [entry[1] for entry in entries])


def test_a_consistent_reply_has_no_fault() -> None:
    reply = changed()
    assert reply.fault(4, logprobs_asked=True) is None
    assert reply.fault(4, logprobs_asked=False) is None
    assert reply.checked_logprobs() == [-3.3467748165130615, -0.1]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"prompt_tokens": 5}, "5 prompt tokens, sent 4"),
        ({"completion_tokens": 3}, "2 ids, 3 completion tokens"),
        ({"output_token_logprobs": None}, "no logprobs, though asked for"),
        ({"output_token_logprobs": [[-1.0, 5, None]]}, "1 logprobs, 2 ids"),
        ({"output_token_logprobs": []}, "0 logprobs, 2 ids"),
        ({"output_token_logprobs": [[-1.0, 5, None], [-1.0, 8, None]]}, "the ids of output_token_logprobs are not"),
        ({"output_token_logprobs": [[-1.0, 7, None], [-1.0, 5, None]]}, "the ids of output_token_logprobs are not"),
        ({"output_token_logprobs": [[-1.0, 5, None], [None, 7, None]]}, "a logprob that is not a finite number"),
    ],
)
def test_a_contradiction_in_a_reply_is_a_fault(wrong: dict[str, Any], says: str) -> None:
    fault = changed(**wrong).fault(4, logprobs_asked=True)
    assert fault is not None
    assert fault.startswith(says)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_logprob_that_is_not_finite_is_a_fault(value: float) -> None:
    reply = replace(changed(), logprobs=[-1.0, value])
    assert reply.fault(4, logprobs_asked=True) == "a logprob that is not a finite number"


@pytest.mark.parametrize("number", [-1, 2**31, 2**63])
def test_an_id_that_no_vocabulary_has_is_a_fault(number: int) -> None:
    reply = replace(changed(), ids=[5, number], logprob_ids=[5, number])
    assert reply.fault(4, logprobs_asked=True) == "a token id that is negative, or beyond int32"


def test_counts_that_were_not_sent_contradict_nothing() -> None:
    """An abort in the queue has no `prompt_tokens`."""
    assert changed(prompt_tokens=None, completion_tokens=None).fault(99, logprobs_asked=True) is None


def test_logprobs_may_be_missing_if_not_asked_for() -> None:
    reply = changed(output_token_logprobs=None)
    assert reply.fault(4, logprobs_asked=False) is None
    assert reply.checked_logprobs() == []
    empty = replace(reply, ids=[], completion_tokens=0)
    assert empty.fault(4, logprobs_asked=True) is None, "no tokens, no logprobs"


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False)))
def test_a_float_is_read_as_the_same_float(values: list[float]) -> None:
    reply = changed(output_token_logprobs=[[value, 1, None] for value in values])
    assert [math.copysign(1, v) for v in reply.logprobs or ()] == [math.copysign(1, v) for v in values]
    assert reply.logprobs == values


# Replies: edited ---------------------------------------------------------------------------------------------------------


def test_fields_of_meta_info_can_be_removed_and_the_rest_is_unchanged() -> None:
    meta = b'"id":"x","new":[1.50, 1E-5,0.1000,-0.0, 123456789012345678901234567890],"e2e_latency":3.46e-2'
    before = (
        b'{"new":{"a": 1.0e0},"text":"\\u00e9\\n","meta_info":{' + meta + b',"output_token_logprobs":[[-1.0,1,null]]}}'
    )
    after = edit_meta(before, drop=LOGPROB_FIELDS)
    assert after == b'{"new":{"a": 1.0e0},"text":"\\u00e9\\n","meta_info":{' + meta + b"}}"


def test_fields_of_meta_info_can_be_added_and_replaced() -> None:
    body = b'{"text":"a","meta_info":{"id":"x","b":1}}'
    assert edit_meta(body, add={"b": b"2.50", "c": b"[1, 2]"}) == (
        b'{"text":"a","meta_info":{"id":"x","b":2.50,"c":[1, 2]}}'
    )
    assert edit_meta(body, drop=frozenset({"b"}), add={"b": b"3"}) == b'{"text":"a","meta_info":{"id":"x","b":3}}'
    assert edit_meta(body) == body


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"meta_info":null}', b'{"meta_info":[]}', b'{"meta_info":{}'])
def test_a_body_without_meta_info_cannot_be_edited(body: bytes) -> None:
    with pytest.raises(UnreadableReplyError):
        edit_meta(body, drop=LOGPROB_FIELDS)


@given(
    st.dictionaries(st.text(), JSON, max_size=4).filter(lambda fields: "meta_info" not in fields),
    st.dictionaries(st.text() | st.sampled_from(sorted(LOGPROB_FIELDS)), JSON, max_size=6),
)
def test_an_edit_changes_only_what_it_removes(top: dict[str, Any], meta: dict[str, Any]) -> None:
    after = json.loads(edit_meta(json.dumps({**top, "meta_info": meta}).encode(), drop=LOGPROB_FIELDS))
    assert after == {**top, "meta_info": {k: v for k, v in meta.items() if k not in LOGPROB_FIELDS}}


def test_a_list_of_replies_is_split() -> None:
    parts = split_list(b'[{"a": 1.50}, {"b":[1, 2]} ]', 2)
    assert [bytes(part) for part in parts] == [b'{"a": 1.50}', b'{"b":[1, 2]}']
    assert split_list(b"[]", 0) == []


def test_a_list_is_split_despite_literals_that_are_no_json() -> None:
    body = b' [ {"a": NaN}, {"text": "a NaN", "b": [-Infinity, {}]},{"a":1.50} , [[1], []]]'
    parts = [b'{"a": NaN}', b'{"text": "a NaN", "b": [-Infinity, {}]}', b'{"a":1.50}', b"[[1], []]"]
    assert [bytes(part) for part in split_list(body, 4)] == parts


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"[{}, {}]", "2 replies, asked for 3"),
        (b"[]", "0 replies, asked for 3"),
        (b"{}", "not a list of replies"),
        (b"[{}, {}, {}", "not a list of replies"),
        (b"oops", "not a list of replies"),
    ],
)
def test_another_number_of_replies_than_asked_for_is_unreadable(body: bytes, says: str) -> None:
    with pytest.raises(UnreadableReplyError, match=says):
        split_list(body, 3)
