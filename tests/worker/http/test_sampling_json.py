"""`sampling_params`: their meaning and their refusals."""

from __future__ import annotations

from typing import Any

import pytest

from worker.engine.source import AS_MANY, SamplingParams
from worker.http.admission import parse_sampling
from worker.http.exchange import OutOfRange, Refused


def parse(**params: Any) -> SamplingParams:
    return parse_sampling(params, 100)


def test_null_is_the_default_except_for_max_new_tokens() -> None:
    assert parse() == parse(temperature=None, top_p=None, stop=None, ignore_eos=None) == SamplingParams()
    assert parse(max_new_tokens=None).max_new_tokens == AS_MANY


def test_a_single_stop_is_a_list_of_one() -> None:
    assert parse(stop="a", stop_regex="b") == parse(stop=["a"], stop_regex=["b"])


def test_ids_may_be_text_because_keys_of_json_are() -> None:
    assert parse(logit_bias={"5": 1}).logit_bias == {5: 1.0}


def test_n_0_means_1() -> None:
    assert [parse(n=count).n for count in (-1, 0, 1, 3)] == [1, 1, 1, 3]


@pytest.mark.parametrize(("params", "greedy"), [({}, False), ({"temperature": 0}, True), ({"top_k": 1}, True)])
def test_greedy(params: dict[str, Any], greedy: bool) -> None:
    assert parse(**params).greedy is greedy


@pytest.mark.parametrize(
    ("params", "shape", "message"),
    [
        ({"max_tokens": 1}, "error", "unknown field `max_tokens`, expected one of `max_new_tokens`"),
        ({"max_new_tokens": "a"}, "error", 'invalid type: string "a", expected i64'),
        ({"max_new_tokens": True}, "error", "expected i64"),
        ({"temperature": []}, "error", "expected f64"),
        ({"ignore_eos": 1}, "error", "expected a boolean"),
        ({"stop": 5}, "error", "StringOrList"),
        ({"stop_token_ids": 5}, "error", "expected a sequence"),
        ({"logit_bias": 5}, "error", "expected a map"),
        ({"json_schema": "{}", "regex": "a"}, "message", "Only one of"),
        ({"logit_bias": {"x": 1}}, "message", "invalid literal"),
        ({"logit_bias": {"100": 1}}, "message", "keys in \\[0, 99\\]"),
        ({"temperature": -1}, "message", "temperature"),
        ({"top_p": 0}, "message", "top_p"),
        ({"top_k": 0}, "message", "top_k"),
        ({"min_p": 2}, "message", "min_p"),
        ({"frequency_penalty": 3}, "message", "frequency_penalty"),
        ({"presence_penalty": -3}, "message", "presence_penalty"),
        ({"repetition_penalty": 0}, "message", "repetition_penalty"),
        ({"min_new_tokens": -1}, "message", "min_new_tokens"),
        ({"min_new_tokens": 129}, "message", "max_new_tokens\\(128\\)"),
        ({"max_new_tokens": -1}, "message", "at least 0"),
    ],
    ids=str,
)
def test_refusals(params: dict[str, Any], shape: str, message: str) -> None:
    with pytest.raises(Refused, match=message) as refused:
        parse(**params)
    assert refused.value.shape == shape


@pytest.mark.parametrize("params", [{"n": None}, {"stop_regex": "("}])
def test_failures_of_the_front_end(params: dict[str, Any]) -> None:
    with pytest.raises(OutOfRange):
        parse(**params)
