"""`prompt_segments`: reading them, and what a worker gets instead. Without a server or a tokenizer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.engines.form.request import GenerateRequest
from router.engines.form.segments import Segment
from router.errors import BadRequestError

MIXED: list[Any] = [{"text": "a"}, {"ids": [1, 2]}, {"text": "b"}]


def request(**fields: Any) -> GenerateRequest:
    return GenerateRequest.parse(json.dumps(fields).encode())


@pytest.mark.parametrize(
    ("written", "segments", "batch"),
    [
        pytest.param([{"text": "a"}], [["a"]], False, id="a text"),
        pytest.param([{"ids": [1]}], [[[1]]], False, id="ids"),
        pytest.param(MIXED, [["a", [1, 2], "b"]], False, id="both"),
        pytest.param([{"text": "a"}, {"text": "b"}], [["a", "b"]], False, id="texts are not joined"),
        pytest.param([MIXED], [["a", [1, 2], "b"]], True, id="a list of one prompt"),
        pytest.param([MIXED, [{"ids": [3]}]], [["a", [1, 2], "b"], [[3]]], True, id="a batch"),
        pytest.param([{"text": "a", "ids": None}], [["a"]], False, id="null ids are none"),
        pytest.param([{"text": None, "ids": [1]}], [[[1]]], False, id="a null text is none"),
        pytest.param([{"text": " "}], [[" "]], False, id="white space is a text"),
    ],
)
def test_segments_are_read_in_every_form(written: Any, segments: list[list[Segment]], batch: bool) -> None:
    asked = request(prompt_segments=written)
    assert (asked.segments, asked.batch, asked.listed) == (segments, batch, batch)
    assert (asked.texts, asked.ids, asked.unrecordable) == (None, None, None)


def test_white_space_does_not_hide_a_batch_of_segments() -> None:
    assert GenerateRequest.parse(b'{"prompt_segments": \n[ \t[{"ids": [1]}]]}').batch
    assert not GenerateRequest.parse(b'{"prompt_segments": [ {"ids": [ 1]}]}').batch


def test_null_segments_count_as_absent() -> None:
    assert request(text="a", prompt_segments=None).texts == ["a"]
    nulls = request(prompt_segments=MIXED, text=None, input_ids=None, input_embeds=None)
    assert nulls.segments == [["a", [1, 2], "b"]]


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ([], "`prompt_segments` is empty, or has an empty prompt in it: give at least one segment"),
        ([[]], "`prompt_segments` is empty"),
        ([MIXED, []], "`prompt_segments` is empty, or has an empty prompt"),
        ([{"text": ""}], "`prompt_segments[0].text` is empty: give at least one character"),
        ([*MIXED, {"ids": []}], "`prompt_segments[3].ids` is empty: give at least one token id"),
        ([MIXED, [{"text": "a"}, {"text": ""}]], "`prompt_segments[1][1].text` is empty"),
        ([{"text": "", "ids": None}], "`prompt_segments[0].text` is empty"),
        ([{"text": "a", "ids": [1]}], "`prompt_segments[0]` has both `text` and `ids`"),
        ([{"text": "", "ids": []}], "`prompt_segments[0]` has both `text` and `ids`"),
        ([{"text": "a"}, {}], "`prompt_segments[1]` has neither `text` nor `ids`"),
        ([{"text": None, "ids": None}], "`prompt_segments[0]` has neither"),
        ([{"text": "a", "mask": 1}], "unknown field `mask` - at `$[0]`"),
        ([{"text": "a"}, {"input_ids": [1]}], "unknown field `input_ids` - at `$[1]`"),
        ([MIXED, [{"token_ids": [1]}]], "unknown field `token_ids`"),
        ("a", "`prompt_segments` must be a list of segments"),
        ({"text": "a"}, "`prompt_segments` must be a list of segments"),
        (7, "`prompt_segments` must be a list of segments"),
        (["a"], "`prompt_segments` must be a list of segments"),
        ([1, 2], "`prompt_segments` must be"),
        ([None], "`prompt_segments` must be"),
        ([{"text": "a"}, [{"text": "b"}]], "`prompt_segments` must be"),
        ([[{"text": "a"}], {"text": "b"}], "`prompt_segments` must be"),
        ([[[{"text": "a"}]]], "`prompt_segments` must be"),
        ([{"text": 7}], "`$[0].text`"),
        ([{"text": ["a"]}], "`$[0].text`"),
        ([{"text": "a"}, {"ids": "1"}], "`$[1].ids`"),
        ([{"ids": 1}], "`$[0].ids`"),
        ([{"ids": [True]}], "got `bool` - at `$[0].ids[0]`"),
        ([{"ids": [1, 1.5]}], "`$[0].ids[1]`"),
        ([{"ids": [None]}], "`$[0].ids[0]`"),
        ([{"ids": ["1"]}], "`$[0].ids[0]`"),
        ([{"ids": [[1]]}], "`$[0].ids[0]`"),
    ],
)
def test_invalid_segments_are_refused_by_name(written: Any, says: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        request(prompt_segments=written)
    assert says in caught.value.message
    assert caught.value.status == 400


@pytest.mark.parametrize("key", ["text", "input_ids", "input_embeds"])
def test_a_prompt_beside_segments_is_refused(key: str) -> None:
    """Ids win over a text, as with SGLang. But segments are text and ids at once, so the request is ambiguous."""
    others = {"text": "a", "input_ids": [1], "input_embeds": [[0.5]]}
    with pytest.raises(BadRequestError) as caught:
        request(prompt_segments=MIXED, **{key: others[key]})
    assert f"`{key}`" in caught.value.message
    assert "exactly one of `text`, `input_ids` and `prompt_segments`" in caught.value.message


@pytest.mark.parametrize("text", [rb"a\ud800", rb"\udc00", rb"\ud83d \ude00"])
def test_a_lone_surrogate_is_no_text(text: bytes) -> None:
    with pytest.raises(BadRequestError):
        GenerateRequest.parse(b'{"prompt_segments": [{"text": "%b"}]}' % text)


def test_lists_of_a_batch_must_fit_its_prompts() -> None:
    with pytest.raises(BadRequestError, match="`lora_path` is a list of 1: give one for each of 2 prompts"):
        request(prompt_segments=[MIXED, MIXED], lora_path=["x"])
    with pytest.raises(BadRequestError, match="there is one prompt"):
        request(prompt_segments=MIXED, rid=["x"])
    with pytest.raises(BadRequestError, match="8192 replies"):
        request(prompt_segments=[MIXED] * 2, sampling_params={"n": 40_000})


@pytest.mark.parametrize(("batch", "ids"), [(False, [[5, 6]]), (True, [[5, 6]]), (True, [[5], [6]])])
def test_a_worker_gets_ids_instead_of_segments(batch: bool, ids: list[list[int]]) -> None:
    asked = request(
        prompt_segments=[MIXED] * len(ids) if batch else MIXED, text=None, unheard_of=[1.5], sampling_params={"n": 1}
    ).assembled(ids)
    body = json.loads(asked.with_ids(ids, force_logprobs=True))
    assert body == {
        "input_ids": ids if batch else ids[0],
        "unheard_of": [1.5],
        "sampling_params": {"n": 1},
        "return_logprob": True,
    }


def test_unrecorded_segments_are_sent_as_ids_too() -> None:
    asked = request(
        prompt_segments=MIXED, image_data="x", sampling_params={"n": None}, return_logprob=True, top_logprobs_num=1
    )
    assert asked.unrecordable == "multimodal"
    assert json.loads(asked.assembled([[5, 6]]).passed_on(b"not this")) == {
        "input_ids": [5, 6],
        "image_data": "x",
        "sampling_params": {},
        "return_logprob": True,
        "top_logprobs_num": 1,
    }


def test_null_segments_are_not_passed_on() -> None:
    assert json.loads(request(text="a", prompt_segments=None).with_ids([[1]], force_logprobs=False)) == {
        "input_ids": [1]
    }
