"""Images in sessions and chats, in every dialect, on the whole product: one conversation is one sequence.

The oracle is the worker's own log: its ids, in which each picture is a run, and the digests of the pictures that it took.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from router.config import StoreConfig
from tests.support.pictures import data_url, digest, picture
from tests.support.stack import Stack, events, stack
from worker.models.ngram import shipped_image_tokenizer, shipped_tokenizer

Json = dict[str, Any]
FOLDER = shipped_image_tokenizer()
CAT, DOG, SUN = (picture(40, 30, seed) for seed in (1, 2, 3))
SAMPLING = {"max_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def product() -> Iterator[Stack]:
    with stack("qwen", styles=("cumulative",), folder=FOLDER) as made:
        yield made
        assert made.workers[0].out_of_range == []


def ok(product: Stack, path: str, body: Json, **headers: str) -> Json:
    answer = product.exchange("POST", path, body, headers)
    assert answer.status in (200, 201), answer.content
    found: Json = answer.json()
    return found


def error(product: Stack, path: str, body: Json) -> Json:
    before = len(product.workers[0].log)
    answer = product.exchange("POST", path, body)
    assert answer.status == 400, answer.content
    assert len(product.workers[0].log) == before, "it reached a worker"
    found: Json = answer.json()["error"]
    return found


def image(content: bytes) -> Json:
    return {"type": "image_url", "image_url": {"url": data_url(content)}}


def session(product: Stack) -> str:
    return str(ok(product, "/sessions", {})["session_id"])


def check_one_sequence(product: Stack, name: str, pictures: list[bytes], turns: int) -> Json:
    """The one trajectory is what the worker computed with last, with its pictures where their runs are."""
    (found,) = ok(product, f"/sessions/{name}/finalize", {})["trajectories"]
    record = product.workers[0].log[-1]
    ids = found["prompt_ids"] + found["response_ids"]
    assert ids == [*record.input_ids, *record.output_ids]
    assert found["exact"], found["reasons"]
    assert found["num_turns"] == turns
    shown = found["multi_modal_data"]["images"]
    assert [one["digest"] for one in shown] == [digest(one) for one in pictures] == list(record.images)
    mask = [0] * len(found["prompt_ids"]) + found["response_mask"]
    for one in shown:
        low, high = one["span"]
        assert set(ids[low:high]) == {4097}
        assert 4097 not in (ids[low - 1], ids[high])
        assert not any(mask[low:high])
        part = found["messages"][one["message"]]["content"][one["part"]]
        assert part == {"type": "image", "digest": one["digest"]}
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_with_a_picture_in_each_turn_is_one_sequence(product: Stack, stream: bool) -> None:
    name, messages, pictures = session(product), list[Json](), list[bytes]()
    for turn in range(5):
        new = (CAT, DOG, SUN)[turn % 3]
        pictures.append(new)
        messages.append({"role": "user", "content": [{"type": "text", "text": f"Look {turn}"}, image(new)]})
        body = {"messages": messages, "stream": stream, **SAMPLING}
        answer = product.exchange("POST", f"/sessions/{name}/v1/chat/completions", body)
        assert answer.status == 200, answer.content
        if stream:
            said = "".join(
                event["choices"][0]["delta"].get("content") or "" for event in events(answer) if event["choices"]
            )
            reply: Json = {"role": "assistant", "content": said}
        else:
            reply = answer.json()["choices"][0]["message"]
            assert answer.json()["usage"]["prompt_tokens"] == len(product.workers[0].log[-1].input_ids)
        messages.append(reply)
    check_one_sequence(product, name, pictures, 5)


def test_a_picture_that_is_known_may_be_named_by_its_digest(product: Stack) -> None:
    name = session(product)
    path = f"/sessions/{name}/v1/chat/completions"
    first = {"role": "user", "content": [image(CAT), {"type": "text", "text": "what?"}]}
    reply = ok(product, path, {"messages": [first], **SAMPLING})["choices"][0]["message"]
    named = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": digest(CAT)}}, first["content"][1]]}
    ok(product, path, {"messages": [named, reply, {"role": "user", "content": "and?"}], **SAMPLING})
    check_one_sequence(product, name, [CAT], 2)


def test_anthropic_messages_and_results_of_tools(product: Stack) -> None:
    """Pictures by base64, also in the result of a tool."""

    def block(content: bytes) -> Json:
        source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(content).decode()}
        return {"type": "image", "source": source}

    name = session(product)
    path = f"/sessions/{name}/v1/messages"
    tools = [{"name": "shoot", "description": "Take a picture", "input_schema": {"type": "object"}}]
    messages: list[Json] = [{"role": "user", "content": [block(CAT), {"type": "text", "text": "Go"}]}]
    said = ok(product, path, {"messages": messages, "tools": tools, **SAMPLING})
    messages += [{"role": "assistant", "content": said["content"]}, {"role": "user", "content": [block(DOG)]}]
    ok(product, path, {"messages": messages, "tools": tools, **SAMPLING})
    check_one_sequence(product, name, [CAT, DOG], 2)


def test_responses(product: Stack) -> None:
    name = session(product)
    path = f"/sessions/{name}/v1/responses"
    items: list[Json] = [
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "Look"}, {"type": "input_image", "image_url": data_url(CAT)}],
        }
    ]
    said = ok(product, path, {"input": items, "max_output_tokens": 6, "temperature": 0})
    items += said["output"]
    items.append({"role": "user", "content": [{"type": "input_image", "image_url": data_url(DOG)}]})
    ok(product, path, {"input": items, "max_output_tokens": 6, "temperature": 0})
    check_one_sequence(product, name, [CAT, DOG], 2)


def test_another_picture_in_an_earlier_message_forks_there(product: Stack) -> None:
    """Equal texts, another picture: nothing of the first conversation behind it is continued."""
    name = session(product)
    path = f"/sessions/{name}/v1/chat/completions"
    told: list[list[Json]] = []
    for first in (CAT, DOG):
        messages: list[Json] = [{"role": "user", "content": [{"type": "text", "text": "Look"}, image(first)]}]
        for _ in range(2):
            reply = ok(product, path, {"messages": messages, **SAMPLING})["choices"][0]["message"]
            messages += [reply, {"role": "user", "content": "More"}]
        told.append(messages)
    found = ok(product, f"/sessions/{name}/finalize", {})["trajectories"]
    assert [[one["digest"] for one in each["multi_modal_data"]["images"]] for each in found] == [
        [digest(CAT)],
        [digest(DOG)],
    ]
    by_ids = {(*one.input_ids, *one.output_ids): one.images for one in product.workers[0].log}
    for each, first in zip(found, (CAT, DOG), strict=True):
        assert by_ids[tuple(each["prompt_ids"] + each["response_ids"])] == (digest(first),)


def test_samples_of_one_prompt_share_their_context(product: Stack) -> None:
    name = session(product)
    body = {"messages": [{"role": "user", "content": [image(SUN)]}], "n": 4, "max_tokens": 5, "temperature": 1.0}
    ok(product, f"/sessions/{name}/v1/chat/completions", body)
    found = ok(product, f"/sessions/{name}/finalize", {})["trajectories"]
    logged = {(*one.input_ids, *one.output_ids) for one in product.workers[0].log[-4:]}
    assert {tuple(one["prompt_ids"] + one["response_ids"]) for one in found} <= logged
    assert len({tuple(one["prompt_ids"]) for one in found}) == 1


def test_a_chat_without_a_session_goes_on(product: Stack) -> None:
    messages: list[Json] = [{"role": "user", "content": [{"type": "text", "text": "Alone"}, image(CAT)]}]
    reply = ok(product, "/v1/chat/completions", {"messages": messages, **SAMPLING})["choices"][0]["message"]
    before = product.workers[0].log[-1]
    messages += [reply, {"role": "user", "content": [image(DOG)]}]
    ok(product, "/v1/chat/completions", {"messages": messages, **SAMPLING})
    after = product.workers[0].log[-1]
    known = [*before.input_ids, *before.output_ids]
    assert after.input_ids[: len(known)] == known
    assert list(after.images) == [digest(CAT), digest(DOG)]


def test_a_session_goes_on_after_a_restart(tmp_path: Path) -> None:
    """The store has the chain with its pictures' spans; their bytes come again with the client's messages."""
    config = StoreConfig(url=f"sqlite:{tmp_path}/store.sqlite3", spool=str(tmp_path / "spool"))
    messages: list[Json] = [{"role": "user", "content": [{"type": "text", "text": "Look"}, image(CAT)]}]
    with stack("qwen", styles=("cumulative",), folder=FOLDER, store=config) as first:
        name = session(first)
        reply = ok(first, f"/sessions/{name}/v1/chat/completions", {"messages": messages, **SAMPLING})
        before = first.workers[0].log[-1]
        known = [*before.input_ids, *before.output_ids]
    messages += [reply["choices"][0]["message"], {"role": "user", "content": [image(DOG)]}]
    with stack("qwen", styles=("cumulative",), folder=FOLDER, store=config) as second:
        ok(second, f"/sessions/{name}/v1/chat/completions", {"messages": messages, **SAMPLING})
        assert second.workers[0].log[-1].input_ids[: len(known)] == known
        check_one_sequence(second, name, [CAT, DOG], 2)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ([{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}], "media_url"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}], "media_invalid"),
        ([{"type": "image_url", "image_url": {"url": "sha256:" + "0" * 64}}], "media_unknown"),
        ([{"type": "image_url", "image_url": {}}], "media_invalid"),
        ([{"type": "image_url", "image_url": {"url": data_url(CAT)}, "uuid": "mine"}], "media_field"),
        ("It says <|image_pad|> here", "placeholder_in_text"),
        ("It says \ufdd0 here", "reserved_character"),
    ],
)
def test_what_is_refused_never_reaches_a_worker(product: Stack, content: Any, code: str) -> None:
    for path in ("/v1/chat/completions", f"/sessions/{session(product)}/v1/chat/completions"):
        found = error(product, path, {"messages": [{"role": "user", "content": content}], **SAMPLING})
        assert found["code"] == code


def test_only_users_and_tools_show_pictures(product: Stack) -> None:
    messages = [{"role": "system", "content": [image(CAT)]}, {"role": "user", "content": "Hi"}]
    assert error(product, "/v1/chat/completions", {"messages": messages})["code"] == "multimodal_unsupported"


@pytest.mark.parametrize("kind", ["image_url", "input_image", "image"])
def test_a_model_of_text_refuses_pictures_by_name(kind: str, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for one in messages %}{{ one.content }}{% endfor %}")
    sessions = {"chat_template": str(template)}
    with stack("qwen", styles=("cumulative",), folder=shipped_tokenizer(), sessions=sessions) as made:
        part = {"type": kind, "image_url": {"url": data_url(CAT)}}
        messages = [
            {"role": "user", "content": "Hi"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, part]},
        ]
        found = error(made, f"/sessions/{session(made)}/v1/chat/completions", {"messages": messages})
        assert (found["code"], found["param"]) == ("unsupported_content", "messages[1].content[1]")
        assert kind in found["message"]
        assert "text only" in found["message"]
