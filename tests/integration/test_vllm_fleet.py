"""A fleet of vLLM workers: calls to all of them, aborts, versions, and what a worker was started without.

The workers are embedded ones with vLLM's routes; `test_both_vllm.py` compares these with a real vLLM.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from router.config import AbortConfig
from tests.support.asking import Asking, settle, until
from tests.support.stack import Reply, Stack, stack

NO_RETRY = AbortConfig(policy="return", attempts=1, wait=0)


@pytest.fixture(scope="module")
def started() -> Iterator[Stack]:
    with stack("qwen", styles=("cumulative",) * 2, abort=NO_RETRY, interface="vllm", weight_transfer=True) as served:
        yield served


@pytest.fixture
def served(started: Stack) -> Iterator[Stack]:
    """Two workers in the mode for developers. At the end nothing is in flight."""
    assert started.post("/update_weight_version", {"new_version": "1"}).status == 200
    yield started
    settle(started)


@pytest.fixture(scope="module")
def plain() -> Iterator[Stack]:
    """One worker that was started without the mode for developers, and without the scale-out interface."""
    with stack(
        "qwen", styles=("cumulative",), abort=NO_RETRY, interface="vllm", scale_out=False, dev_mode=False
    ) as served:
        yield served


def say(served: Stack, space: str, text: str = "A:", tokens: int = 3, **body: Any) -> Reply:
    body = {"text": text, "sampling_params": {"max_new_tokens": tokens}, **body}
    return served.generate(body, headers={"x-radix-namespace": space})


def begin(served: Stack, asks: list[Asking], space: str, text: str = "A:", tokens: int = 50, **more: Any) -> Asking:
    body = {"text": text, "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True}, **more}
    asks.append(Asking(served.url, body, headers={"x-radix-namespace": space}))
    return asks[-1]


def told(served: Stack, path: str) -> list[Any]:
    """The bodies with which each worker was called, in order."""
    return [[call.body for call in worker.calls if call.path == path] for worker in served.workers]


def current(served: Stack) -> Any:
    return served.get("/radix_tree/stats").json()["weight_version"]


def per_token(found: Any) -> list[str]:
    return [span["version"] for span in found["weight_versions"] for _ in range(span["start"], span["end"])]


CALLS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("/pause_generation", {"mode": "in_place"}, ["/pause"]),
    ("/pause_generation", {"mode": "retract"}, ["/pause", "/reset_prefix_cache"]),
    ("/continue_generation", {}, ["/resume"]),
    ("/flush_cache", {}, ["/reset_prefix_cache"]),
    ("/update_weight_version", {"new_version": "2"}, ["/abort_requests", "/update_weight_version"]),
    ("/update_weight_version", {"new_version": "3", "abort_all_requests": False}, ["/update_weight_version"]),
    (
        "/update_weights_from_disk",
        {"model_path": "x", "weight_version": "4"},
        ["/collective_rpc", "/update_weight_version", "/reset_prefix_cache"],
    ),
    ("/abort_request", {"abort_all": True}, ["/abort_requests"]),
    ("/release_memory_occupation", {}, ["/sleep"]),
    ("/resume_memory_occupation", {}, ["/wake_up"]),
]


@pytest.mark.parametrize(("path", "body", "calls"), CALLS, ids=lambda value: value if isinstance(value, str) else None)
def test_a_call_of_the_house_reaches_every_worker_in_vllms_words(
    served: Stack, path: str, body: dict[str, Any], calls: list[str]
) -> None:
    before = [len(worker.calls) for worker in served.workers]
    answer = served.post(path, body)
    assert answer.status == 200, answer.content
    assert answer.json()["success"] is True
    for worker, start in zip(served.workers, before, strict=True):
        assert [call.path for call in worker.calls[start:] if call.path not in ("/ping", "/weight_info")] == calls
    assert served.post("/continue_generation", {}).status == 200


@pytest.mark.parametrize(
    ("path", "version"),
    [
        ("/pause?mode=keep", None),
        ("/resume", None),
        ("/reset_prefix_cache", None),
        ("/abort_requests", None),
        ("/init_weight_transfer_engine", None),
        ("/start_weight_update", None),
        ("/update_weights", None),
        ("/finish_weight_update", "9"),
        ("/collective_rpc", None),
        ("/sleep", None),
        ("/wake_up", None),
    ],
)
def test_vllms_own_calls_reach_every_worker_too(served: Stack, path: str, version: str | None) -> None:
    if path in ("/update_weights", "/finish_weight_update"):
        assert served.post("/start_weight_update", {}).status == 200
    body: dict[str, Any] = {"weight_version": version} if version else {"method": "x", "update_info": {}}
    answer = served.post(path, {} if path == "/abort_requests" else body)
    assert answer.status == 200, answer.content
    assert [one["status"] for one in answer.json()["workers"]] == [200, 200]
    assert current(served) == (version or "1")
    assert served.post("/resume", {}).status == 200


def test_an_update_by_vllms_own_calls_is_seen_token_by_token(served: Stack, asks: list[Asking], space: str) -> None:
    for worker in served.workers:
        worker.hold(after=3)
    asking = begin(served, asks, space, tokens=6)
    until(lambda: any(job.waiting for worker in served.workers for job in worker.jobs.values()))
    for path, body in (
        ("/pause?mode=keep", {}),
        ("/start_weight_update", {}),
        ("/update_weights", {"update_info": {}}),
        ("/finish_weight_update", {"weight_version": "2"}),
        ("/resume", {}),
    ):
        assert served.post(path, body).status == 200
    for worker in served.workers:
        worker.release()
    reply = asking.answer().json()
    found = served.retrieve("A:" + reply["text"], namespace=space)
    assert per_token(found) == ["1"] * 3 + ["2"] * 3
    assert found["exact"] is True
    assert current(served) == "2"


def test_a_named_abort_ends_one_generation_and_what_was_sampled_is_kept(
    served: Stack, asks: list[Asking], space: str
) -> None:
    for worker in served.workers:
        worker.hold(after=2)
    one, other = (begin(served, asks, space, f"{name}:", rid=f"{name}-{space}") for name in "ab")
    until(lambda: sum(job.waiting for worker in served.workers for job in worker.jobs.values()) == 2)
    assert served.post("/abort_request", {"rid": f"a-{space}"}).status == 200
    ended = one.answer().json()
    assert ended["meta_info"]["finish_reason"]["type"] == "abort"
    assert ended["meta_info"]["id"] == f"a-{space}"
    assert len(ended["output_ids"]) == 2
    assert sum(worker.in_flight for worker in served.workers) == 1
    assert served.retrieve("a:" + ended["text"], namespace=space, request_id=f"a-{space}")["exact"] is True
    for worker in served.workers:
        worker.release()
    assert len(other.answer().json()["output_ids"]) == 50


def test_an_end_of_all_ends_what_waits_for_the_end_of_a_pause_too(
    served: Stack, asks: list[Asking], space: str
) -> None:
    assert served.post("/pause_generation", {"mode": "in_place"}).status == 200
    asking = begin(served, asks, space)
    until(lambda: any(worker.in_flight for worker in served.workers))
    assert served.post("/abort_request", {"abort_all": True}).status == 200
    assert asking.answer().json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert served.post("/continue_generation", {}).status == 200


def test_a_client_that_leaves_frees_its_worker(served: Stack, asks: list[Asking], space: str) -> None:
    for worker in served.workers:
        worker.hold(after=1)
    asking = begin(served, asks, space)
    until(lambda: any(job.waiting for worker in served.workers for job in worker.jobs.values()))
    asking.close()
    until(lambda: not any(worker.in_flight for worker in served.workers))
    until(lambda: any(told(served, "/inference/v1/abort_requests")))
    for worker in served.workers:
        worker.release()


def test_a_model_is_described_in_the_words_of_the_house(served: Stack) -> None:
    info = served.get("/get_model_info").json()
    assert info["model_path"] == served.workers[0].tokenizer_path
    assert info["weight_version"] == "1"
    assert info["context_length"] == 32768


@pytest.mark.parametrize("path", ["/load_lora_adapter", "/unload_lora_adapter"])
def test_an_adapter_for_workers_that_take_none_is_refused_with_what_they_lack(served: Stack, path: str) -> None:
    answer = served.post(path, {"lora_name": "x", "lora_path": "y"})
    assert answer.status == 501
    assert "--enable-lora" in answer.json()["workers"][0]["body"]["error"]["message"]


def test_what_vllm_has_not_is_refused_by_name(served: Stack) -> None:
    answer = served.post("/update_weights_from_tensor", {"serialized_named_tensors": []})
    assert answer.status == 501
    assert "/start_weight_update" in answer.json()["workers"][0]["body"]["error"]["message"]
    assert served.post("/pause_generation", {"mode": "nap"}).status == 400
    assert served.post("/release_memory_occupation", {"tags": ["weights"]}).status == 400


class TestWithoutTheModeForDevelopers:
    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/pause_generation", {"mode": "in_place"}),
            ("/abort_request", {"abort_all": True}),
            ("/flush_cache", {}),
            ("/update_weight_version", {"new_version": "2"}),
            ("/update_weights_from_disk", {"model_path": "x"}),
            ("/pause?mode=keep", {}),
            ("/start_weight_update", {}),
            ("/finish_weight_update", {"weight_version": "2"}),
        ],
    )
    def test_the_answer_names_what_is_missing(self, plain: Stack, path: str, body: dict[str, Any]) -> None:
        answer = plain.post(path, body)
        assert answer.status == 501, answer.content
        told = answer.json()
        for said in told["workers"][0]["body"]["error"]["message"], told["message"]:
            assert "VLLM_SERVER_DEV_MODE=1" in said

    def test_the_version_is_what_a_call_through_the_router_said(self, plain: Stack, space: str) -> None:
        version = uuid.uuid4().hex
        body = {"new_version": version, "abort_all_requests": False}
        assert plain.post("/update_weight_version", body).status == 200
        reply = say(plain, space)
        assert set(per_token(plain.retrieve("A:" + reply.body["text"], namespace=space))) == {version}

    def test_a_client_that_leaves_still_frees_its_worker(self, plain: Stack, asks: list[Asking], space: str) -> None:
        """By its connection: there is no call for it."""
        (worker,) = plain.workers
        worker.hold(after=1)
        asking = begin(plain, asks, space)
        worker.wait_for_arrivals(1)
        asking.close()
        worker.wait_until_idle()
        worker.release()
