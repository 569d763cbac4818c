"""How a vLLM worker is recognised, and which ones are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.engines.engine import EngineAnswer
from router.engines.vllm.engine import Vllm
from router.engines.vllm.requests import CONTEXT, SCALE_OUT

MODELS = {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "vllm", "max_model_len": 2048}]}


@pytest.mark.parametrize("description", [MODELS, {"version": "0.32.0"}, {"vllm_config": "..."}])
def test_vllm_is_recognised(description: Any) -> None:
    assert Vllm().recognises(json.dumps(description).encode())


@pytest.mark.parametrize(
    "description",
    [
        {"data": [{"id": "m", "owned_by": "sglang"}]},
        {"version": "0.5.23", "model_path": "m", "weight_version": "default"},
        {"version": 3},
        {"data": 3},
        [],
        None,
    ],
)
def test_others_are_not(description: Any) -> None:
    assert not Vllm().recognises(json.dumps(description).encode())


def introduced(**changes: tuple[int, bytes]) -> Any:
    answers = {
        "/version": EngineAnswer(200, b'{"version":"0.32.0"}'),
        "/v1/completions": EngineAnswer(400, b"{}"),
        "/inference/v1/generate": EngineAnswer(400, b"{'loc': ('body', 'output_mode')}"),
        "/tokenize": EngineAnswer(200, b"{}"),
        "/weight_info": EngineAnswer(404, b"{}"),
    }
    paths = {"version": "/version", "cmpl": "/v1/completions", "generate": "/inference/v1/generate", "tok": "/tokenize"}
    answers |= {paths[name]: EngineAnswer(*answer) for name, answer in changes.items()}
    assert answers.keys() == {question.path for question in Vllm.questions}
    return Vllm().introduction(answers)


def test_both_doors_are_open() -> None:
    found = introduced()
    assert (found.refusal, found.abilities) == (None, {SCALE_OUT})


def test_the_length_of_the_context_is_known_from_a_worker_that_tokenizes() -> None:
    found = introduced(tok=(200, b'{"count":1,"max_model_len":2048,"tokens":[7]}'))
    assert (found.refusal, found.abilities) == (None, {SCALE_OUT, f"{CONTEXT}2048"})


@pytest.mark.parametrize("answer", [(401, b"{}"), (403, b"{}"), (404, b"{}"), (400, b"an empty prompt"), (500, b"{}")])
def test_the_newer_door_may_be_closed_or_give_ids_without_text(answer: tuple[int, bytes]) -> None:
    """Before it could return text, a vLLM ignored `output_mode`: what it says is about the rest."""
    found = introduced(generate=answer)
    assert (found.refusal, found.abilities) == (None, frozenset())


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"version": (200, b'{"version":"0.10.2"}')}, "update vLLM"),
        ({"version": (200, b'{"version":"0.6.3.post1"}')}, "update vLLM"),
        ({"cmpl": (404, b"{}")}, "--tokens-only"),
        ({"cmpl": (200, b'{"version": "1"}')}, 'with 200 ({"version": "1"}); give the URL of a worker'),
        ({"tok": (400, b"{}")}, "--skip-tokenizer-init"),
        ({"tok": (500, b"")}, "--skip-tokenizer-init"),
    ],
)
def test_a_worker_that_lacks_something_is_told_what_to_do(changes: Any, advice: str) -> None:
    assert advice in introduced(**changes).refusal


@pytest.mark.parametrize("version", ["0.11.0", "0.32.0+cpu", "1.0.0", "0.0.0.dev1", "dev"])
def test_other_versions_are_taken(version: str) -> None:
    assert introduced(version=(200, json.dumps({"version": version}).encode())).refusal is None


def test_a_key_is_no_lack() -> None:
    assert introduced(cmpl=(401, b"{}"), generate=(401, b"{}"), tok=(401, b"{}")).refusal is None
