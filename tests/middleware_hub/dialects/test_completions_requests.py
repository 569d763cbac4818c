"""What `/generate` is asked for a body of `/v1/completions`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from middleware_hub.dialects.completions import CompletionRequest, parse
from router.engines.form.request import GenerateRequest
from router.errors import BadRequestError

RID = "0123abcd"
TEXTS = st.text(min_size=1, max_size=8)
IDS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5)


def read(**body: Any) -> CompletionRequest:
    return parse(json.dumps({"prompt": "Hello", **body}).encode())


def asked(**body: Any) -> dict[str, Any]:
    """The body of the `/generate`, which the router itself takes."""
    found = read(**body).generate(RID)
    GenerateRequest.parse(found)
    return dict(json.loads(found))


def refused(**body: Any) -> BadRequestError:
    with pytest.raises(BadRequestError) as caught:
        read(**body)
    return caught.value


def test_the_least_that_can_be_asked() -> None:
    assert asked() == {
        "text": "Hello",
        "sampling_params": {"max_new_tokens": 16},
        "stream": False,
        "rid": RID,
    }


def test_a_prompt_that_is_missing() -> None:
    with pytest.raises(BadRequestError) as caught:
        parse(b"{}")
    assert caught.value.details == {"param": "prompt"}


@given(prompt=TEXTS | st.lists(TEXTS, min_size=1, max_size=3) | IDS | st.lists(IDS, min_size=1, max_size=3))
def test_a_prompt_of_any_kind_is_passed_on_unchanged(prompt: Any) -> None:
    found = asked(prompt=prompt)
    first = prompt[0] if isinstance(prompt, list) else prompt
    key = "text" if isinstance(first, str) else "input_ids"
    assert found[key] == prompt
    assert ({"text", "input_ids"} & found.keys()) == {key}
    request = GenerateRequest.parse(json.dumps(found).encode())
    assert read(prompt=prompt).listed == request.listed
    assert read(prompt=prompt).prompts == (request.texts or request.ids)


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        [""],
        ["a", ""],
        [[]],
        [[5], []],
        ["a", 5],
        [5, [5]],
        [["a"]],
        [5.5],
        [True],
        {"a": 1},
        7,
        [None],
        [[[5]]],
    ],
)
def test_a_prompt_of_no_kind(prompt: Any) -> None:
    assert refused(prompt=prompt).details["param"] == "prompt"


def test_what_openai_and_sglang_know_becomes_sampling_params() -> None:
    found = asked(
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        stop="END",
        seed=3,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        logit_bias={"5": 1.5},
        top_k=5,
        min_p=0.01,
        regex="a+",
        ignore_eos=True,
        skip_special_tokens=False,
        stop_token_ids=[7],
        min_tokens=1,
        repetition_penalty=1.1,
    )
    assert found["sampling_params"] == {
        "max_new_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "stop": ["END"],
        "sampling_seed": 3,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "logit_bias": {"5": 1.5},
        "top_k": 5,
        "min_p": 0.01,
        "regex": "a+",
        "ignore_eos": True,
        "skip_special_tokens": False,
        "stop_token_ids": [7],
        "min_new_tokens": 1,
        "repetition_penalty": 1.1,
    }


@pytest.mark.parametrize(
    ("given", "limit"), [({}, 16), ({"max_new_tokens": 9}, 9), ({"max_new_tokens": 9, "max_tokens": 3}, 3)]
)
def test_the_limit_may_have_sglangs_name(given: dict[str, int], limit: int) -> None:
    assert asked(**given)["sampling_params"]["max_new_tokens"] == limit


@pytest.mark.parametrize(
    ("key", "value", "unfit"),
    [
        ("logit_bias", {"5": 1, "x": 1}, '"x"'),
        ("logit_bias", {"5": 1, "": 1}, '""'),
        ("stop_token_ids", [5, -1, 6], "-1"),
        ("stop_token_ids", [2**31], "2147483648"),
    ],
)
def test_the_entry_that_does_not_fit_is_named(key: str, value: Any, unfit: str) -> None:
    error = refused(**{key: value})
    assert error.details["param"] == key
    assert error.message.endswith(f", not {unfit}")


@pytest.mark.parametrize("schema", [{"type": "object"}, '{"type":"object"}'])
def test_a_json_schema_is_an_object_or_its_text(schema: Any) -> None:
    assert asked(json_schema=schema)["sampling_params"]["json_schema"] == '{"type":"object"}'
    assert refused(json_schema=schema, response_format={"type": "json_object"}).details["param"] == "json_schema"
    assert "only one of" in refused(json_schema=schema, regex="a").message


def test_samples() -> None:
    assert asked(n=1)["sampling_params"] == {"max_new_tokens": 16}
    found = asked(n=3, best_of=3)
    assert found["sampling_params"]["n"] == 3
    assert "rid" not in found, "workers give every sample an id of its own"
    assert read(prompt=["a", "b"], n=3).replies == 6


def test_best_of_is_n_or_nothing() -> None:
    assert read(best_of=1).samples == 1
    for body in ({"best_of": 2}, {"n": 2, "best_of": 3}, {"n": 2, "best_of": 1}):
        assert refused(**body).details["param"] == "best_of"


def test_logprobs() -> None:
    assert "return_logprob" not in asked()
    none, some = asked(logprobs=0), asked(logprobs=5)
    assert (none["return_logprob"], "top_logprobs_num" in none) == (True, False)
    assert (some["return_logprob"], some["top_logprobs_num"]) == (True, 5)


def test_a_stream_may_end_with_the_numbers_of_tokens() -> None:
    assert asked(stream=True)["stream"] is True
    assert not read(stream=True).stream_usage
    assert read(stream=True, stream_options={"include_usage": True}).stream_usage
    assert not read().tokens_as_ids
    assert read(return_tokens_as_token_ids=True).tokens_as_ids
    assert "return_tokens_as_token_ids" not in asked(return_tokens_as_token_ids=True)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"suffix": "end"}, "suffix"),
        ({"echo": True, "logprobs": 0}, "echo"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"n": 0}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a", "b" * 4097]}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": 5}, "stream_options"),
        ({"model": 5}, "model"),
        ({"text": "Hello"}, "text"),
        ({"input_ids": [5]}, "input_ids"),
        ({"prompt_segments": [{"text": "a"}]}, "prompt_segments"),
        ({"sampling_params": {"n": 2}}, "sampling_params"),
        ({"messages": []}, "messages"),
    ],
)
def test_what_is_refused_is_named(body: dict[str, Any], param: str) -> None:
    assert refused(**body).details["param"] == param


def test_nothing_is_what_null_and_empty_fields_ask_for() -> None:
    assert asked(suffix="", text=None, best_of=None, logprobs=None, max_tokens=None, echo=None, user="me") == asked()


def test_unknown_fields_are_for_the_worker() -> None:
    found = asked(lora_path="adapter", priority=3, return_trajectory=True, unheard_of={"a": [1]})
    assert found["lora_path"] == "adapter"
    assert (found["priority"], found["return_trajectory"], found["unheard_of"]) == (3, True, {"a": [1]})


def test_what_the_router_writes_by_itself_is_no_clients() -> None:
    assert asked(rid="mine", return_logprob=True, top_logprobs_num=5) == asked()
