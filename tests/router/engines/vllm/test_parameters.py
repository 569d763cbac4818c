"""Sampling parameters: no name of SGLang's is passed over."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from router.engines.vllm.parameters import OWN, TABLE, translated
from router.errors import BadRequestError
from tests.support import sglang_server

NAMES = frozenset(
    (
        "max_new_tokens stop stop_token_ids stop_regex temperature top_p top_k min_p frequency_penalty presence_penalty"
        " repetition_penalty min_new_tokens n beam_width json_schema regex ebnf structural_tag ignore_eos"
        " skip_special_tokens spaces_between_special_tokens no_stop_trim stream_interval logit_bias sampling_seed"
        " custom_params watermark stop_strs stop_regex_strs stop_str_max_len stop_regex_max_len is_normalized"
        " ebnf_full_assistant"
    ).split()
)
"""The fields of SGLang's `SamplingParams` (0.5.23)."""


def test_every_name_has_a_row() -> None:
    assert frozenset(TABLE) == NAMES


def test_the_names_are_those_of_the_installed_engine() -> None:
    package = sglang_server.package_path()
    if package is None:
        pytest.skip("no SGLang is installed here")
    tree = ast.parse((package / "srt/sampling/sampling_params.py").read_text())
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "SamplingParams"]
    fields = [
        node.target.id for node in found.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]
    assert frozenset(fields) == NAMES


def test_every_name_is_in_the_documentation() -> None:
    page = (Path(__file__).parents[4] / "docs/engines.md").read_text()
    _, _, section = page.partition("### Sampling parameters")
    table, _, _ = section.partition("\n#")
    assert {
        name
        for row in table.splitlines()
        if row.startswith("| `")
        for name in re.findall(r"`(\w+)`", row.split("|")[1])
    } == (NAMES | OWN)


DEFAULTS = {
    "max_tokens": 128,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
}


def test_what_is_left_out_has_sglangs_default() -> None:
    """Not that of the model's own configuration, which a vLLM worker would take."""
    assert translated({}) == translated(dict.fromkeys(NAMES - {"max_new_tokens"})) == DEFAULTS
    assert translated({"max_new_tokens": None})["max_tokens"] is None


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({"max_new_tokens": 7}, {"max_tokens": 7}),
        ({"max_new_tokens": 0}, {"max_tokens": 1}),
        ({"stop": "a"}, {"stop": "a"}),
        ({"stop": ["a", "b"]}, {"stop": ["a", "b"]}),
        ({"stop_token_ids": [1, None, 2]}, {"stop_token_ids": [1, 2]}),
        ({"stop_regex": []}, {}),
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"temperature": 1e-7}, {"temperature": 0.0}),
        ({"temperature": 0.7}, {"temperature": 0.7}),
        ({"temperature": -1}, {"temperature": -1}),
        ({"top_p": 0.5, "top_k": 3, "min_p": 0.1}, {"top_p": 0.5, "top_k": 3, "min_p": 0.1}),
        ({"frequency_penalty": 1, "presence_penalty": -1}, {"frequency_penalty": 1, "presence_penalty": -1}),
        ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"min_new_tokens": 3}, {"min_tokens": 3}),
        ({"n": 4}, {"n": 4}),
        ({"beam_width": 1}, {}),
        ({"json_schema": '{"type":"object"}'}, {"structured_outputs": {"json": '{"type":"object"}'}}),
        ({"json_schema": "$$ANY$$"}, {"structured_outputs": {"json_object": True}}),
        ({"regex": "[ab]+"}, {"structured_outputs": {"regex": "[ab]+"}}),
        ({"regex": ""}, {}),
        ({"ebnf": 'root ::= "a"'}, {"structured_outputs": {"grammar": 'root ::= "a"'}}),
        ({"structural_tag": "{}"}, {"structured_outputs": {"structural_tag": "{}"}}),
        ({"ignore_eos": True}, {"ignore_eos": True}),
        ({"skip_special_tokens": False}, {"skip_special_tokens": False}),
        ({"spaces_between_special_tokens": False}, {"spaces_between_special_tokens": False}),
        ({"no_stop_trim": True}, {"include_stop_str_in_output": True}),
        ({"stream_interval": 4}, {"stream_interval": 4}),
        ({"logit_bias": {"3": 5.0}}, {"logit_bias": {"3": 5.0}}),
        ({"sampling_seed": 5}, {"seed": 5}),
        ({"custom_params": {"a": 1, "b": ["x"]}}, {"vllm_xargs": {"a": 1, "b": ["x"]}}),
        ({"custom_params": {}}, {}),
        ({"watermark": False}, {}),
        ({"bad_words": ["x"], "allowed_token_ids": [1]}, {"bad_words": ["x"], "allowed_token_ids": [1]}),
    ],
    ids=str,
)
def test_a_parameter_is_translated(given: dict[str, Any], sent: dict[str, Any]) -> None:
    assert translated(given) == {**DEFAULTS, **sent}


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"stop_regex": "a+"}, "stop_regex"),
        ({"beam_width": 2}, "beam_width"),
        ({"regex": "a", "ebnf": "b"}, "regex"),
        ({"regex": "a", "structured_outputs": {}}, "structured_outputs"),
        ({"logit_bias": {"3": 1000.0}}, "logit_bias"),
        ({"custom_params": {"a": {"b": 1}}}, "custom_params"),
        ({"custom_params": "x"}, "custom_params"),
        ({"watermark": {"key": 1}}, "watermark"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"nonsense": 3}, "nonsense"),
        *(({name: 1}, name) for name in sorted(NAMES) if name.startswith(("stop_str", "stop_regex_", "is_", "ebnf_"))),
    ],
    ids=str,
)
def test_what_vllm_cannot_do_is_refused_by_name(given: dict[str, Any], name: str) -> None:
    with pytest.raises(BadRequestError, match=f"`{name}`"):
        translated(given)


@pytest.mark.parametrize(("name", "meant"), [("max_tokens", "max_new_tokens"), ("temprature", "temperature")])
def test_a_misspelt_parameter_is_told_with_the_one_that_is_meant(name: str, meant: str) -> None:
    with pytest.raises(BadRequestError, match=f"has no `{name}`: did you mean `{meant}`"):
        translated({name: 3})
