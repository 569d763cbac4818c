"""The id of a reply with several choices names none of them: where one sample is meant it is refused, with what to use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from middleware_hub.client import Client, RefusedError
from tests.support.chat_models import chat_model
from tests.support.client import Answer
from tests.support.stack import Stack, events, stack
from tests.support.usual import usual

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Which?"}], "max_tokens": 6}


@pytest.fixture(params=usual(["qwen3", "qwen3_5_think", "gptoss", "glm4moe"], "qwen3"), scope="module")
def served(request: pytest.FixtureRequest) -> Iterator[Stack]:
    with stack("qwen", styles=("cumulative",), folder=chat_model(request.param)) as made:
        yield made


def asked(served: Stack, path: str, body: dict[str, Any], *, stream: bool, **headers: str) -> tuple[str, list[str]]:
    """Return the id of a reply, and those of its choices."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = served.post(path, {**body, "stream": stream}, headers=sent)
    assert answer.status == 200, answer.content
    pieces = events(answer) if stream else [answer.json()]
    names = {
        choice["index"]: choice["meta_info"]["generation_id"]
        for piece in pieces
        for choice in piece["choices"]
        if "meta_info" in choice
    }
    (name,) = {piece["id"] for piece in pieces}
    return name, [names[index] for index in sorted(names)]


def refused(answer: Answer, name: str) -> None:
    assert answer.status == 400, answer.content
    message = answer.json()["error"]["message"]
    assert name in message
    assert "choices[i].meta_info.generation_id" in message


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("bare", [False, True])
def test_a_reply_of_a_session_with_several_choices(served: Stack, stream: bool, bare: bool) -> None:
    made = served.post("/sessions", {}).json()["session_id"]
    place = f"/sessions/{made}"
    name, names = asked(served, place + CHAT, {**ASK, "n": 2}, stream=stream)
    name = name.removeprefix("chatcmpl-") if bare else name
    assert len(names) == 2
    assert not {name, name.removeprefix("chatcmpl-")} & set(names)
    reward = {"reward_info": {"score": 1}}
    refused(served.post(f"{place}/reward_info", {**reward, "branch": name}), name)
    for header in ("x-parent-generation", "x-radix-parent"):
        refused(served.post(place + CHAT, ASK, headers={header: name}), name)
    refused(served.get(f"{place}/trajectories?expect_request_ids={name}"), name)
    refused(served.post(f"{place}/finalize", {"expect_request_ids": [name]}), name)
    assert served.get(place).json()["phase"] == "active", "nothing was closed"
    for number, one in enumerate(names):
        assert served.post(f"{place}/reward_info", {"reward_info": {"score": number}, "branch": one}).status == 200
    found = served.post(f"{place}/finalize", {"expect_request_ids": names}).json()
    assert found["missing"] == []
    scores = {one["branch"]: one["reward_info"]["score"] for one in found["trajectories"]}
    assert scores == {one: number for number, one in enumerate(names)}


@pytest.mark.parametrize("path", ["responses", "messages"])
def test_the_other_dialects_of_a_session_refuse_it_as_a_parent(served: Stack, path: str) -> None:
    place = f"/sessions/{served.post('/sessions', {}).json()['session_id']}"
    name, _ = asked(served, place + CHAT, {**ASK, "n": 2}, stream=False)
    body = {"input": "Which?"} if path == "responses" else {"messages": ASK["messages"], "max_tokens": 6}
    refused(served.post(f"{place}/v1/{path}", body, headers={"x-parent-generation": name}), name)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {**ASK, "n": 2}),
        ("/v1/completions", {"prompt": "Which?", "max_tokens": 6, "n": 2}),
        ("/v1/completions", {"prompt": ["Which?", "Why?"], "max_tokens": 6}),
    ],
    ids=["chat", "completion", "batch"],
)
def test_a_reply_without_a_session(served: Stack, path: str, body: dict[str, Any], stream: bool) -> None:
    group = {"x_group_id": f"g-{path}-{len(str(body))}-{stream}", "x_group_size": "2"}
    name, names = asked(served, path, body, stream=stream, **group)
    text = {"text": "Which?"}
    refused(served.post("/retrieve_from_text", {**text, "expect_request_ids": [name]}), name)
    refused(served.post("/retrieve_from_text", {**text, "request_id": name}), name)
    refused(served.post("/retrieve_from_text", {"text": ["a"], "expect_request_ids": [[name]]}), name)
    refused(served.post("/trajectories/reward", {"request_id": name, "reward": 1}), name)
    parent = {"x-radix-parent": name}
    refused(served.post("/generate", text, headers=parent), name)
    refused(served.post("/generate", {"text": ["a", "b"]}, headers={"x-radix-parent": f"{names[0]},{name}"}), name)
    refused(served.post("/v1/completions", {"prompt": "Which?"}, headers=parent), name)
    refused(served.post(CHAT, ASK, headers=parent), name)
    for one in names:
        assert served.post("/trajectories/reward", {"request_id": one, "reward": 1}).status == 200
    with Client(served.url) as client, pytest.raises(RefusedError, match="generation_id"):
        client.reward(name, 1.0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_the_id_of_a_reply_with_one_choice_names_it_as_before(served: Stack, path: str, stream: bool) -> None:
    body = ASK if path == CHAT else {"prompt": "Which?", "max_tokens": 6}
    for more in ({}, {"n": 1}):
        name, (own,) = asked(served, path, {**body, **more}, stream=stream)
        assert name in (f"chatcmpl-{own}", f"cmpl-{own}")


def test_an_sdk_has_the_ids_of_choices(served: Stack) -> None:
    made = served.post("/sessions", {}).json()
    client = openai.OpenAI(base_url=served.url + f"/sessions/{made['session_id']}/v1", api_key="none")
    messages: Any = ASK["messages"]
    reply = client.chat.completions.create(model="m", messages=messages, n=2, max_tokens=6)
    for number, choice in enumerate(reply.choices):
        info: Any = choice.model_extra
        body = {"reward_info": {"score": number}, "branch": info["meta_info"]["generation_id"]}
        assert served.post(f"/sessions/{made['session_id']}/reward_info", body).status == 200
    with pytest.raises(openai.BadRequestError, match="generation_id"):
        client.chat.completions.create(model="m", messages=messages, extra_headers={"x-parent-generation": reply.id})


def test_the_names_of_a_batchs_replies_begin_with_its_id(served: Stack) -> None:
    """Without `cmpl-` it is what /abort_request takes, for all of them."""
    worker = served.workers[0]
    name, _ = asked(served, "/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2}, stream=False)
    sent = [one.rid for one in worker.log[-2:]]
    assert all(one.startswith(name.removeprefix("cmpl-")) for one in sent)


def test_another_router_refuses_it_too(tmp_path: Path) -> None:
    """It has never seen the reply: the form of the id is enough."""
    with stack("qwen", styles=("cumulative",)) as one, stack("qwen", styles=("cumulative",)) as other:
        name, _ = asked(one, "/v1/completions", {"prompt": "Which?", "max_tokens": 2, "n": 2}, stream=False)
        refused(other.post("/retrieve_from_text", {"text": "Which?", "expect_request_ids": [name]}), name)
