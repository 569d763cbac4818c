"""SGLang's JSON as it is read and written here: requests, replies, streams. No server, no worker."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from router.engines.events import EventSplitter, event_data, event_index
from router.engines.sglang.reply import LOGPROB_FIELDS, Reply, UnreadableReplyError, edit_meta, read_reply, split_list
from router.engines.sglang.request import GenerateRequest
from router.engines.sglang.stream import StreamedReply
from router.engines.sglang.weights import new_weight_version
from router.errors import BadRequestError


def request(**fields: Any) -> GenerateRequest:
    return GenerateRequest.parse(json.dumps(fields).encode())


def sent(asked: GenerateRequest, *prompts: list[int], force: bool = False) -> Any:
    """What a worker gets."""
    return json.loads(asked.with_ids(prompts, force_logprobs=force))


# Requests: prompts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "texts", "ids", "batch"),
    [
        pytest.param({"text": "a"}, ["a"], None, False, id="text"),
        pytest.param({"text": ["a"]}, ["a"], None, True, id="a list of one text"),
        pytest.param({"text": ["a", "b"]}, ["a", "b"], None, True, id="texts"),
        pytest.param({"input_ids": [1, 2]}, None, [[1, 2]], False, id="ids"),
        pytest.param({"input_ids": [[1, 2]]}, None, [[1, 2]], True, id="a list of one list of ids"),
        pytest.param({"input_ids": [[1, 2], [3]]}, None, [[1, 2], [3]], True, id="lists of ids"),
        pytest.param({"text": "a", "input_ids": [1]}, None, [[1]], False, id="ids win over text"),
        pytest.param({"text": ["a", "b"], "input_ids": [1]}, None, [[1]], False, id="also over a list"),
        pytest.param({"text": "a", "input_ids": None}, ["a"], None, False, id="null ids are none"),
        pytest.param({"text": None, "input_ids": [1]}, None, [[1]], False, id="a null text is none"),
        pytest.param({"input_embeds": [[0.5]]}, None, None, False, id="embeddings"),
        pytest.param({"text": "a", "input_embeds": None}, ["a"], None, False, id="null embeddings are none"),
    ],
)
def test_a_prompt_is_read_in_every_form(
    fields: dict[str, Any], texts: list[str] | None, ids: list[list[int]] | None, batch: bool
) -> None:
    asked = request(**fields)
    assert (asked.texts, asked.ids, asked.batch, asked.listed) == (texts, ids, batch, batch)


def test_lists_of_ids_are_told_apart_with_white_space_in_them() -> None:
    asked = GenerateRequest.parse(b'{"input_ids": \n[ \t[1, 2], [3]]}')
    assert asked.ids == [[1, 2], [3]]
    assert asked.batch
    assert not GenerateRequest.parse(b'{"input_ids": [ 1 ]}').batch


def test_what_was_not_asked_for_is_off() -> None:
    asked = request(text="a")
    assert (asked.samples, asked.stream, asked.wants_logprobs, asked.wants_trajectory) == (1, False, [False], False)
    assert asked.skips_special(0)
    assert asked.unrecordable is None
    assert (asked.lora_path(0), asked.rid(0), asked.sampling) == ("", None, [])


def test_null_is_the_same_as_not_there() -> None:
    keys = ("sampling_params", "stream", "return_logprob", "rid", "lora_path", "return_trajectory", "image_data")
    asked, bare = request(text="a", **dict.fromkeys(keys)), request(text="a")
    assert replace(asked, fields={}) == replace(bare, fields={})
    assert asked.unrecordable is None
    assert (asked.rid(0), asked.lora_path(0), asked.skips_special(0)) == (None, "", True)


@pytest.mark.parametrize(
    ("sampling", "samples", "listed"),
    [({}, 1, False), ({"n": 1}, 1, False), ({"n": None}, 1, False), ({"n": 4}, 4, True)],
)
def test_the_number_of_samples_is_n(sampling: dict[str, Any], samples: int, listed: bool) -> None:
    asked = request(text="a", sampling_params=sampling)
    assert (asked.samples, asked.listed, asked.batch) == (samples, listed, False)


def test_every_prompt_of_a_batch_has_its_own_sampling_params() -> None:
    asked = request(text=["a", "b"], sampling_params=[{"skip_special_tokens": False}, {"n": 1}])
    assert [asked.skips_special(0), asked.skips_special(1)] == [False, True]


def test_sampling_params_that_are_an_object_are_for_all_prompts() -> None:
    asked = request(text=["a", "b"], sampling_params={"skip_special_tokens": False, "n": 2})
    assert [asked.skips_special(0), asked.skips_special(1)] == [False, False]
    assert asked.samples == 2


def test_a_null_entry_of_sampling_params_is_an_empty_one() -> None:
    asked = request(text=["a", "b"], sampling_params=[None, {"skip_special_tokens": None}])
    assert [asked.skips_special(0), asked.skips_special(1)] == [True, True]


def test_logprobs_are_asked_for_by_prompt_or_for_all() -> None:
    assert request(text="a", return_logprob=True).asked_for_logprobs(0)
    for_all = request(text=["a", "b"], return_logprob=True)
    assert [for_all.asked_for_logprobs(i) for i in (0, 1)] == [True, True]
    one_each = request(text=["a", "b"], return_logprob=[False, True])
    assert [one_each.asked_for_logprobs(i) for i in (0, 1)] == [False, True]
    assert not request(text="a", return_logprob=[]).asked_for_logprobs(0)


def test_the_name_of_a_request() -> None:
    assert request(text="a", rid="x").rid(0) == "x"
    batch = request(text=["a", "b", "c"], rid=["x", None, "z"])
    assert [batch.rid(i) for i in range(3)] == ["x", None, "z"]
    assert request(text=["a"], rid=["x"]).rid(0) == "x"


def test_a_name_that_the_worker_would_not_use_is_none() -> None:
    """With `n` samples each has an id of its own, and a batch needs one for every prompt."""
    assert request(text="a", rid="x", sampling_params={"n": 2}).rid(0) is None
    assert request(text=["a", "b"], rid="x").rid(0) is None


def test_the_adapter_of_a_prompt() -> None:
    assert request(text="a", lora_path="one").lora_path(0) == "one"
    batch = request(text=["a", "b"], lora_path=["one", None])
    assert [batch.lora_path(0), batch.lora_path(1)] == ["one", ""]
    assert request(text=["a", "b"], lora_path="one").lora_path(1) == "one"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"input_embeds": [[0.5]]}, "input_embeds"),
        ({"text": "a", "image_data": "x"}, "multimodal"),
        ({"text": "a", "video_data": ["x"]}, "multimodal"),
        ({"input_ids": [1], "audio_data": "x"}, "multimodal"),
        ({"text": "a", "session_params": {"id": "x"}}, "session_params"),
    ],
)
def test_what_cannot_be_recorded_says_why(fields: dict[str, Any], reason: str) -> None:
    assert request(**fields).unrecordable == reason


# Requests: what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "a prompt is missing: give `text` (a string) or `input_ids` (a list of token ids)"),
        ({"text": None, "input_ids": None}, "a prompt is missing"),
        ({"text": ""}, "`text` is empty, or has an empty prompt in it: give at least one character"),
        ({"text": []}, "`text` is empty"),
        ({"text": ["a", ""]}, "`text` is empty, or has an empty prompt"),
        ({"input_ids": []}, "`input_ids` is empty, or has an empty prompt in it: give at least one token id"),
        ({"input_ids": [[]]}, "`input_ids` is empty"),
        ({"input_ids": [[1], []]}, "`input_ids` is empty"),
        ({"text": 5}, "`text` must be a string, or a list of strings"),
        ({"text": {"a": "b"}}, "`text` must be a string, or a list of strings"),
        ({"text": ["a", 1]}, "`text` must be"),
        ({"text": [["a"]]}, "`text` must be"),
        ({"text": 5, "input_ids": [1]}, "`text` must be"),
        ({"input_ids": "1"}, "`input_ids` must be a list of token ids, or a list of such lists"),
        ({"input_ids": 1}, "`input_ids` must be"),
        ({"input_ids": [1.5]}, "`input_ids` must be"),
        ({"input_ids": [True]}, "`input_ids` must be"),
        ({"input_ids": ["1"]}, "`input_ids` must be"),
        ({"input_ids": [None]}, "`input_ids` must be"),
        ({"input_ids": [1, [2]]}, "`input_ids` must be"),
        ({"input_ids": [[1], 2]}, "`input_ids` must be"),
        ({"input_ids": [[[1]]]}, "`input_ids` must be"),
        ({"text": "a", "stream": "yes"}, "`stream` must be true or false"),
        ({"text": "a", "stream": 1}, "`stream` must be true or false"),
        ({"text": "a", "return_logprob": "yes"}, "`return_logprob` must be true or false, or a list of them"),
        ({"text": "a", "return_trajectory": 1}, "`return_trajectory` must be true or false"),
        ({"text": "a", "sampling_params": "x"}, "`sampling_params` must be a JSON object"),
        ({"text": "a", "sampling_params": 3}, "`sampling_params` must be a JSON object"),
        ({"text": ["a"], "sampling_params": [3]}, "an entry of `sampling_params` must be a JSON object"),
        ({"text": "a", "sampling_params": {"n": "2"}}, "`n` must be an integer"),
        ({"text": "a", "sampling_params": {"n": 1.5}}, "`n` must be an integer"),
        ({"text": "a", "sampling_params": [{}]}, "`sampling_params` is a list of 1: give one object"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "is a list of 1: give a list of 2, or one object for all"),
        ({"text": ["a", "b"], "sampling_params": []}, "is a list of 0: give a list of 2"),
        ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "`n` must be the same for all prompts"),
        ({"text": ["a", "b"], "sampling_params": [{}, {"n": 2}]}, "of a batch, not [1, 2]"),
    ],
)
def test_what_no_worker_could_serve_is_refused_and_says_what_to_do(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        request(**fields)
    assert says in caught.value.message
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b'{"text": "a"',
        b'{"text": "a"} x',
        b'{"text": "\xff"}',
        b'{"text": "\\ud800"}',
        b'{"text": NaN}',
        b'{"text": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=lambda body: repr(body[:20]),
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequestError):
        GenerateRequest.parse(body)


def test_the_place_of_an_error_is_told() -> None:
    with pytest.raises(BadRequestError, match=r"the request body must be a JSON object: .*byte"):
        GenerateRequest.parse(b'{"text": "a", oops}')
    with pytest.raises(BadRequestError, match=r"\$\[1\]"):
        request(input_ids=[1, "2"])


@pytest.mark.parametrize(
    ("field", "value"),
    [("rid", 5), ("rid", {"a": 5}), ("rid", "x" * 1025), ("rid", ["a", "x" * 1025]), ("lora_path", 5)],
)
def test_names_that_are_none_are_refused(field: str, value: Any) -> None:
    with pytest.raises(BadRequestError, match=f"`{field}`"):
        request(text="a", **{field: value})


def test_what_is_read_later_is_refused_when_it_is_read() -> None:
    asked = request(text="a", sampling_params={"skip_special_tokens": "no"})
    with pytest.raises(BadRequestError):
        asked.skips_special(0)


@pytest.mark.parametrize("count", [0, -1])
def test_no_samples_at_all_are_refused(count: int) -> None:
    with pytest.raises(BadRequestError, match="`n` must be at least 1"):
        request(text="a", sampling_params={"n": count})


def test_a_weight_version_is_a_name() -> None:
    assert new_weight_version(b'{"new_version": "7"}') == "7"
    with pytest.raises(BadRequestError, match="1024"):
        new_weight_version(b'{"new_version": "%s"}' % (b"7" * 1025))


# Requests: what a worker gets --------------------------------------------------------------------------------------------


def test_a_worker_gets_ids_in_the_place_of_the_text() -> None:
    asked = request(text="a", stream=True, rid="x")
    assert sent(asked, [1, 2]) == {"input_ids": [1, 2], "stream": True, "rid": "x"}


def test_a_batch_stays_a_batch() -> None:
    assert sent(request(text=["a"]), [1, 2]) == {"input_ids": [[1, 2]]}
    assert sent(request(text=["a", "b"]), [1], [2, 3]) == {"input_ids": [[1], [2, 3]]}
    assert sent(request(input_ids=[[1]]), [1]) == {"input_ids": [[1]]}


def test_with_text_and_ids_only_the_ids_are_sent() -> None:
    """Whether it is a batch would be read off the text."""
    assert sent(request(text=["a", "b"], input_ids=[7]), [7]) == {"input_ids": [7]}
    assert sent(request(text="a", input_ids=None), [7]) == {"input_ids": [7]}


def test_what_is_ours_is_not_passed_on() -> None:
    assert sent(request(text="a", return_trajectory=True), [1]) == {"input_ids": [1]}


def test_the_rest_is_passed_on_byte_for_byte() -> None:
    """Floats as they were written, and fields that nobody here has heard of."""
    rest = b'"sampling_params":{"temperature": 1.0E-1, "top_p":0.30000000000000004, "new": 1e400 },"x":[1.50,"\\u00e9"]'
    body = GenerateRequest.parse(b'{"text": "a", ' + rest + b"}").with_ids([[1]], force_logprobs=False)
    assert body == b'{"input_ids":[1],' + rest + b"}"


def test_logprobs_are_switched_on() -> None:
    assert sent(request(text="a"), [1], force=True) == {"input_ids": [1], "return_logprob": True}
    assert sent(request(text="a", return_logprob=False), [1], force=True)["return_logprob"] is True
    assert sent(request(text=["a", "b"], return_logprob=[False, True]), [1], [2], force=True)["return_logprob"] is True
    assert sent(request(text="a", return_logprob=False), [1])["return_logprob"] is False
    assert "return_logprob" not in sent(request(text="a"), [1])


OPTIONS = {"logprob_start_len": 0, "top_logprobs_num": 5, "token_ids_logprob": [1], "return_text_in_logprobs": True}


def test_options_of_logprobs_go_along_only_if_the_client_asked_for_logprobs() -> None:
    """Without `return_logprob` a worker does not look at them; switched on by us they would cost it a lot."""
    assert sent(request(text="a", **OPTIONS), [1], force=True) == {"input_ids": [1], "return_logprob": True}
    asked = sent(request(text="a", return_logprob=True, **OPTIONS), [1], force=True)
    assert asked == {"input_ids": [1], "return_logprob": True, **OPTIONS}
    assert sent(request(text="a", **OPTIONS), [1]) == {"input_ids": [1], **OPTIONS}


def test_a_null_n_is_left_out() -> None:
    """SGLang answers it with a 500."""
    asked = request(text="a", sampling_params={"n": None, "top_p": 0.5})
    assert sent(asked, [1]) == {"input_ids": [1], "sampling_params": {"top_p": 0.5}}
    batch = request(text=["a", "b"], sampling_params=[{"n": None, "top_k": 1}, {"top_k": 2}])
    assert sent(batch, [1], [2])["sampling_params"] == [{"top_k": 1}, {"top_k": 2}]


def test_what_is_sent_is_read_back_as_the_same_request() -> None:
    asked = request(text=["a", "b"], sampling_params={"n": 2}, rid=["x", "y"], stream=True)
    again = GenerateRequest.parse(asked.with_ids([[1], [2]], force_logprobs=True))
    assert (again.ids, again.batch, again.samples, again.stream) == ([[1], [2]], True, 2, True)
    assert again.wants_logprobs == [True]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
NAMES = st.text(alphabet="abcxyz_", min_size=1).filter(lambda name: name != "text")


@given(st.dictionaries(NAMES, JSON, max_size=5), st.lists(st.integers(0, 2**31 - 1), min_size=1))
def test_whatever_else_a_request_says_a_worker_hears(others: dict[str, Any], ids: list[int]) -> None:
    assert sent(request(text="a", **others), ids) == {"input_ids": ids, **others}


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


def compact(value: Any) -> bytes:
    """As SGLang prints it."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def changed(**meta: Any) -> Reply:
    """The reply above with other meta_info; a field of None is left out."""
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


def test_a_reply_says_what_it_does_not_know() -> None:
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
def test_without_runs_only_the_version_at_the_end_is_known(runs: Any) -> None:
    assert changed(weight_versions=runs).versions is None


@pytest.mark.parametrize("ids", [{}, {"output_ids": None}])
def test_without_output_ids_those_of_the_logprobs_are_taken(ids: dict[str, Any]) -> None:
    """The Rust frontend leaves an empty list out, older versions always."""
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
        b'{"text": "a", "meta_info": {"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}",
    ],
    ids=lambda body: repr(body[:60]),
)
def test_what_is_no_reply_is_unreadable(body: bytes) -> None:
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
def test_logprobs_are_read_alike_wherever_they_stand_and_however_they_are_printed(
    entries: Any, text: str, before: dict[str, Any], ids: dict[str, Any]
) -> None:
    """Cut out where the body is laid out as SGLang does it, parsed in their place where it is not."""
    body = {"text": text, **before, **ids, "meta_info": {**before, **META, "output_token_logprobs": entries}}

    def read(raw: bytes) -> Any:
        try:
            reply, short = read_reply(raw)
        except UnreadableReplyError:
            return "unreadable"
        return reply, json.loads(edit_meta(short, drop=LOGPROB_FIELDS))

    found = read(compact(body))
    assert found == read(json.dumps(body).encode())
    if found != "unreadable":
        assert found[1] == json.loads(edit_meta(compact(body), drop=LOGPROB_FIELDS))


def test_a_long_reply_is_cut_without_a_trace() -> None:
    entries = [[-number / 64, number, None] for number in range(2000)]
    meta = {**META, "output_token_logprobs": entries, "last": 1}
    body = compact({**WHOLE, "output_ids": list(range(2000)), "meta_info": meta})
    reply, short = read_reply(body)
    assert len(short) < len(body) / 3
    assert edit_meta(short, drop=LOGPROB_FIELDS) == edit_meta(body, drop=LOGPROB_FIELDS)
    assert (reply.logprobs, reply.logprob_ids) == ([entry[0] for entry in entries], [entry[1] for entry in entries])


def test_a_reply_that_holds_together_has_no_fault() -> None:
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
def test_a_contradiction_in_a_reply_is_told(wrong: dict[str, Any], says: str) -> None:
    fault = changed(**wrong).fault(4, logprobs_asked=True)
    assert fault is not None
    assert fault.startswith(says)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_logprob_that_is_no_number_is_a_fault(value: float) -> None:
    reply = replace(changed(), logprobs=[-1.0, value])
    assert reply.fault(4, logprobs_asked=True) == "a logprob that is not a finite number"


def test_a_negative_id_is_a_fault() -> None:
    reply = replace(changed(), ids=[5, -1], logprob_ids=[5, -1])
    assert reply.fault(4, logprobs_asked=True) == "a negative token id"


def test_counts_that_were_not_sent_contradict_nothing() -> None:
    """An abort in the queue has no `prompt_tokens`."""
    assert changed(prompt_tokens=None, completion_tokens=None).fault(99, logprobs_asked=True) is None


def test_logprobs_that_nobody_asked_for_may_be_missing() -> None:
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


def test_fields_of_meta_info_are_taken_out_and_the_rest_is_byte_for_byte_as_it_was() -> None:
    meta = b'"id":"x","new":[1.50, 1E-5,0.1000,-0.0, 123456789012345678901234567890],"e2e_latency":3.46e-2'
    before = (
        b'{"new":{"a": 1.0e0},"text":"\\u00e9\\n","meta_info":{' + meta + b',"output_token_logprobs":[[-1.0,1,null]]}}'
    )
    after = edit_meta(before, drop=LOGPROB_FIELDS)
    assert after == b'{"new":{"a": 1.0e0},"text":"\\u00e9\\n","meta_info":{' + meta + b"}}"


def test_fields_of_meta_info_are_put_in_and_replaced() -> None:
    body = b'{"text":"a","meta_info":{"id":"x","b":1}}'
    assert edit_meta(body, add={"b": b"2.50", "c": b"[1, 2]"}) == (
        b'{"text":"a","meta_info":{"id":"x","b":2.50,"c":[1, 2]}}'
    )
    assert edit_meta(body, drop=frozenset({"b"}), add={"b": b"3"}) == b'{"text":"a","meta_info":{"id":"x","b":3}}'
    assert edit_meta(body) == body


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"meta_info":null}', b'{"meta_info":[]}', b'{"meta_info":{}'])
def test_what_has_no_meta_info_cannot_be_edited(body: bytes) -> None:
    with pytest.raises(UnreadableReplyError):
        edit_meta(body, drop=LOGPROB_FIELDS)


@given(
    st.dictionaries(st.text(), JSON, max_size=4).filter(lambda fields: "meta_info" not in fields),
    st.dictionaries(st.text() | st.sampled_from(sorted(LOGPROB_FIELDS)), JSON, max_size=6),
)
def test_an_edit_changes_nothing_but_what_it_takes_out(top: dict[str, Any], meta: dict[str, Any]) -> None:
    after = json.loads(edit_meta(json.dumps({**top, "meta_info": meta}).encode(), drop=LOGPROB_FIELDS))
    assert after == {**top, "meta_info": {k: v for k, v in meta.items() if k not in LOGPROB_FIELDS}}


def test_a_list_of_replies_is_cut_apart() -> None:
    parts = split_list(b'[{"a": 1.50}, {"b":[1, 2]} ]', 2)
    assert [bytes(part) for part in parts] == [b'{"a": 1.50}', b'{"b":[1, 2]}']
    assert split_list(b"[]", 0) == []


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


# Streams: bytes into events ----------------------------------------------------------------------------------------------

EVENTS = [
    b'data: {"text":"a\\n\\nb"}\n\n',
    b": ping\n\n",
    "data: é\n\n".encode(),
    b"data: x\ndata: y\n\n",
    b"data: [DONE]\n\n",
]


@given(st.lists(st.sampled_from(EVENTS), max_size=6), st.sampled_from([b"", b"data: hal", b"\n"]), st.data())
def test_events_are_the_same_wherever_the_chunks_end(events: list[bytes], rest: bytes, data: st.DataObject) -> None:
    whole = b"".join(events) + rest
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    splitter, found = EventSplitter(), []
    for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        found += list(splitter.feed(whole[begin:end]))
    assert found == events
    assert splitter.flush() == rest
    assert splitter.flush() == b""


def test_events_byte_by_byte() -> None:
    splitter = EventSplitter()
    assert [event for byte in b"".join(EVENTS) for event in splitter.feed(bytes([byte]))] == EVENTS


@given(st.lists(st.binary(max_size=8)))
@example([b"\n", b"\n\n", b"\n"])
def test_no_byte_of_a_stream_is_lost(chunks: list[bytes]) -> None:
    splitter = EventSplitter()
    events = [event for chunk in chunks for event in splitter.feed(chunk)]
    assert b"".join(events) + splitter.flush() == b"".join(chunks)
    assert all(event.endswith(b"\n\n") for event in events)


def test_a_splitter_can_be_used_again_after_a_flush() -> None:
    splitter = EventSplitter()
    assert list(splitter.feed(b"data: a\n\ndata: b\n")) == [b"data: a\n\n"]
    assert splitter.flush() == b"data: b\n"
    assert list(splitter.feed(b"\ndata: c\n\n")) == [b"\ndata: c\n\n"]


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b"data: [DONE]\n\n", b"[DONE]"),
        (b"data:x\n\n", b"x"),
        (b"data: \n\n", b""),
        (b": ping\n\n", None),
        (b"event: error\n\n", None),
        (b"\n\n", None),
    ],
)
def test_the_payload_of_an_event(event: bytes, data: bytes | None) -> None:
    assert event_data(event) == data


@pytest.mark.parametrize(
    ("data", "index"),
    [(b'{"index": 3}', 3), (b'{"text": "a"}', 0), (b'{"index": null}', 0), (b'{"index": "x"}', 0), (b"[DONE]", 0)],
)
def test_which_generation_an_event_belongs_to(data: bytes, index: int) -> None:
    assert event_index(data) == index


# Streams: events into a reply --------------------------------------------------------------------------------------------

Token = tuple[int, float, str]
TOKENS = st.tuples(st.integers(0, 300), st.floats(-50, 0, width=32), st.text(alphabet='ab ,[]{}"\\é\n', max_size=3))


def payloads(
    steps: list[list[Token]],
    style: str,
    *,
    logprobs: bool = True,
    texts: bool = False,
    compact: bool = True,
    counted: bool = True,
) -> list[bytes]:
    """The events of one generation, in one of the three forms; the last says how it ended."""
    out = []
    before: list[Token] = []
    for number, step in enumerate(steps):
        so_far = before + step
        ids = so_far if style == "cumulative" else step
        rest = step if style == "incremental" else so_far
        meta: dict[str, Any] = {
            "id": "x",
            "prompt_tokens": 4,
            "finish_reason": {"type": "length"} if number == len(steps) - 1 else None,
        }
        if counted:
            meta["completion_tokens"] = len(so_far)
        if logprobs:
            meta["output_token_logprobs"] = [[value, i, piece if texts else None] for i, value, piece in rest]
        event = {"text": "".join(t[2] for t in rest), "output_ids": [t[0] for t in ids], "meta_info": meta}
        out.append(json.dumps(event, separators=(",", ":") if compact else None).encode())
        before = so_far
    return out


def read(events: list[bytes]) -> StreamedReply:
    streamed = StreamedReply()
    for event in events:
        streamed.feed(event)
        assert streamed.error is None
    return streamed


STEPS = st.lists(st.lists(TOKENS, max_size=4), min_size=1, max_size=6).filter(lambda steps: bool(steps[0]))


def added(events: list[bytes]) -> list[str]:
    """What a reader who takes it out after each event is told."""
    streamed, found = StreamedReply(added=[]), []
    for event in events:
        streamed.feed(event)
        assert streamed.added is not None
        found.append("".join(json.loads(piece) for piece in streamed.added))
        streamed.added.clear()
    return found


@pytest.mark.parametrize("style", ["cumulative", "incremental", "mixed"])
@given(steps=STEPS, compact=st.booleans())
def test_what_each_event_adds_to_the_text_is_told_once(style: str, steps: list[list[Token]], compact: bool) -> None:
    expected = ["".join(text for _, _, text in step) for step in steps]
    assert added(payloads(steps, style, texts=False, compact=compact)) == expected


@pytest.mark.parametrize("style", ["cumulative", "incremental", "mixed"])
def test_what_is_added_is_told_once_without_logprobs_too(style: str) -> None:
    steps = [[(1, -0.5, "one")], [(2, -0.5, " two")], [], [(3, -0.5, " three")]]
    events = payloads(steps, style, texts=False, compact=True, logprobs=False)
    assert added(events) == ["one", " two", "", " three"]


@pytest.mark.parametrize("style", ["cumulative", "incremental", "mixed"])
@given(steps=STEPS, texts=st.booleans(), compact=st.booleans())
@example(steps=[[(1, -0.5, "a")], [(12, -0.5, "b")], []], texts=False, compact=True)
@example(steps=[[(1, -0.5, "a")], [(1, -0.5, "a")], [(1, -0.5, "a")]], texts=True, compact=True)
def test_every_form_of_stream_is_the_same_reply(
    style: str, steps: list[list[Token]], texts: bool, compact: bool
) -> None:
    """Also when events bring nothing new, and when logprobs bring texts along that look like JSON."""
    tokens = [token for step in steps for token in step]
    reply = read(payloads(steps, style, texts=texts, compact=compact)).reply()
    assert reply == Reply(
        ids=[t[0] for t in tokens],
        text="".join(t[2] for t in tokens),
        logprobs=[t[1] for t in tokens],
        logprob_ids=[t[0] for t in tokens],
        request_id="x",
        prompt_tokens=4,
        completion_tokens=len(tokens),
        version="default",
        versions=None,
        finish_type="length",
        matched=None,
    )


@pytest.mark.parametrize("style", ["cumulative", "incremental", "mixed"])
@given(steps=STEPS)
def test_without_logprobs_one_of_two_readings_is_the_reply(style: str, steps: list[list[Token]]) -> None:
    """Where ids are deltas, nothing but the ids themselves can tell whether the text is one, too."""
    tokens = [token for step in steps for token in step]
    reply = read(payloads(steps, style, logprobs=False)).reply()
    assert reply is not None
    assert reply.ids == [t[0] for t in tokens]
    assert reply.logprobs is None
    assert "".join(t[2] for t in tokens) in (reply.text, reply.other_text)
    if style == "cumulative":
        assert reply.other_text is None, "there is no doubt"


@given(steps=STEPS, logprobs=st.booleans(), texts=st.booleans(), data=st.data())
def test_a_cumulative_stream_may_be_ahead_of_its_own_count(
    steps: list[list[Token]], logprobs: bool, texts: bool, data: st.DataObject
) -> None:
    """SGLang counts the tokens of an event when it makes it, and prints them when it sends it. Only the last one is sure."""
    events = [json.loads(event) for event in payloads(steps, "cumulative", logprobs=logprobs, texts=texts)]
    counted = 1
    for event in events[:-1]:
        counted = data.draw(st.integers(counted, event["meta_info"]["completion_tokens"]))
        event["meta_info"]["completion_tokens"] = counted
    tokens = [token for step in steps for token in step]
    raw = [compact(event) for event in events]
    reply = read(raw).reply()
    assert reply is not None
    assert (reply.ids, reply.text) == ([t[0] for t in tokens], "".join(t[2] for t in tokens))
    assert reply.logprobs == ([t[1] for t in tokens] if logprobs else None)
    assert reply.fault(4, logprobs_asked=logprobs) is None
    so_far = read(raw[: data.draw(st.integers(1, len(raw)))]).reply()
    assert so_far is not None
    assert so_far.fault(4, logprobs_asked=logprobs) is None


@pytest.mark.parametrize("joined", [False, True], ids=["alone", "joined to the delta before"])
@given(steps=STEPS)
def test_a_stream_of_deltas_that_repeats_itself_at_its_end(joined: bool, steps: list[list[Token]]) -> None:
    """As SGLang ends one that a pause had retracted, when it is aborted: nothing is lost, and nothing is there twice."""
    events = [json.loads(event) for event in payloads(steps, "incremental")]
    tokens = [token for step in steps for token in step]
    events[-1]["meta_info"]["finish_reason"] = None
    again = {"text": "".join(t[2] for t in tokens), "output_ids": [tokens[-1][0]]}
    entries = [[t[1], t[0], None] for t in tokens]
    meta = {**events[-1]["meta_info"], "finish_reason": {"type": "abort", "message": "Abort in waiting queue"}}
    if joined:
        last = events.pop()
        again = {key: last[key] + again[key] for key in again}
        entries = last["meta_info"]["output_token_logprobs"] + entries
    events.append({**again, "meta_info": {**meta, "output_token_logprobs": entries}})
    reply = read([json.dumps(event).encode() for event in events]).reply()
    assert reply is not None
    assert reply.ids == [t[0] for t in tokens]
    assert reply.text == "".join(t[2] for t in tokens)
    assert reply.logprobs == [t[1] for t in tokens]
    assert reply.fault(4, logprobs_asked=True) is None


@given(steps=STEPS)
def test_a_stream_that_does_not_count_is_read_by_what_its_events_begin_with(steps: list[list[Token]]) -> None:
    reply = read(payloads(steps, "cumulative", counted=False)).reply()
    assert reply is not None
    assert reply.ids == [token[0] for step in steps for token in step]
    assert reply.logprob_ids == reply.ids
    assert reply.text == "".join(token[2] for step in steps for token in step)


@given(steps=STEPS, style=st.sampled_from(["cumulative", "incremental", "mixed"]), data=st.data())
def test_at_any_moment_a_stream_is_a_reply_of_what_has_come(
    steps: list[list[Token]], style: str, data: st.DataObject
) -> None:
    """So that what a client saw before it left is remembered."""
    count = data.draw(st.integers(1, len(steps)))
    streamed = read(payloads(steps, style)[:count])
    tokens = [token for step in steps[:count] for token in step]
    reply = streamed.reply()
    assert reply is not None
    assert (reply.ids, reply.text) == ([t[0] for t in tokens], "".join(t[2] for t in tokens))
    assert reply.fault(4, logprobs_asked=True) is None
    assert streamed.finished is (count == len(steps))
    assert not streamed.done


@given(steps=st.lists(st.lists(TOKENS, min_size=1, max_size=4), min_size=4, max_size=8), logprobs=st.booleans())
def test_the_news_of_a_cumulative_event_can_be_edited_and_made_whole(steps: list[list[Token]], logprobs: bool) -> None:
    """What a client gets is the same as if the whole event had been taken apart."""
    streamed = StreamedReply()
    for number, event in enumerate(payloads(steps, "cumulative", logprobs=logprobs)):
        streamed.feed(event)
        assert (streamed.news is not None) is (number > 1), (
            "from the third on it is clear that the stream is cumulative"
        )
        if streamed.news is not None:
            assert len(streamed.news) <= len(event)
            edited = streamed.whole(edit_meta(streamed.news, drop=LOGPROB_FIELDS, add={"trajectory": b"[1]"}))
            assert edited == edit_meta(event, drop=LOGPROB_FIELDS, add={"trajectory": b"[1]"})


def test_an_event_that_takes_something_back_is_read_as_a_whole() -> None:
    """The last event of a reply that ran into a stop string has less text than those before it."""
    events = payloads([[(1, -0.5, "a")], [(2, -0.5, "b")], [(3, -0.5, "c")], [(4, -0.5, "d")]], "cumulative")
    events[-1] = events[-1].replace(b'"abcd"', b'"ab"')
    streamed = read(events)
    assert streamed.news is None
    reply = streamed.reply()
    assert reply is not None
    assert (reply.ids, reply.text, len(reply.logprobs or ())) == ([1, 2, 3, 4], "ab", 4)


def test_an_event_that_does_not_add_up_is_read_as_a_whole() -> None:
    """It begins with what came before, but says that there are more tokens than it has: somebody lost one."""
    events = payloads([[(1, -0.5, "a")], [(2, -0.5, "b")], [(3, -0.5, "c")], [(4, -0.5, "d")]], "cumulative")
    events[-1] = events[-1].replace(b'"completion_tokens":4', b'"completion_tokens":5')
    streamed = read(events)
    assert streamed.news is None
    reply = streamed.reply()
    assert reply is not None
    assert reply.fault(4, logprobs_asked=True) is not None


def test_a_stream_without_output_ids_has_those_of_its_logprobs() -> None:
    """As in versions before `output_ids`."""
    streamed = read([b'{"text":"a","meta_info":{"output_token_logprobs":[[-1.0,5,null]],"completion_tokens":1}}'])
    reply = streamed.reply()
    assert reply is not None
    assert reply.ids == [5]


@pytest.mark.parametrize("text", [b"5", b"null", b'"\xff"'])
def test_a_stream_whose_text_is_none_cannot_be_read(text: bytes) -> None:
    streamed = StreamedReply()
    streamed.feed(b'{"text":' + text + b',"output_ids":[1],"meta_info":{}}')
    with pytest.raises(UnreadableReplyError, match="text"):
        streamed.reply()


def test_a_float_of_a_stream_is_the_same_float() -> None:
    values = [-3.3467748165130615, -0.1, -1e-300, -0.0]
    steps = [[(i, value, "a")] for i, value in enumerate(values)]
    for style in ("cumulative", "incremental", "mixed"):
        reply = read(payloads(steps, style)).reply()
        assert reply is not None
        assert list(map(repr, reply.logprobs or ())) == list(map(repr, values))


def test_the_last_event_decides_on_versions() -> None:
    streamed = StreamedReply()
    for version in ("1", "2"):
        streamed.feed(b'{"text":"a","output_ids":[1],"meta_info":{"weight_version":"%s"}}' % version.encode())
    reply = streamed.reply()
    assert reply is not None
    assert reply.version == "2"


def test_before_the_first_event_there_is_no_reply() -> None:
    streamed = StreamedReply()
    assert streamed.reply() is None
    assert not streamed.finished
    assert not streamed.done


def test_a_stream_without_done_is_not_done() -> None:
    events = payloads([[(1, -0.5, "a")], [(2, -0.5, "b")]], "cumulative")
    streamed = read(events)
    assert streamed.finished
    assert not streamed.done
    streamed.feed(b"[DONE]")
    assert streamed.done
    assert streamed.error is None


def test_done_alone_is_done_with_nothing() -> None:
    streamed = read([b"[DONE]"])
    assert streamed.done
    assert streamed.reply() is None


def test_an_error_in_a_stream_is_kept_with_what_came_before_it() -> None:
    """SGLang has told the client 200 by then."""
    streamed = read(payloads([[(1, -0.5, "a")], [(2, -0.5, "b")]], "incremental")[:1])
    streamed.feed(b'{"error": {"message": "out of memory", "code": 500}}')
    assert streamed.error == '{"message": "out of memory", "code": 500}'
    reply = streamed.reply()
    assert reply is not None
    assert (reply.ids, reply.text) == ([1], "a")


def test_a_long_error_is_shortened() -> None:
    streamed = StreamedReply()
    streamed.feed(json.dumps({"error": "x" * 10_000}).encode())
    assert streamed.error is not None
    assert len(streamed.error) == 500


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"oops",
        b"[]",
        b"{}",
        b'{"text":"a"}',
        b'{"text":"a","output_ids":[1],"meta_info":null}',
        b'{"text":"a","output_ids":["1"],"meta_info":{}}',
        b'{"text":"a","output_ids":[1],"meta_info":{"completion_tokens":"1"}}',
        b'{"text":"a","output_ids":[1],"meta_info":{"output_token_logprobs":[[1]]}}',
        b'{"text":"a","output_ids":[1],"meta_info":{"output_token_logprobs":5}}',
        b'{"output_ids":[1],"meta_info":{}}',
        b'{"text":"a","output_ids":[1],"meta_info":{"id":"\xff"}}',
        b'{"text":"\\ud800","output_ids":[1],"meta_info":{}}',
    ],
    ids=repr,
)
def test_an_event_that_cannot_be_read_is_an_error(data: bytes) -> None:
    streamed = StreamedReply()
    streamed.feed(data)
    assert streamed.error is not None
    assert streamed.error.startswith("an event that cannot be read: ")
