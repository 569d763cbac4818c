"""`--media-max-request-bytes` is for the files of images, `--max-body-bytes` for all else, on the whole product."""

from __future__ import annotations

import gzip
import http.client
import json
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.pictures import data_url, digest, picture
from tests.support.stack import Stack, stack
from worker.models.ngram import shipped_image_tokenizer

Json = dict[str, Any]
LARGE, OTHER = (picture(150, 100, seed, compress_level=0) for seed in (1, 2))
SMALL = picture(20, 20, 3, compress_level=0)
BODY, MEDIA = 20_000, len(LARGE) + len(OTHER) + len(SMALL) - 1
PAD = "<|image_pad|>"
assert len(LARGE) > 2 * BODY


@pytest.fixture(scope="module")
def served() -> Iterator[Stack]:
    limits = {"server": {"max_body_bytes": BODY}, "media": {"max_request_bytes": MEDIA, "max_image_bytes": MEDIA}}
    with stack("qwen", styles=("cumulative",), folder=shipped_image_tokenizer(), **limits) as made:
        yield made


def generated(text: str, *images: bytes) -> Json:
    urls = [data_url(one) for one in images]
    return {"text": text + PAD * len(images), "image_data": urls, "sampling_params": {"max_new_tokens": 2}}


def chat(text: str, *images: bytes) -> Json:
    parts = [{"type": "image_url", "image_url": {"url": data_url(one)}} for one in images]
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}], "max_tokens": 2}


FORMS: dict[str, Callable[..., Json]] = {"/generate": generated, "/v1/chat/completions": chat}
WAYS = ("whole", "chunked", "gzip")


def ask(served: Stack, path: str, body: Json, way: str) -> tuple[int, Json]:
    raw = json.dumps(body).encode()
    parts, headers = urlsplit(served.url), {"content-type": "application/json"}
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=30)
    try:
        if way == "gzip":
            headers["content-encoding"], raw = "gzip", gzip.compress(raw)
        pieces = iter([raw[at : at + 5000] for at in range(0, len(raw), 5000)])
        connection.request("POST", path, pieces if way == "chunked" else raw, headers, encode_chunked=way == "chunked")
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


@pytest.mark.parametrize("path", FORMS)
@pytest.mark.parametrize("way", WAYS)
def test_images_do_not_count_for_the_text(served: Stack, path: str, way: str) -> None:
    for text in ("Look:", "a " * (BODY // 2 - 500)):
        status, found = ask(served, path, FORMS[path](text, LARGE, OTHER), way)
        assert status == 200, found
        assert served.workers[0].log[-1].images == (digest(LARGE), digest(OTHER))


@pytest.mark.parametrize("path", FORMS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("images", [(), (LARGE,)])
def test_a_long_text_is_refused_as_before(served: Stack, path: str, way: str, images: tuple[bytes, ...]) -> None:
    before = served.workers[0].received
    status, found = ask(served, path, FORMS[path]("a " * BODY, *images), way)
    assert status == 413, found
    assert f"larger than {BODY} bytes (--max-body-bytes)" in found["error"]["message"]
    assert served.workers[0].received == before


@pytest.mark.parametrize("path", FORMS)
def test_a_text_that_looks_like_an_image_is_text(served: Stack, path: str) -> None:
    status, found = ask(served, path, FORMS[path]("an image: " + data_url(LARGE)), "whole")
    assert status == 413, found


@pytest.mark.parametrize("path", FORMS)
@pytest.mark.parametrize("way", WAYS)
def test_the_images_have_a_limit_of_their_own(served: Stack, path: str, way: str) -> None:
    before = served.workers[0].received
    status, found = ask(served, path, FORMS[path]("Look:", LARGE, OTHER, SMALL), way)
    assert (status, found["error"]["code"]) == (400, "media_invalid"), found
    assert "--media-max-request-bytes" in found["error"]["message"]
    status, found = ask(served, path, FORMS[path]("Look:", *[LARGE] * 9), way)
    assert status == 413, found
    assert served.workers[0].received == before


def test_images_that_are_only_named_count_too(served: Stack) -> None:
    """The worker gets their files all the same."""
    assert ask(served, "/generate", generated("Known:", LARGE, OTHER), "whole")[0] == 200
    named = generated("Known:", LARGE, OTHER, SMALL) | {"image_data": [digest(LARGE), digest(OTHER), data_url(SMALL)]}
    status, found = ask(served, "/generate", named, "whole")
    assert (status, found["error"]["code"]) == (400, "media_invalid")
    parts = [{"type": "image_url", "image_url": {"url": digest(one)}} for one in (LARGE, OTHER, LARGE)]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 2}
    status, found = ask(served, "/v1/chat/completions", body, "whole")
    assert (status, found["error"]["code"]) == (400, "media_invalid")


def test_a_retrieval_has_the_same_limits(served: Stack) -> None:
    body = {"text": PAD * 2, "image_data": [data_url(LARGE), data_url(OTHER)]}
    assert ask(served, "/retrieve_from_text", body, "whole")[0] == 200
    assert ask(served, "/retrieve_from_text", body | {"text": PAD * 2 + "a" * BODY}, "whole")[0] == 413
