"""Which replies a request asks for, and which requests a worker refuses."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.worker.talk import generate, request
from worker.worker import EmbeddedWorker


def test_replies_are_prompt_major_with_new_ids_for_n(worker: EmbeddedWorker) -> None:
    params = {"n": 2, "max_new_tokens": 2}
    replies = generate(worker, ["a", "b"], sampling_params=params, rid=["x", "y"])
    assert [record.input_ids for record in worker.log] == [worker.vocabulary.encode(text) for text in "aabb"]
    assert [reply["output_ids"] for reply in replies] == [record.output_ids for record in worker.log]
    assert not {reply["meta_info"]["id"] for reply in replies} & {"x", "y"}


def test_a_list_of_one_is_a_list(worker: EmbeddedWorker) -> None:
    (reply,) = generate(worker, ["a"], rid="x")
    assert reply["meta_info"]["id"] == "x_0"
    (reply,) = generate(worker, [[5, 6]], rid=["x"])
    assert reply["meta_info"]["id"] == "x"
    assert worker.log[1].input_ids == [5, 6]


def test_each_prompt_may_have_its_own_sampling_params(worker: EmbeddedWorker) -> None:
    replies = generate(worker, ["a", "b"], sampling_params=[{"max_new_tokens": 1}, {"max_new_tokens": 2}])
    assert [len(reply["output_ids"]) for reply in replies] == [1, 2]


def test_a_request_can_bring_its_own_script(worker: EmbeddedWorker) -> None:
    own = {"script": {"ids": [5, 6], "finish": "length", "logprobs": [-0.5, -0.25]}}
    reply = generate(worker, sampling_params={"custom_params": own}, return_logprob=True)
    assert reply["output_ids"] == [5, 6]
    assert [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]] == [-0.5, -0.25]


def test_the_script_of_a_request_may_be_a_text(worker: EmbeddedWorker) -> None:
    """It is encoded by the worker's own tokenizer, and ends as the model would end it."""
    reply = generate(worker, sampling_params={"custom_params": {"script": {"text": "I look.\n"}}})
    assert reply["text"] == "I look.\n"
    assert reply["output_ids"][:-1] == worker.vocabulary.encode_bare("I look.\n")
    assert reply["meta_info"]["finish_reason"]["type"] == "stop"


@pytest.mark.parametrize(
    ("body", "shape"),
    [
        ({}, "message"),
        ({"text": "a", "sampling_params": {"max_tokens": 3}}, "error"),
        ({"text": "a", "sampling_params": {"max_new_tokens": "a"}}, "error"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "message"),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "message"),
        ({"text": 5}, "object"),
        ({"input_ids": "abc"}, "object"),
        ({"input_ids": [1.5]}, "object"),
        ({"input_ids": [5] * 40000}, "message"),
        ({"input_ids": []}, "message"),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, "message"),
        ([1], "object"),
    ],
)
def test_each_refusal_has_its_shape(worker: EmbeddedWorker, body: Any, shape: str) -> None:
    status, content, _ = request(worker, "/generate", body)
    error = json.loads(content)
    assert status == 400
    found = "object" if "object" in error else "error" if isinstance(error["error"], str) else "message"
    assert found == shape
    assert worker.out_of_range == []


def test_content_type_and_json_are_required(worker: EmbeddedWorker) -> None:
    assert request(worker, "/generate", {"text": "a"}, kind="text/plain")[0] == 400
    assert request(worker, "/generate", raw=b"{nope")[0] == 400
    assert request(worker, "/generate", raw=b'{"text":' + b"[" * 5000 + b"]" * 5000 + b"}")[0] == 400
    assert json.loads(request(worker, "/nope", {})[1]) == {"detail": "Not Found"}


def test_a_request_id_in_use_is_refused(worker: EmbeddedWorker, pool: ThreadPoolExecutor) -> None:
    worker.hold()
    first = pool.submit(generate, worker, rid="r")
    worker.wait_for_arrivals(1)
    assert request(worker, "/generate", {"text": "a", "rid": "r"})[0] == 400
    worker.release()
    assert first.result(20)["meta_info"]["id"] == "r"


@pytest.mark.parametrize(
    "body",
    [
        {"text": ""},
        {"input_ids": [[]]},
        {"input_ids": [1, 10**7]},
        {"text": "a", "sampling_params": {"n": None}},
        {"text": ["a"], "input_ids": [5]},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_outside_of_the_valid_range_is_noted(
    worker: EmbeddedWorker, body: dict[str, Any], stream: bool
) -> None:
    """So a test sees that a router has sent it."""
    status, content, _ = request(worker, "/generate", {**body, "stream": stream})
    assert status == 400
    assert worker.out_of_range == [json.loads(content)["error"]]
    assert (worker.received, worker.log) == (1, [])
