"""What a worker gets as its client wrote it: media by data only, in the forms of all engines' own paths."""

from __future__ import annotations

import json
from typing import Any

import pytest

from middleware_hub.media.errors import MediaError
from middleware_hub.media.passed_on import check
from router.errors import BadRequestError
from tests.support.pictures import data_url, digest, picture

Json = dict[str, Any]
CAT = picture(8, 8, 1)
URL = data_url(CAT)
BARE = URL.partition(",")[2]
ADDRESSES = [
    "file:///x", "http://h/a.png", "HTTPS://h/a", " http://h/a.png", "ftp://h/a", "/a.png", "a.png", "../a", "tmp/xpng",
    "\thttp://h", "//h/a.png", "C:\\a.png",
]  # fmt: skip


def code(body: Any) -> str | None:
    try:
        check(body if isinstance(body, bytes) else json.dumps(body).encode())
    except MediaError as error:
        return error.code
    return None


def user(*parts: Json) -> Json:
    return {"messages": [{"role": "user", "content": [{"type": "foo"}, *parts]}]}


def forms(source: str) -> dict[str, Json]:
    part = {"type": "image_url", "image_url": {"url": source}}
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": source}}
    return {
        "chat": user(part),
        "flat": user({"type": "image_url", "image_url": source}),
        "untyped": user({"image_url": {"url": source}}),
        "anthropic": user(block),
        "anthropic, by address": user({"type": "image", "source": {"type": "url", "url": source}}),
        "a result": user({"type": "tool_result", "content": [block]}),
        "a document": user({"type": "document", "source": {"type": "content", "content": [block]}}),
        "responses": {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": source}]}]},
        "a screenshot": {"input": [{"type": "o", "output": {"type": "computer_screenshot", "image_url": source}}]},
        "ollama": {"messages": [{"role": "user", "content": "a", "images": [source]}]},
        "ollama, a text": {"prompt": "a", "images": [source]},
        "generate": {"text": ["a", "b"], "image_data": [[source], None]},
        "generate, an object": {"text": "a", "image_data": {"url": source, "detail": "auto"}},
        "vertex": {"instances": [{"text": "a", "image_data": source}]},
        "embeddings": {"input": [{"text": "a", "image": source}]},
        "a batch": {"messages": [user(part)["messages"]]},
    }


@pytest.mark.parametrize("form", forms(""))
def test_pictures_are_passed_on_by_data_only(form: str) -> None:
    for source in ADDRESSES:
        assert code(forms(source)[form]) == "media_url", source
    for source in (URL, BARE, digest(CAT), "/9j/" + "A" * 8000):
        assert code(forms(source)[form]) is None, source


@pytest.mark.parametrize("key", ["video_url", "audio_url", "input_audio", "file", "document"])
def test_other_media_are_passed_on_by_data_only(key: str) -> None:
    for source in ("file:///x", "/etc/ssh", "http://h", " http://h"):
        assert code(user({"type": key, key: {"url": source}})) == "media_url", source
    for source in ("data:application/pdf;base64,JVBERi0x", "JVBERi0x"):
        assert code(user({"type": key, key: {"data": source, "format": "wav", "filename": "a.pdf"}})) is None


def test_keys_are_found_in_large_bodies() -> None:
    for filling in range((1 << 20) - 130, (1 << 20) + 10):
        assert code({"a": "x" * filling, **forms("file:///x")["ollama, a text"]}) == "media_url"


def test_keys_that_are_spelled_otherwise_are_found() -> None:
    body = json.dumps(forms("file:///x")["chat"])
    assert code(body.replace("image_url", "\\u0069mage\\u005furl").encode()) == "media_url"
    for other in (body.encode("utf-16"), body.encode().replace(b'"foo"', b"NaN")):
        with pytest.raises(BadRequestError, match="JSON"):
            check(other)


@pytest.mark.parametrize(
    "body",
    [
        {"uuid": ["x"]},
        {"mm_processor_kwargs": {"a": 1}},
        {"instances": [{"text": "a", "mm_hashes": ["a"]}]},
        {"prompt": {"prompt": "a", "multi_modal_data": {"image": "a"}}},
        user({"type": "image_url", "image_url": {"url": URL}, "uuid": "x"}),
        user({"type": "image_url", "image_url": {"url": URL, "uuid": "x"}}),
        user({"type": "image_url", "uuid": "x"}),
        user({"type": "image_url", "image_url": {"url": URL}, "max_pixels": 9}),
        user({"type": "image_embeds", "image_embeds": "AAAA"}),
        {"text": "a", "image_data": [{"format": "processor_output", "pixel_values": [1.0]}]},
    ],
)
def test_fields_of_the_router_are_refused(body: Json) -> None:
    assert code(body) == "media_field"


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "see http://h/a.png", "uuid": "x"}], "uuid": None},
        user({"type": "text", "text": "file:///x", "uuid": "x"}),
        user({"type": "tool_use", "input": {"image_url": "http://h", "image": "/a.png"}}),
        {"messages": [], "tools": [{"function": {"parameters": {"properties": {"image_url": {"type": "string"}}}}}]},
        user({"type": "search_result", "source": "https://h/a", "content": [{"type": "text", "text": "a"}]}),
        user({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "http://h"}}),
        {"messages": [{"role": "assistant", "audio": {"id": "audio_1"}}], "audio": {"voice": "a", "format": "mp3"}},
        {"input": "http://h/a.png", "modalities": ["text"]},
        {"text": "a", "image_data": [None, []], "use_audio_in_video": False},
        [1, 2],
        b"no JSON",
        b"",
    ],
)
def test_what_is_no_medium_is_passed_on(body: Any) -> None:
    assert code(body) is None
