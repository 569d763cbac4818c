"""Pictures are lifted out of bodies, against a plain walk through the parsed body."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from middleware_hub.media.errors import MediaInvalidError
from middleware_hub.media.lifted import FEW, MODERATE, LiftedBody, Outline, address, picture_at, places, without
from router.engines.json_cost import LIGHT
from tests.support.pictures import data_url, digest, picture

Json = dict[str, Any]
CAT, DOG = picture(30, 20, 1), picture(30, 20, 2)
URLS = {digest(one): data_url(one) for one in (CAT, DOG)}
BARE = data_url(CAT).partition(",")[2]
SAFE = BARE.replace("+", "-").replace("/", "_")


def lifted(body: bytes) -> LiftedBody:
    found = {
        place: one for place in places(Outline.of(body)) if (one := picture_at(body, place, 1_000_000)) is not None
    }
    return without(body, found)


def chat(part: Any) -> Json:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]}


def url_part(url: str) -> Json:
    return {"type": "image_url", "image_url": {"url": url, "detail": "low"}}


def source(data: str) -> Json:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def blob(data: str) -> Json:
    return {"inlineData": {"mimeType": "IMAGE/png", "data": data}}


def google(part: Any) -> Json:
    return {"contents": [{"role": "user", "parts": [{"text": "a"}, part]}, {"role": "model", "parts": []}]}


FORMS = [
    lambda one: chat(url_part(one)),
    lambda one: chat({"type": "input_image", "image_url": one}),
    lambda one: chat(source(one)),
    lambda one: chat({"type": "tool_result", "tool_use_id": "x", "content": [source(one)]}),
    lambda one: {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": one}]}]},
    lambda one: {"input": [{"type": "function_call_output", "output": [{"type": "input_image", "image_url": one}]}]},
    lambda one: {"text": "a", "image_data": one},
    lambda one: {"text": "a", "image_data": ["sha256:" + "0" * 64, one]},
    lambda one: {"text": ["a"], "image_data": [[one], None, []]},
    lambda one: google(blob(one)),
    lambda one: google({"inline_data": {"mime_type": "image/png", "data": one}}),
    lambda one: google({"functionResponse": {"name": "look", "response": {}, "parts": [{"text": "a"}, blob(one)]}}),
    lambda one: google({"function_response": {"name": "look", "parts": blob(one)}}),
    lambda one: {"contents": {"role": "user", "parts": blob(one)}},
    lambda one: {"generateContentRequest": google(blob(one))},
    lambda one: {"generate_content_request": google(blob(one))},
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "given", [data_url(CAT), BARE, BARE[:60] + "\n" + BARE[60:], SAFE], ids=["url", "bare", "lines", "for addresses"]
)
def test_a_digest_stands_in_place_of_each_form(form: Any, given: str) -> None:
    found = lifted(json.dumps(form(given)).encode())
    assert json.loads(found.body) == form(digest(CAT))
    assert found.pictures[digest(CAT)].data == CAT
    assert lifted(found.body).body == found.body


def test_sound_stays_where_it_is() -> None:
    """Of Google's parts, the media type says what is a picture."""
    body = json.dumps(google({"inlineData": {"mimeType": "audio/image", "data": BARE}})).encode()
    assert lifted(body).body == body


def test_slashes_may_be_escaped() -> None:
    body = json.dumps({"text": "a", "image_data": data_url(CAT)}).replace("/", "\\/").encode()
    assert json.loads(lifted(body).body)["image_data"] == digest(CAT)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "image " + data_url(CAT)}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": data_url(CAT)}]}], "x": "image"},
        chat({"type": "tool_use", "input": url_part(data_url(CAT))}),
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": url_part(data_url(CAT))}}]}]},
        {"messages": [], "tools": [{"function": {"parameters": {"default": [url_part(data_url(CAT))]}}}]},
        {"messages": [], "metadata": {"content": [url_part(data_url(CAT))]}},
        {"image_data": {"url": data_url(CAT)}},
        {"image_data": 7, "messages": {"content": []}, "input": "image"},
        chat({"type": ["image"], "image_url": data_url(CAT)}),
        chat({"type": {"image": data_url(CAT)}}),
        chat({"type": "image", "source": [data_url(CAT)]}),
        chat({"type": "tool_result", "content": data_url(CAT)}),
        chat([url_part(data_url(CAT))]),
        {"messages": [[url_part(data_url(CAT))], data_url(CAT), None]},
        {"image_data": [[[data_url(CAT)]], {"a": data_url(CAT)}]},
    ],
)
def test_what_is_no_picture_stays(body: Json) -> None:
    raw = json.dumps(body).encode()
    assert places(Outline.of(raw)) == []


@pytest.mark.parametrize(
    "raw", [b"", b"image", b'{"image_data": "' + b"A" * 999, b"[" + b'"image",' * 9, b'["image_data"]']
)
def test_malformed_bodies_are_left_to_the_parser(raw: bytes) -> None:
    assert places(Outline.of(raw)) == []


def test_a_fault_names_its_place() -> None:
    body = json.dumps(chat(url_part("data:image/png;base64," + "A" * 200))).encode()
    (place,) = places(Outline.of(body))
    with pytest.raises(MediaInvalidError, match=r"messages\[0\].content\[1\]") as refused:
        picture_at(body, place, 1_000_000)
    assert refused.value.details["param"] == "messages[0].content[1]"


def test_addresses_are_told_apart() -> None:
    given = ["http://a/b.png", "HTTPS://a/\u00e9", data_url(CAT), "httpx", "file:///a"]
    body = json.dumps({"text": "a", "image_data": given}).encode()
    assert [address(body, place) for place in places(Outline.of(body))] == [
        "http://a/b.png",
        "HTTPS://a/\u00e9",
        None,
        None,
    ]


texts = st.text(st.sampled_from('ab"\\\u00e9\n/{}[]:,'), max_size=200) | st.just("data:image/png;base64," + "A" * 200)
parts = st.one_of(
    texts.map(lambda text: {"type": "text", "text": text}),
    st.sampled_from(list(URLS.values())).map(url_part),
    st.sampled_from(list(URLS.values())).map(lambda one: source(one.partition(",")[2])),
    st.sampled_from(list(URLS)).map(url_part),
    texts.map(lambda text: {"type": "tool_use", "input": {"url": text}}),
)
bodies = st.fixed_dictionaries(
    {
        "messages": st.lists(
            st.fixed_dictionaries({"content": st.one_of(texts, st.lists(parts, max_size=4))}), max_size=4
        )
    },
    optional={"text": texts, "input": texts, "image_data": st.lists(st.sampled_from(list(URLS.values())), max_size=3)},
)


def replaced(value: Any) -> Any:
    """The body, with each of the two pictures, wherever it is, by its digest: nothing else in it is one."""
    if isinstance(value, dict):
        return {key: replaced(one) for key, one in value.items()}
    if isinstance(value, list):
        return [replaced(one) for one in value]
    for name, url in URLS.items():
        if value in (url, url.partition(",")[2]):
            return name
    return value


@given(bodies, st.booleans())
def test_nothing_else_changes(body: Json, ascii_only: bool) -> None:
    raw = json.dumps(body, ensure_ascii=ascii_only).encode()
    light, whole = Outline.light(raw), Outline.of(raw)
    assert light is not None
    assert (places(light), len(light.text), light.strings) == (places(whole), len(whole.text), whole.strings)
    found = lifted(raw)
    assert json.loads(found.body) == replaced(body)
    assert found.original == raw


@pytest.mark.parametrize(
    ("body", "light"),
    [
        ({"image_data": "A" * (MODERATE - 100)}, True),
        ({"image_data": "A" * MODERATE}, False),
        ({"image_data": ["a"] * (FEW - 1)}, True),
        ({"image_data": ["a"] * FEW}, False),
        ({"image_data": "A" * LIGHT, "x": "ab" * LIGHT, "input_ids": [7] * (LIGHT // 3 - 100)}, True),
        ({"image_data": "A" * LIGHT, "input_ids": [7] * (LIGHT // 3)}, False),
    ],
)
def test_a_body_is_light_if_it_has_few_strings_and_little_beside_the_long_ones(body: Json, light: bool) -> None:
    assert (Outline.light(json.dumps(body).encode()) is not None) == light
