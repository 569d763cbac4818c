"""Images in /inference/v1/generate."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.image_vocabularies import data_url
from tests.worker.talk import events, request
from worker.engine.prompt_images import digest_of, length_of
from worker.models.ngram import shipped_image_tokenizer
from worker.worker import EmbeddedWorker

CAT, DOG = b"\x89PNG a cat", b"\x89PNG a dog"
START, PAD, END = 4096, 4097, 4098
PICTURE = [START, PAD, END]
Json = dict[str, Any]


@pytest.fixture
def worker() -> Iterator[EmbeddedWorker]:
    with EmbeddedWorker(shipped_image_tokenizer(), interface="vllm") as running:
        yield running


def part(content: bytes | None, uuid: str | None = None) -> Json:
    found: Json = {"type": "image_url"}
    return found | ({"url": data_url(content)} if content else {}) | ({"uuid": uuid} if uuid else {})


def ask(worker: EmbeddedWorker, ids: list[int], parts: Any, **body: Any) -> tuple[int, Any]:
    sampling = {"max_tokens": 24, "temperature": 0}
    body = {"token_ids": ids, "content_parts": parts, "return_token_ids": True, "sampling_params": sampling, **body}
    status, content, _ = request(worker, "/inference/v1/generate", body)
    return status, events(content) if body.get("stream") and status == 200 else json.loads(content)


def said(worker: EmbeddedWorker, ids: list[int], parts: Any, **body: Any) -> Any:
    status, reply = ask(worker, ids, parts, **body)
    assert status == 200, reply
    return reply


def runs(*contents: bytes) -> list[int]:
    return [number for one in contents for number in [START, *[PAD] * length_of(digest_of(one)), END]]


def test_each_placeholder_becomes_the_run_of_its_image(worker: EmbeddedWorker) -> None:
    ids, parts = [5, *PICTURE, *PICTURE, 6], [part(CAT), {"type": "unknown", "url": "/tmp/x"}, part(DOG, "d")]
    reply = said(worker, ids, parts, output_mode="text")
    assert reply["prompt_token_ids"] == [5, *runs(CAT, DOG), 6]
    (first, second) = reply["mm_placeholders"]["image"]
    assert first == {"offset": 2, "length": length_of(digest_of(CAT))}
    assert second == {"offset": 2 + first["length"] + 2, "length": length_of(digest_of(DOG))}
    assert reply["usage"]["prompt_tokens"] == len(reply["prompt_token_ids"])
    (record,) = worker.log
    assert (record.input_ids, record.images) == (reply["prompt_token_ids"], (digest_of(CAT), digest_of(DOG)))
    assert said(worker, ids, parts, return_token_ids=False)["mm_placeholders"] is None
    assert said(worker, [5, 6], None)["mm_placeholders"] is None
    assert said(worker, ids, [part(CAT)])["prompt_token_ids"] == [5, *runs(CAT), *PICTURE, 6]


def test_the_first_event_of_a_stream_has_ids_and_places(worker: EmbeddedWorker) -> None:
    whole = said(worker, PICTURE, [part(CAT)])
    first, *others = said(worker, PICTURE, [part(CAT)], stream=True)
    assert others
    for key in ("prompt_token_ids", "mm_placeholders"):
        assert first[key] == whole[key]
        assert not any(key in event for event in others)


def test_a_known_name_is_enough(worker: EmbeddedWorker) -> None:
    status, error = ask(worker, PICTURE, [part(None, "cat")])
    assert (status, error["error"]["message"]) == (400, "Cache miss for image at index 0 but data is not provided.")
    first = said(worker, PICTURE, [part(CAT, "cat")])
    again = said(worker, PICTURE, [part(None, "cat")])
    stale = said(worker, PICTURE, [part(DOG, "cat")])
    for reply in (again, stale):
        assert (reply["prompt_token_ids"], reply["choices"]) == (first["prompt_token_ids"], first["choices"])
    mixed = said(worker, PICTURE * 2, [part(None, "cat"), part(DOG)])
    assert mixed["prompt_token_ids"] == runs(CAT, DOG)
    worker.forget_images()
    assert ask(worker, PICTURE, [part(None, "cat")])[0] == 400
    assert said(worker, PICTURE, [part(CAT, "cat")])["choices"] == first["choices"]
    worker.kill()
    worker.restart()
    assert ask(worker, PICTURE, [part(None, "cat")])[0] == 400
    assert worker.out_of_range == []


def test_the_least_recently_used_name_is_forgotten(worker: EmbeddedWorker) -> None:
    names = [f"n{number}" for number in range(384)]
    said(worker, PICTURE * len(names), [part(CAT, name) for name in names], sampling_params={"max_tokens": 1})
    said(worker, PICTURE, [part(None, "n0")])
    said(worker, PICTURE, [part(CAT, "one more")])
    assert [ask(worker, PICTURE, [part(None, name)])[0] for name in ("n0", "n1", "n2")] == [200, 400, 200]


def test_the_cache_goes_by_name(worker: EmbeddedWorker) -> None:
    def cached(uuid: str | None) -> int:
        usage = said(worker, [5, *PICTURE, 6], [part(CAT, uuid)])["usage"]
        found: int = usage["prompt_tokens_details"]["cached_tokens"]
        return found

    whole = len(runs(CAT)) + 1
    assert [cached(uuid) for uuid in ("one", "one", "two", None, None)] == [0, whole, 2, 2, whole]
    replies = {tuple(record.output_ids) for record in worker.log}
    assert len(replies) == 1, "the model sees the picture, whatever its name is"


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/cat.png", "/tmp/cat.png", "file:///tmp/cat.png", 7])
def test_an_image_is_a_data_url(worker: EmbeddedWorker, url: Any) -> None:
    assert ask(worker, PICTURE, [{"type": "image_url", "url": url}])[0] == 400
    assert len(worker.out_of_range) == 1


def test_malformed_parts_are_refused(worker: EmbeddedWorker) -> None:
    nested = {"type": "image_url", "image_url": {"url": data_url(CAT)}}
    for parts in ([nested], {"type": "image_url"}, ["cat"], [{"type": "image_url", "uuid": 7}]):
        assert ask(worker, PICTURE, parts)[0] == 400
    assert ask(worker, PICTURE, [part(CAT), part(DOG)])[0] == 500
    assert worker.log == []


def test_a_model_that_sees_nothing_takes_no_images() -> None:
    with EmbeddedWorker(interface="vllm") as worker:
        status, error = ask(worker, [5, 6], [part(CAT)])
        assert (status, error["error"]["message"]) == (400, "At most 0 image(s) may be provided in one prompt.")
        assert said(worker, [5, 6], [])["prompt_token_ids"] == [5, 6]
