"""Clients of OpenAI and Anthropic in front of vLLM workers: what is recorded, vLLM's own fields, and workers that fail."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import anthropic
import openai
import pytest

from tests.support import templates
from tests.support.asking import settle
from tests.support.client import call
from tests.support.stack import Stack, stack
from worker.worker import EmbeddedWorker

TEMPLATE = {"chat_template": str(templates.folder() / "qwen2_5.jinja")}


@contextlib.contextmanager
def vllm(count: int = 1, **more: Any) -> Iterator[Stack]:
    with stack("qwen", styles=("cumulative",) * count, sessions=TEMPLATE, interface="vllm", **more) as served:
        yield served


@pytest.fixture(scope="module")
def started() -> Iterator[Stack]:
    with vllm() as served:
        yield served


@pytest.fixture
def served(started: Stack) -> Iterator[Stack]:
    yield started
    settle(started)


@pytest.fixture
def worker(served: Stack) -> EmbeddedWorker:
    (found,) = served.workers
    return found


def root(served: Stack) -> str:
    return f"{served.url}/sessions/{served.post('/sessions', {}).json()['session_id']}"


def chain(root: str) -> list[int]:
    (found,) = call(f"{root}/trajectories").json()["trajectories"]
    assert found["exact"], found["reasons"]
    return [*found["prompt_ids"], *found["response_ids"]]


@pytest.mark.parametrize("stream", [False, True])
def test_openais_client_in_a_session_keeps_every_id(served: Stack, worker: EmbeddedWorker, stream: bool) -> None:
    base = root(served)
    client = openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)
    messages: list[Any] = [{"role": "user", "content": "Hello"}]
    known: list[int] = []
    for number in range(4):
        if stream:
            chunks = list(client.chat.completions.create(model="m", messages=messages, max_tokens=12, stream=True))
            content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        else:
            reply = client.chat.completions.create(model="m", messages=messages, max_tokens=12)
            content = reply.choices[0].message.content or ""
        record = worker.log[-1]
        assert record.input_ids[: len(known)] == known
        known = chain(base)
        assert known == record.input_ids + record.output_ids
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": f"And {number}?"}]


@pytest.mark.parametrize("scale_out", [False, True])
def test_a_chat_without_a_limit_may_fill_the_context(scale_out: bool) -> None:
    """`/v1/completions` takes a null for 16 tokens; alternatives of tokens are asked for there only."""
    with vllm(scale_out=scale_out, context_length=100) as served:
        (worker,) = served.workers
        for more in ({}, {"stream": True}, {"logprobs": True, "top_logprobs": 2}):
            worker.script(ids=range(1000, 1500), finish="length")
            body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], **more}
            assert served.post(f"{urlsplit(root(served)).path}/v1/chat/completions", body).status == 200
            record = worker.log[-1]
            assert len(record.input_ids) + len(record.output_ids) == 100
            worker.forget_scripts()


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_client_in_a_session_keeps_every_id(served: Stack, worker: EmbeddedWorker, stream: bool) -> None:
    base = root(served)
    client = anthropic.Anthropic(base_url=base, api_key="none", max_retries=0)
    messages: list[Any] = [{"role": "user", "content": "Hello"}]
    known: list[int] = []
    for number in range(3):
        if stream:
            with client.messages.stream(model="m", messages=messages, max_tokens=12) as events:
                content: Any = events.get_final_message().content
        else:
            content = client.messages.create(model="m", messages=messages, max_tokens=12).content
        record = worker.log[-1]
        assert record.input_ids[: len(known)] == known
        known = chain(base)
        assert known == record.input_ids + record.output_ids
        text = "".join(block.text for block in content)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"And {number}?"}]


def test_a_completion_is_recorded(served: Stack, worker: EmbeddedWorker, space: str) -> None:
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    headers = {"x-radix-namespace": space}
    reply = client.completions.create(model="m", prompt="Once", max_tokens=9, logprobs=1, extra_headers=headers)
    found = served.retrieve("Once" + reply.choices[0].text, namespace=space)
    record = worker.log[-1]
    assert found["tokens"] == record.input_ids + record.output_ids
    assert found["exact"] is True


OWN = {
    "allowed_token_ids": ([5, 6, 7], "allowed_token_ids"),
    "bad_words": (["no"], "bad_words"),
    "structured_outputs": ({"regex": "a+"}, "structured_outputs"),
    "vllm_xargs": ({"a": 1}, "extra_args"),
    "min_tokens": (2, "min_tokens"),
    "repetition_penalty": (1.5, "repetition_penalty"),
    "thinking_token_budget": (5, "thinking_token_budget"),
}
TURN: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hello"}]},
}


@pytest.mark.parametrize("path", TURN)
@pytest.mark.parametrize("name", OWN)
def test_vllms_own_fields_reach_the_worker(served: Stack, worker: EmbeddedWorker, path: str, name: str) -> None:
    value, there = OWN[name]
    answer = served.post(path, {"model": "m", "max_tokens": 4, **TURN[path], name: value})
    assert answer.status == 200, answer.content
    assert worker.log[-1].body["sampling_params"][there] == value


def test_the_stop_string_is_included_by_vllms_name_for_it(served: Stack, worker: EmbeddedWorker) -> None:
    worker.script(text="one two three")
    body = {"model": "m", "prompt": "Hello", "max_tokens": 9, "stop": " two", "include_stop_str_in_output": True}
    answer = served.post("/v1/completions", body)
    assert answer.json()["choices"][0]["text"] == "one two"


@pytest.mark.parametrize("path", TURN)
@pytest.mark.parametrize(
    ("name", "value"), [("use_beam_search", True), ("truncate_prompt_tokens", 5), ("prompt_logprobs", 1)]
)
def test_what_of_vllms_cannot_be_had_is_refused_by_name(served: Stack, path: str, name: str, value: Any) -> None:
    answer = served.post(path, {"model": "m", "max_tokens": 4, **TURN[path], name: value})
    assert answer.status == 400
    assert f"`{name}`" in answer.content.decode()


def test_an_sglang_worker_refuses_vllms_own_fields_by_name() -> None:
    with stack("qwen", styles=("cumulative",), sessions=TEMPLATE) as served:
        answer = served.post("/v1/completions", {"model": "m", "prompt": "Hello", "allowed_token_ids": [5]})
        assert answer.status == 400
        assert "`allowed_token_ids`" in answer.content.decode()


def test_a_context_that_is_too_long_has_openais_code(served: Stack) -> None:
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "word " * 40_000}])
    assert caught.value.code == "context_length_exceeded"


def test_a_worker_that_is_killed_loses_no_request() -> None:
    """Its requests go to the other worker, and are recorded once."""
    with vllm(2) as served:
        one, other = served.workers
        space = uuid.uuid4().hex
        for number in range(4):
            if number == 1:
                one.kill()
            body = {"text": f"{number}:", "sampling_params": {"max_new_tokens": 3}}
            answer = served.post("/generate", body, headers={"x-radix-namespace": space})
            assert answer.status == 200, answer.content
            assert served.retrieve(f"{number}:" + answer.json()["text"], namespace=space)["exact"]
        assert len(other.log) >= 3


def test_a_worker_that_hangs_does_not_hang_a_call_to_all() -> None:
    with vllm(2, workers={"fleet_timeout": 1.0}) as served:
        one, other = served.workers
        with one.hanging():
            answer = served.post("/pause_generation", {"mode": "in_place"})
            assert answer.status == 207
            assert {said["url"]: said["status"] for said in answer.json()["workers"]} == {one.url: None, other.url: 200}
        assert served.post("/continue_generation", {}).status == 200
