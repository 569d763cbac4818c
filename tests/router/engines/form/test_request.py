"""Requests of `/generate`: reading them, refusing them, and the body for the worker."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from router.engines.form.request import GenerateRequest, new_weight_version
from router.errors import BadRequestError
from tests.router.engines.form.json_values import JSON
from tests.support.depths import limited


def request(**fields: Any) -> GenerateRequest:
    return GenerateRequest.parse(json.dumps(fields).encode())


def sent(asked: GenerateRequest, *prompts: list[int], force: bool = False) -> Any:
    """Return the body that a worker gets."""
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


def test_white_space_does_not_hide_a_batch_of_ids() -> None:
    asked = GenerateRequest.parse(b'{"input_ids": \n[ \t[1, 2], [3]]}')
    assert asked.ids == [[1, 2], [3]]
    assert asked.batch
    assert not GenerateRequest.parse(b'{"input_ids": [ 1 ]}').batch


def test_options_are_off_by_default() -> None:
    asked = request(text="a")
    assert (asked.samples, asked.stream, asked.wants_logprobs, asked.wants_trajectory) == (1, False, [False], False)
    assert asked.skips_special(0)
    assert asked.unrecordable is None
    assert (asked.lora_path(0), asked.rid(0), asked.sampling) == ("", None, [])


def test_null_counts_as_absent() -> None:
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
    assert request(text="a", return_logprob=True).options(0).logprobs
    for_all = request(text=["a", "b"], return_logprob=True)
    assert [for_all.options(i).logprobs for i in (0, 1)] == [True, True]
    one_each = request(text=["a", "b"], return_logprob=[False, True])
    assert [one_each.options(i).logprobs for i in (0, 1)] == [False, True]
    assert not request(text="a", return_logprob=[]).options(0).logprobs


def test_the_name_of_a_request() -> None:
    assert request(text="a", rid="x").rid(0) == "x"
    batch = request(text=["a", "b", "c"], rid=["x", None, "z"])
    assert [batch.rid(i) for i in range(3)] == ["x", None, "z"]
    assert request(text=["a"], rid=["x"]).rid(0) == "x"


def test_a_rid_that_the_worker_would_not_use_is_none() -> None:
    """With `n` samples each has its own id, and a batch needs an id for every prompt."""
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
        ({"text": "a", "image_data": ""}, "multimodal"),
        ({"text": ["a", "b"], "image_data": [None, ["x"]]}, "multimodal"),
        ({"text": "a", "session_params": {"id": "x"}}, "session_params"),
        ({"text": "a", "session_params": {"id": None}}, "session_params"),
    ],
)
def test_an_unrecordable_request_says_why(fields: dict[str, Any], reason: str) -> None:
    assert request(**fields).unrecordable == reason


@pytest.mark.parametrize("nothing", [[], [None], [[]], [[None], []]])
@pytest.mark.parametrize("key", ["image_data", "video_data", "audio_data", "session_params"])
def test_fields_that_ask_for_nothing_leave_a_reply_recordable(key: str, nothing: Any) -> None:
    """Some clients write such a field into every request; SGLang takes these for none, too."""
    assert request(**{"text": "a", key: nothing}).unrecordable is None


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
def test_a_request_that_no_worker_can_serve_is_refused_with_advice(fields: dict[str, Any], says: str) -> None:
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
        pytest.param(b'{"text": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", marks=limited),
    ],
    ids=lambda body: repr(body[:20]),
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequestError):
        GenerateRequest.parse(body)


def test_an_error_names_its_place() -> None:
    with pytest.raises(BadRequestError, match=r"the request body must be a JSON object: .*byte"):
        GenerateRequest.parse(b'{"text": "a", oops}')
    with pytest.raises(BadRequestError, match=r"\$\[1\]"):
        request(input_ids=[1, "2"])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("rid", 5), ("rid", {"a": 5}), ("rid", "x" * 1025), ("rid", ["a", "x" * 1025])],
        *[("lora_path", 5), ("lora_path", "x" * 4097), ("lora_path", ["a", "x" * 4097])],
    ],
)
def test_invalid_names_are_refused(field: str, value: Any) -> None:
    with pytest.raises(BadRequestError, match=f"`{field}`"):
        request(text="a", **{field: value})


def test_a_field_that_is_read_later_is_refused_then() -> None:
    asked = request(text="a", sampling_params={"skip_special_tokens": "no"})
    with pytest.raises(BadRequestError):
        asked.skips_special(0)


@pytest.mark.parametrize("count", [0, -1])
def test_a_request_for_no_samples_is_refused(count: int) -> None:
    with pytest.raises(BadRequestError, match="`n` must be at least 1"):
        request(text="a", sampling_params={"n": count})


def test_a_weight_version_is_a_name() -> None:
    assert new_weight_version(b'{"new_version": "7"}') == "7"
    assert new_weight_version(b'{"weight_version": "7"}') == "7"
    assert new_weight_version(b'{"new_version": ""}') == "", "engines take it, and report it"
    with pytest.raises(BadRequestError, match="1024"):
        new_weight_version(b'{"new_version": "%s"}' % (b"7" * 1025))


# Requests: what a worker gets --------------------------------------------------------------------------------------------


def test_a_worker_gets_ids_instead_of_the_text() -> None:
    asked = request(text="a", stream=True, rid="x")
    assert sent(asked, [1, 2]) == {"input_ids": [1, 2], "stream": True, "rid": "x"}


def test_a_batch_stays_a_batch() -> None:
    assert sent(request(text=["a"]), [1, 2]) == {"input_ids": [[1, 2]]}
    assert sent(request(text=["a", "b"]), [1], [2, 3]) == {"input_ids": [[1], [2, 3]]}
    assert sent(request(input_ids=[[1]]), [1]) == {"input_ids": [[1]]}


def test_with_text_and_ids_only_the_ids_are_sent() -> None:
    """SGLang would decide by the text whether they are a batch."""
    assert sent(request(text=["a", "b"], input_ids=[7]), [7]) == {"input_ids": [7]}
    assert sent(request(text="a", input_ids=None), [7]) == {"input_ids": [7]}


def test_fields_of_the_router_are_not_passed_on() -> None:
    assert sent(request(text="a", return_trajectory=True), [1]) == {"input_ids": [1]}


def test_the_rest_is_passed_on_byte_for_byte() -> None:
    """That includes the spelling of floats, and unknown fields."""
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


def test_options_of_logprobs_are_sent_only_if_the_client_asked_for_logprobs() -> None:
    """Without `return_logprob` a worker ignores them. If the router switches logprobs on, they would cost the worker a lot."""
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


def test_a_top_k_of_0_is_all_tokens_as_sglang_spells_it() -> None:
    asked = request(text="a", sampling_params={"top_k": 0, "top_p": 0.5})
    assert sent(asked, [1])["sampling_params"] == {"top_k": -1, "top_p": 0.5}
    batch = request(text=["a", "b"], sampling_params=[{"top_k": 0}, {"top_k": 2}])
    assert sent(batch, [1], [2])["sampling_params"] == [{"top_k": -1}, {"top_k": 2}]
    body = json.dumps({"input_ids": [1], "sampling_params": {"top_k": 0}}).encode()
    assert json.loads(GenerateRequest.parse(body).passed_on(body))["sampling_params"] == {"top_k": -1}


def test_a_sent_body_reads_as_the_same_request() -> None:
    asked = request(text=["a", "b"], sampling_params={"n": 2}, rid=["x", "y"], stream=True)
    again = GenerateRequest.parse(asked.with_ids([[1], [2]], force_logprobs=True))
    assert (again.ids, again.batch, again.samples, again.stream) == ([[1], [2]], True, 2, True)
    assert again.wants_logprobs == [True]


NAMES = st.text(alphabet="abcxyz_", min_size=1).filter(lambda name: name != "text")


@given(st.dictionaries(NAMES, JSON, max_size=5), st.lists(st.integers(0, 2**31 - 1), min_size=1))
def test_unknown_fields_reach_the_worker(others: dict[str, Any], ids: list[int]) -> None:
    assert sent(request(text="a", **others), ids) == {"input_ids": ids, **others}
