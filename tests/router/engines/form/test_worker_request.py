"""What a worker is sent is parsed once and printed once, whoever made it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from router.engines.form.request import GenerateRequest
from router.engines.form.worker_request import WorkerRequest

BODIES: list[dict[str, Any]] = [
    {"text": "a"},
    {"text": "a", "rid": "mine", "stream": True},
    {"text": "a", "rid": None, "sampling_params": {"n": 2}},
    {"text": ["a", "b"], "rid": "mine"},
    {"text": ["a", "b"], "rid": ["one", "two"], "sampling_params": [{"n": 1}, {}]},
    {"text": ["a", "b"], "rid": ["one", "one"]},
    {"text": ["a"], "sampling_params": [{"n": 3}]},
]


@pytest.mark.parametrize("body", BODIES)
def test_a_checked_request_is_what_parsing_its_body_gives(body: dict[str, Any]) -> None:
    """So a layer in between may write a body of its own, and the layers inside understand as much of it."""
    parsed = GenerateRequest.parse(msgspec.json.encode(body))
    printed, request = parsed.for_worker([[1, 2]] * parsed.prompts, force_logprobs=True)
    assert request is not None
    assert printed is request.body is request.body
    again = WorkerRequest.parse(printed)
    assert again is not None
    for name in ("prompts", "batch", "samples", "stream", "rids", "listed", "replies"):
        assert getattr(again, name) == getattr(request, name), name
    assert request.named is (body.get("rid") is not None)
    assert again.body == printed


@pytest.mark.parametrize("body", BODIES)
def test_ids_that_are_printed_already_are_sent_as_they_are(body: dict[str, Any]) -> None:
    parsed = GenerateRequest.parse(msgspec.json.encode({**body, "rid": None}))
    printed, request = parsed.for_worker([msgspec.Raw(b"[ 7,   1]")] * parsed.prompts, force_logprobs=True)
    assert request is not None
    assert printed.count(b"[ 7,   1]") == parsed.prompts
    assert msgspec.json.decode(printed)["input_ids"] == ([[7, 1]] * parsed.prompts if parsed.batch else [7, 1])


def test_ids_that_only_a_worker_can_judge_are_sent_as_they_are() -> None:
    parsed = GenerateRequest.parse(b'{"text": ["a", "b"], "rid": ["one", null]}')
    printed, request = parsed.for_worker([[1], [2]], force_logprobs=False)
    assert request is None
    assert WorkerRequest.parse(printed) is None
    assert msgspec.json.decode(printed) == {"input_ids": [[1], [2]], "rid": ["one", None]}


@pytest.mark.parametrize("samples", [-1, -(2**40)])
def test_a_negative_number_of_samples_is_for_the_worker_to_judge(samples: int) -> None:
    """Counted here, a negative number of replies would be an error of the router's own."""
    body = msgspec.json.encode({"text": "a", "sampling_params": {"n": samples}})
    assert WorkerRequest.parse(body) is None


def test_ids_of_the_router_stay_its_own_through_another_layer() -> None:
    """A request that a layer outside made, under an id of its own, is named by no client."""
    outer = WorkerRequest({"text": msgspec.Raw(b'"a"')}, rids=("made-up",), named=False)
    parsed = GenerateRequest.parse(outer.body)
    for by, named in ((None, True), (outer, False)):
        _, request = parsed.for_worker([[1]], by, force_logprobs=False)
        assert request is not None
        assert (request.rids, request.named) == (("made-up",), named)
