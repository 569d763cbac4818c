"""`--ban-placeholders`: the model cannot sample the placeholder of an image, whatever a client does to make it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.pictures import data_url, picture
from tests.support.stack import Stack, stack
from worker.models.ngram import shipped_image_tokenizer

Json = dict[str, Any]
FOLDER = shipped_image_tokenizer()
PAD, LETTER = 4097, 104
CAT = picture(40, 30, 91)
BIAS = {str(PAD): 100, str(LETTER): 60}
"""The model samples placeholders, or else this letter."""


@pytest.fixture(scope="module", params=["sglang", "vllm"])
def interface(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def banning(interface: str) -> Iterator[Stack]:
    media = {"ban_placeholders": True}
    with stack("qwen", styles=("cumulative",), folder=FOLDER, interface=interface, media=media) as made:
        yield made


@pytest.fixture(scope="module")
def free(interface: str) -> Iterator[Stack]:
    with stack("qwen", styles=("cumulative",), folder=FOLDER, interface=interface) as made:
        yield made


PARAMS: Json = {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True, "logit_bias": BIAS}
CHAT: Json = {"messages": [{"role": "user", "content": "Go"}], "max_tokens": 3, "temperature": 0, "logit_bias": BIAS}
REQUESTS: dict[str, tuple[str, Json]] = {
    "text": ("/generate", {"text": "Go:", "sampling_params": PARAMS}),
    "stream": ("/generate", {"text": "Go:", "sampling_params": PARAMS, "stream": True}),
    "ids": ("/generate", {"input_ids": [5, 6], "sampling_params": PARAMS}),
    "an image": (
        "/generate",
        {"text": "Go: <|image_pad|>", "image_data": data_url(CAT), "sampling_params": PARAMS},
    ),
    "respelled": ("/generate", {"text": "Go:", "sampling_params": PARAMS | {"n": None, "top_k": 0}}),
    "a batch": ("/generate", {"text": ["Go:", "On:"], "sampling_params": [PARAMS, PARAMS]}),
    "samples": ("/generate", {"text": "Go:", "sampling_params": PARAMS | {"n": 2, "temperature": 1}}),
    "a chat": ("/v1/chat/completions", CHAT),
    "a session": ("session", CHAT),
    "completions": ("/v1/completions", {"prompt": "Go", "max_tokens": 3, "temperature": 0, "logit_bias": BIAS}),
}


def sampled(served: Stack, name: str) -> list[list[int]]:
    path, body = REQUESTS[name]
    if path == "session":
        path = f"/sessions/{served.post('/sessions', {}).json()['session_id']}/v1/chat/completions"
    before = len(served.workers[0].log)
    answer = served.post(path, body)
    assert answer.status == 200, answer.content
    return [record.output_ids for record in served.workers[0].log[before:]]


@pytest.mark.parametrize("name", REQUESTS)
def test_no_placeholder_is_sampled(banning: Stack, name: str) -> None:
    """The client's other biases stay."""
    found = sampled(banning, name)
    assert found
    assert all(ids == [LETTER] * len(ids) and ids for ids in found)


@pytest.mark.parametrize("name", REQUESTS)
def test_off_by_default(free: Stack, name: str) -> None:
    assert all(PAD in ids for ids in sampled(free, name))


def test_requests_without_options_are_sampled(banning: Stack) -> None:
    for body in ({"text": "Go"}, {"text": "Go", "sampling_params": None}, {"text": ["Go"], "sampling_params": {}}):
        before = len(banning.workers[0].log)
        assert banning.post("/generate", body).status == 200
        (record,) = banning.workers[0].log[before:]
        assert PAD not in record.output_ids


def test_a_bias_that_is_none_is_refused(banning: Stack) -> None:
    answer = banning.post("/generate", {"text": "Go", "sampling_params": {"logit_bias": 7}})
    assert answer.status == 400
