"""Images in sessions and chats, in every dialect, on the whole product: one conversation is one sequence.

The oracle is the worker's own log: its ids, in which each picture is a run, and the digests of the pictures that it took.
"""

from __future__ import annotations

import base64
import gzip
import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from router.app import create_app
from router.config import SESSIONS_MIDDLEWARE, RadixConfig, RouterConfig, StoreConfig, WorkersConfig
from tests.support.oracle import speller
from tests.support.pictures import data_url, digest, picture
from tests.support.serving import serve
from tests.support.stack import Stack, events, stack
from worker.models.ngram import shipped_image_tokenizer, shipped_tokenizer
from worker.worker import EmbeddedWorker

Json = dict[str, Any]
FOLDER = shipped_image_tokenizer()
CAT, DOG, SUN = (picture(40, 30, seed) for seed in (1, 2, 3))
SAMPLING = {"max_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module", params=["sglang", "vllm"])
def interface(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def product(interface: str) -> Iterator[Stack]:
    with stack("qwen", styles=("cumulative",), folder=FOLDER, interface=interface) as made:
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


def block(content: bytes) -> Json:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(content).decode()}
    return {"type": "image", "source": source}


def test_anthropic_messages(product: Stack) -> None:
    name = session(product)
    path = f"/sessions/{name}/v1/messages"
    messages: list[Json] = [{"role": "user", "content": [block(CAT), {"type": "text", "text": "Go"}]}]
    said = ok(product, path, {"messages": messages, **SAMPLING})
    messages += [{"role": "assistant", "content": said["content"]}, {"role": "user", "content": [block(DOG)]}]
    ok(product, path, {"messages": messages, **SAMPLING})
    check_one_sequence(product, name, [CAT, DOG], 2)


def test_the_result_of_a_tool_has_a_picture(product: Stack) -> None:
    """As Anthropic's block, and as a part of a tool's message."""
    used = {"type": "tool_use", "id": "toolu_1", "name": "shoot", "input": {}}
    result = {
        "type": "tool_result",
        "tool_use_id": "toolu_1",
        "content": [{"type": "text", "text": "Here"}, block(DOG)],
    }
    messages: list[Json] = [
        {"role": "user", "content": "Shoot"},
        {"role": "assistant", "content": [used]},
        {"role": "user", "content": [result]},
    ]
    name = session(product)
    ok(product, f"/sessions/{name}/v1/messages", {"messages": messages, **SAMPLING})
    check_one_sequence(product, name, [DOG], 1)
    call = {"id": "call_1", "type": "function", "function": {"name": "shoot", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Shoot"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "Here"}, image(DOG)]},
    ]
    name = session(product)
    ok(product, f"/sessions/{name}/v1/chat/completions", {"messages": messages, **SAMPLING})
    check_one_sequence(product, name, [DOG], 1)


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
        ([{"type": "image_url", "image_url": {"url": data_url(CAT), "uuid": "mine"}}], "media_field"),
        ([{"type": "image_url", "image_url": {"url": data_url(CAT)}, "max_pixels": 784}], "media_field"),
        ([{"type": "image_url", "image_url": {"url": data_url(CAT), "min_pixels": 784}}], "media_field"),
        ([{"type": "image_url", "image_url": {"url": data_url(CAT), "detail": 7}}], "media_invalid"),
        ([{"type": "input_image", "image_url": data_url(CAT), "detail": ["low"]}], "media_invalid"),
        ("It says <|image_pad|> here", "placeholder_in_text"),
        ("It says \ufdd0 here", "reserved_character"),
    ],
)
def test_what_is_refused_never_reaches_a_worker(product: Stack, content: Any, code: str) -> None:
    for path in ("/v1/chat/completions", f"/sessions/{session(product)}/v1/chat/completions"):
        found = error(product, path, {"messages": [{"role": "user", "content": content}], **SAMPLING})
        assert found["code"] == code


@pytest.mark.parametrize("field", ["uuid", "mm_hashes", "multi_modal_data", "mm_processor_kwargs", "content_parts"])
def test_fields_of_the_router_reach_no_worker(product: Stack, field: str) -> None:
    """In sessions as without one, in every dialect, whether the turn has pictures or not."""
    name, given = session(product), {field: ["x"]}
    for content in ([block(CAT)], "Hi"):
        messages = {"messages": [{"role": "user", "content": content}], **SAMPLING, **given}
        for path in ("chat/completions", "messages", "messages/count_tokens"):
            assert error(product, f"/sessions/{name}/v1/{path}", messages)["code"] == "media_field"
            assert error(product, f"/v1/{path}", messages)["code"] == "media_field"
        items = {"input": [{"role": "user", "content": "Hi"}], **given}
        assert error(product, f"/sessions/{name}/v1/responses", items)["code"] == "media_field"
        assert error(product, "/v1/responses", items)["code"] == "media_field"
    ok(product, f"/sessions/{name}/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], field: None})


@pytest.mark.parametrize("field", ["image_data", "video_data", "audio_data"])
def test_media_beside_messages_and_texts_are_refused_by_name(product: Stack, field: str) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}], **SAMPLING}
    for path, body in (("completions", {"prompt": "a"}), ("chat/completions", chat), ("messages", chat)):
        assert error(product, f"/v1/{path}", {**body, field: [data_url(CAT)]})["code"] == "multimodal_unsupported"


def picture_parts(source: str) -> list[Json]:
    coded = {"type": "base64", "media_type": "image/png", "data": source}
    return [{"type": "image_url", "image_url": {"url": source}}, {"type": "image", "source": coded}]


@pytest.mark.parametrize(
    "source", ["file:///x", "http://127.0.0.1:9/a.png", " http://127.0.0.1:9/a", "ftp://h/a", "/a.png"]
)
def test_no_worker_gets_an_address_in_what_is_passed_on(product: Stack, source: str) -> None:
    """Whatever keeps the router from serving a request: it is for the worker's own chat, and the address is for nobody."""
    for part in picture_parts(source):
        for beside in ({"type": "foo"}, {"type": "document"}, {"type": "file", "file": {"file_id": "f"}}):
            messages = [{"role": "user", "content": [beside, part]}]
            for path in ("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"):
                assert error(product, path, {"messages": messages, **SAMPLING})["code"] == "media_url"
        for path in ("/api/chat", "/invocations", "/v1/embeddings", "/tokenize", "/v1/chat/completions/render"):
            assert error(product, path, {"messages": [{"role": "user", "content": [part]}]})["code"] == "media_url"
    item = {"role": "user", "content": [{"type": "input_image", "image_url": source}]}
    assert error(product, "/v1/responses", {"input": [item]})["code"] == "media_url"
    packed = gzip.compress(json.dumps({"input": [item]}).encode())
    answer = product.post("/v1/responses", None, raw=packed, headers={"content-encoding": "gzip"})
    assert (answer.status, answer.json()["error"]["code"]) == (400, "media_url")
    for path in ("/vertex_generate", "/encode"):
        assert error(product, path, {"instances": [{"text": "a", "image_data": source}]})["code"] == "media_url"


def test_without_the_memory_of_texts_no_worker_gets_an_address_either() -> None:
    """The middleware of sessions stands alone: nothing inside of it checks what it passes on."""
    with EmbeddedWorker(FOLDER) as worker:
        config = RouterConfig(
            workers=WorkersConfig(urls=(worker.url,)),
            radix=RadixConfig(tokenizer_path=str(FOLDER)),
            middlewares=(SESSIONS_MIDDLEWARE,),
        )
        with serve(create_app(config)) as url:
            alone = Stack("qwen", url, [worker], speller("qwen"))
            for part, code in ((picture_parts("file:///x")[0], "media_url"), (image(CAT), "unsupported_content")):
                body = {"messages": [{"role": "user", "content": [{"type": "foo"}, part]}]}
                answer = alone.exchange("POST", "/v1/chat/completions", body)
                told = answer.headers.get("x-radix-recorded", "").removeprefix("no; ")
                assert code == told or code == answer.json()["error"]["code"], answer.content
            messages = {"messages": [{"role": "user", "content": "Hi"}], "uuid": ["x"]}
            assert error(alone, f"/sessions/{session(alone)}/v1/chat/completions", messages)["code"] == "media_field"


def test_what_is_passed_on_is_the_clients_own(product: Stack) -> None:
    """With pictures by data, and without pictures: the worker answers, here that it has no such path."""
    for part in (image(CAT), block(CAT), {"type": "text", "text": "file:///x"}):
        body = {"messages": [{"role": "user", "content": [{"type": "foo"}, part]}]}
        answer = product.exchange("POST", "/v1/chat/completions", body)
        assert answer.headers["x-radix-recorded"] == "no; unsupported_content", answer.content
    answer = product.exchange("POST", "/v1/responses", {"input": "http://127.0.0.1:9/a.png"})
    assert answer.headers["x-radix-recorded"] == "no; other_path"


def test_a_text_that_is_too_long_takes_no_address_along() -> None:
    with stack("qwen", styles=("cumulative",), folder=FOLDER, radix={"max_text_tokens": 64}) as made:
        for part, code in ((picture_parts("file:///x")[0], "media_url"), ({**image(CAT), "uuid": "x"}, "media_field")):
            content = [{"type": "text", "text": "a" * 100_000}, part]
            assert (
                error(made, "/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})["code"]
                == code
            )
        content[1:] = [image(CAT)]
        answer = made.exchange("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})
        assert answer.headers["x-radix-recorded"] == "no; text_too_long"


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


def test_a_remembered_message_brings_its_picture_back_to_the_shelf() -> None:
    """The bytes went from the shelf for others. The client sends them at each turn, so the next one works."""
    with stack("qwen", styles=("cumulative",), folder=FOLDER, media={"max_bytes": 4 * len(CAT)}) as made:
        path = f"/sessions/{session(made)}/v1/chat/completions"
        messages: list[Json] = [{"role": "user", "content": [image(CAT), {"type": "text", "text": "what?"}]}]
        for number in range(3):
            reply = ok(made, path, {"messages": messages, **SAMPLING})["choices"][0]["message"]
            ok(made, "/v1/chat/completions", {"messages": [{"role": "user", "content": [image(DOG)]}], **SAMPLING})
            assert made.exchange("GET", f"/media/{digest(CAT)}").status == 404
            messages += [reply, {"role": "user", "content": f"more {number}"}]
        record = made.workers[0].log[-2]
        assert list(record.images) == [digest(CAT)]


def test_an_earlier_response_brings_its_pictures(product: Stack) -> None:
    """`previous_response_id`: the messages come out of the session, not out of the request."""
    name = session(product)
    path = f"/sessions/{name}/v1/responses"
    item = {"role": "user", "content": [{"type": "input_image", "image_url": data_url(CAT)}]}
    first = ok(product, path, {"input": [item], "max_output_tokens": 6, "temperature": 0})
    ok(product, path, {"input": "And?", "previous_response_id": first["id"], "max_output_tokens": 6, "temperature": 0})
    check_one_sequence(product, name, [CAT], 2)


def test_a_sampled_placeholder_ends_a_conversation_with_pictures(product: Stack, interface: str) -> None:
    """The turn itself is exact. What goes on from it would give the engine a placeholder too many."""
    name = session(product)
    path = f"/sessions/{name}/v1/chat/completions"
    product.workers[0].script([4097, 698])
    messages: list[Json] = [{"role": "user", "content": [image(CAT)]}]
    body = {"messages": messages, "max_tokens": 2, "temperature": 0}
    reply = ok(product, path, body)["choices"][0]["message"]
    assert list(product.workers[0].log[-1].output_ids) == [4097, 698]
    messages += [reply, {"role": "user", "content": "More"}]
    turns = 1
    if interface == "vllm":  # it takes the first placeholders for pictures', so this one harms only a later picture
        reply = ok(product, path, {"messages": messages, **SAMPLING})["choices"][0]["message"]
        messages += [reply, {"role": "user", "content": [image(DOG)]}]
        turns = 2
    assert error(product, path, {"messages": messages, **SAMPLING})["code"] == "placeholder_sampled"
    check_one_sequence(product, name, [CAT], turns)


def test_ids_that_were_expanded_are_refused_without_pictures_too(product: Stack) -> None:
    body = {"input_ids": [4090, 4096, *[4097] * 4, 4098], "sampling_params": {"max_new_tokens": 2}}
    assert error(product, "/generate", body)["code"] == "media_expanded"


def test_billing_lines_beside_pictures_are_left_out(product: Stack) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(CAT).decode()}
    for text in ("x-anthropic-billing-header: 1\nHello", "Hello"):
        content = [{"type": "text", "text": text}, {"type": "image", "source": source}]
        ok(product, "/v1/messages", {"messages": [{"role": "user", "content": content}], **SAMPLING})
    one, other = product.workers[0].log[-2:]
    assert one.input_ids == other.input_ids


def test_where_a_text_has_another_picture_is_explained(product: Stack) -> None:
    text = "Explain <|vision_start|><|image_pad|><|vision_end|> it"
    ok(product, "/generate", {"text": text, "image_data": [data_url(CAT)], "sampling_params": {"max_new_tokens": 2}})
    found = ok(product, "/radix_tree/explain", {"text": text, "image_data": [data_url(DOG)]})
    assert found["matched_chars"] == text.index("<|image_pad|>")
    assert found["text_length"] == len(text)
    assert "another image" in found["message"]
    assert "\ufdd0" not in str(found)
    for shape in (7, [{}]):
        told = error(product, "/retrieve_from_text", {"text": text, "image_data": shape})
        assert told["code"] == "media_invalid"


def test_other_options_keep_sampled_tokens_and_pictures(product: Stack) -> None:
    """All is rendered again and spliced: the pictures between the turns are compared as parts of the text."""
    name = session(product)
    path = f"/sessions/{name}/v1/chat/completions"
    messages: list[Json] = [{"role": "user", "content": [image(CAT), {"type": "text", "text": "what?"}]}]
    reply = ok(product, path, {"messages": messages, **SAMPLING})["choices"][0]["message"]
    before = product.workers[0].log[-1]
    messages += [reply, {"role": "user", "content": [image(DOG), {"type": "text", "text": "and?"}]}]
    ok(product, path, {"messages": messages, "chat_template_kwargs": {"anything": 1}, **SAMPLING})
    after = product.workers[0].log[-1]
    known = [*before.input_ids, *before.output_ids]
    assert after.input_ids[: len(known)] == known
    assert list(after.images) == [digest(CAT), digest(DOG)]


def test_an_edited_reply_keeps_the_pictures_before_it(product: Stack) -> None:
    name = session(product)
    path = f"/sessions/{name}/v1/chat/completions"
    messages: list[Json] = [{"role": "user", "content": [image(SUN), {"type": "text", "text": "edit"}]}]
    body = {"messages": messages, "max_tokens": 12, "temperature": 0}
    said = ok(product, path, body)["choices"][0]["message"]["content"]
    before = product.workers[0].log[-1]
    assert len(said) > 8
    messages += [{"role": "assistant", "content": said[:-2]}, {"role": "user", "content": [image(DOG)]}]
    ok(product, path, {"messages": messages, **SAMPLING})
    after = product.workers[0].log[-1]
    assert after.input_ids[: len(before.input_ids) + 2] == [*before.input_ids, *before.output_ids[:2]]
    assert list(after.images) == [digest(SUN), digest(DOG)]


def test_a_dropped_picture_forks_there(product: Stack) -> None:
    """A condensed history: what stands before the picture keeps its ids, nothing behind it is continued."""
    name = session(product)
    path = f"/sessions/{name}/v1/chat/completions"
    messages: list[Json] = [{"role": "user", "content": "First"}]
    messages.append(ok(product, path, {"messages": messages, **SAMPLING})["choices"][0]["message"])
    first = product.workers[0].log[-1]
    messages.append({"role": "user", "content": [image(CAT), {"type": "text", "text": "Second"}]})
    messages.append(ok(product, path, {"messages": messages, **SAMPLING})["choices"][0]["message"])
    messages[2] = {"role": "user", "content": "Second"}
    messages.append({"role": "user", "content": [image(DOG)]})
    ok(product, path, {"messages": messages, **SAMPLING})
    after = product.workers[0].log[-1]
    known = [*first.input_ids, *first.output_ids]
    assert after.input_ids[: len(known)] == known
    assert list(after.images) == [digest(DOG)]


def test_pictures_that_a_session_needs_go_last(tmp_path: Path) -> None:
    """As long as it lives: then they go like others."""
    with stack("qwen", styles=("cumulative",), folder=FOLDER, media={"max_bytes": 12 * len(CAT)}) as made:
        name = session(made)
        needed = {"messages": [{"role": "user", "content": [image(CAT)]}], **SAMPLING}

        def fill() -> None:
            for seed in range(10, 20):
                texts = {"text": "nothing", "image_data": [data_url(picture(40, 30, seed))]}
                assert made.exchange("POST", "/retrieve_from_text", texts).status == 400  # it is on the shelf, unnamed

        def held() -> bool:
            return made.exchange("GET", f"/media/{digest(CAT)}").status == 200

        ok(made, f"/sessions/{name}/v1/chat/completions", needed)
        fill()
        assert held()
        assert made.exchange("DELETE", f"/sessions/{name}").status in (200, 204)
        fill()
        assert not held()


def test_pictures_that_the_tree_needs_go_last() -> None:
    with stack("qwen", styles=("cumulative",), folder=FOLDER, media={"max_bytes": 12 * len(CAT)}) as made:
        text = "Keep <|vision_start|><|image_pad|><|vision_end|>"
        ok(made, "/generate", {"text": text, "image_data": [data_url(CAT)], "sampling_params": {"max_new_tokens": 2}})
        for seed in range(10, 20):
            texts = {"text": "nothing", "image_data": [data_url(picture(40, 30, seed))]}
            assert made.exchange("POST", "/retrieve_from_text", texts).status == 400
        assert made.exchange("GET", f"/media/{digest(CAT)}").status == 200


def test_large_pictures_are_no_text(product: Stack) -> None:
    """The limit of a chat's text does not count them; the text beside them still has it."""
    large = picture(1200, 1200, 5, compress_level=0)
    assert len(large) > 4_194_304
    for path in ("/v1/chat/completions", f"/sessions/{session(product)}/v1/chat/completions"):
        ok(product, path, {"messages": [{"role": "user", "content": [image(large)]}], **SAMPLING})
        assert list(product.workers[0].log[-1].images) == [digest(large)]
        long = {"type": "text", "text": "word " * 1_000_000}
        body = {"messages": [{"role": "user", "content": [image(CAT), long]}], **SAMPLING}
        before = len(product.workers[0].log)
        assert product.exchange("POST", path, body).status in (
            404,
            413,
        )  # without a session it goes to the worker's own chat
        assert len(product.workers[0].log) == before


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url"])
def test_media_that_is_not_read_has_its_word(product: Stack, kind: str) -> None:
    part = {"type": kind, kind: {"url": data_url(CAT)}}
    role = "assistant" if kind == "image_url" else "user"
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": role, "content": [part]},
        {"role": "user", "content": "So?"},
    ]
    for path in ("/v1/chat/completions", f"/sessions/{session(product)}/v1/chat/completions"):
        found = error(product, path, {"messages": messages, **SAMPLING})
        assert (found["code"], found["param"]) == ("multimodal_unsupported", "messages[1].content[0]")


def test_an_error_names_the_picture(product: Stack) -> None:
    for url, code in (("https://a.org/a.png", "media_url"), ("sha256:" + "1" * 64, "media_unknown")):
        content = [image(CAT), {"type": "image_url", "image_url": {"url": url}}]
        found = error(product, "/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})
        assert (found["code"], found["param"]) == (code, "messages[0].content[1]")


def test_a_stream_begins_with_an_estimate_and_ends_with_the_number(product: Stack) -> None:
    """Anthropic's clients show the number of the first event; nobody has told the length of a new picture by then."""
    new = picture(300, 200, 71)
    body = {
        "messages": [{"role": "user", "content": [block(new)]}],
        "max_tokens": 4,
        "model": "m",
        "stream": True,
    }
    counted = ok(product, "/v1/messages/count_tokens", {"messages": body["messages"], "model": "m"})["input_tokens"]
    worker, parts = product.workers[0], urlsplit(product.url)
    for known in (False, True):
        worker.hold(after=1)
        connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=60)
        connection.request("POST", f"/sessions/{session(product)}/v1/messages", json.dumps(body))
        answer = connection.getresponse()
        while not (line := answer.readline()).startswith(b"data: "):
            assert line
        began = json.loads(line[6:])
        worker.release()
        last = [json.loads(line[6:]) for line in answer.read().splitlines() if line.startswith(b"data: ")][-2]
        connection.close()
        tokens = len(worker.log[-1].input_ids)
        assert last["usage"]["input_tokens"] + last["usage"]["cache_read_input_tokens"] == tokens
        assert began["message"]["usage"]["input_tokens"] == (tokens if known else counted)
        assert answer.headers["x-radix-prompt-tokens"] == (str(tokens) if known else None)
    assert counted > 20


def test_the_context_is_bounded_by_an_estimate_before_a_reply() -> None:
    message = {"role": "user", "content": [image(picture(1500, 1500, 72))]}
    with stack("qwen", styles=("cumulative",), folder=FOLDER) as made:
        counted = ok(made, "/v1/messages/count_tokens", {"messages": [message], "model": "m"})["input_tokens"]
    sessions = {"max_context": counted}
    with stack("qwen", styles=("cumulative",), folder=FOLDER, sessions=sessions) as made:
        for body in ({"messages": [message]}, {"messages": [message], "max_tokens": 2}):
            found = error(made, "/v1/chat/completions", body)
            assert found["code"] == "context_length_exceeded"
