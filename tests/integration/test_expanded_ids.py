"""`x-radix-media: expanded`: a client that keeps the ids an engine computed with sends these back, on the whole product.

The oracle is the worker's own log: the ids that it computed with are those of the client.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from router.config import StoreConfig
from tests.support.asking import settle
from tests.support.pictures import data_url, digest, picture
from tests.support.stack import Stack, stack
from worker.models.ngram import shipped_image_tokenizer

Json = dict[str, Any]
FOLDER = shipped_image_tokenizer()
PAD, OPEN, CLOSE = 4097, 4096, 4098
CAT, DOG, SUN = (picture(40, 30, seed) for seed in (11, 12, 13))
EXPANDED = {"x-radix-media": "expanded"}


@pytest.fixture(scope="module")
def shared() -> Iterator[Stack]:
    with stack("qwen", folder=FOLDER) as made:
        yield made


@pytest.fixture
def served(shared: Stack) -> Iterator[Stack]:
    yield shared
    settle(shared)


def body(ids: Any, images: Any, **more: Any) -> Json:
    params = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True, **more.pop("sampling", {})}
    return {"input_ids": ids, "image_data": images, "sampling_params": params, **more}


def length(served: Stack, content: bytes) -> int:
    """Teach the router the length of a picture, and return it."""
    record = served.generate(body([5, OPEN, PAD, CLOSE], [data_url(content)])).record
    return record.input_ids.count(PAD)


def refused(served: Stack, sent: Json, headers: dict[str, str] = EXPANDED) -> Json:
    before = [worker.received for worker in served.workers]
    answer = served.post("/generate", sent, headers=headers)
    assert answer.status == 400, answer.content
    assert [worker.received for worker in served.workers] == before, "it reached a worker"
    found: Json = answer.json()["error"]
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_a_conversation_goes_on_from_what_the_engine_computed(served: Stack, stream: bool, named: bool) -> None:
    """New pictures are compact, for no trainer can know their length; earlier ones are the run that the engine told."""
    ids, images, new = [7, 8, int(stream), int(named)], list[str](), list[int]()
    for turn in range(4):
        one = (CAT, DOG, SUN)[turn % 3]
        known = any(digest(one) in record.images for worker in served.workers for record in worker.log)
        images.append(digest(one) if named and known else data_url(one))
        sent = [*ids, *new, 9 + turn, OPEN, PAD, CLOSE, 10]
        reply = served.generate(body(sent, images, stream=stream), headers=EXPANDED)
        computed = reply.record.input_ids
        run = computed.index(CLOSE, len(sent) - 3) - len(sent) + 3
        assert computed == [*sent[:-3], *[PAD] * run, CLOSE, 10]
        assert len(reply.record.images) == turn + 1
        assert int(reply.answer.headers["x-radix-prompt-tokens"]) == len(computed)
        if turn:
            assert int(reply.answer.headers["x-radix-reused-tokens"]) >= len(ids)
        ids, new = computed, reply.record.output_ids


def test_batches_and_samples(served: Stack) -> None:
    cat, dog = length(served, CAT), length(served, DOG)
    prompts = [
        [21, OPEN, *[PAD] * cat, CLOSE],
        [22],
        [23, OPEN, *[PAD] * dog, CLOSE, 24, OPEN, *[PAD] * cat, CLOSE],
    ]
    images = [[data_url(CAT)], [], [data_url(DOG), digest(CAT)]]
    made = body(prompts, images, sampling={"n": 2, "temperature": 1})
    records = served.generate(made, headers=EXPANDED).records
    assert sorted(record.input_ids for record in records) == sorted(prompts * 2)


def test_pictures_side_by_side(served: Stack) -> None:
    """Each run is as long as its pictures together."""
    cat, dog = length(served, CAT), length(served, DOG)
    prompt = [31, *[PAD] * (cat + dog), 32]
    record = served.generate(body(prompt, [data_url(CAT), data_url(DOG)]), headers=EXPANDED).record
    assert record.input_ids == prompt
    for other in (cat + dog - 1, cat + dog + 1):
        sent = body([31, *[PAD] * other, 32], [data_url(CAT), data_url(DOG)])
        assert refused(served, sent)["code"] == "media_expanded"


def test_segments(served: Stack) -> None:
    cat = length(served, CAT)
    segments = [
        {"text": "Look:"},
        {"ids": [OPEN, *[PAD] * cat, CLOSE]},
        {"text": " <|vision_start|><|image_pad|><|vision_end|>"},
    ]
    sent = {"prompt_segments": segments, "image_data": [data_url(CAT)] * 2, "sampling_params": {"max_new_tokens": 2}}
    record = served.generate(sent, headers=EXPANDED).record
    assert record.input_ids.count(PAD) == 2 * cat


@pytest.mark.parametrize("more", [-1, 1, 7])
def test_another_length_is_refused_with_both_numbers(served: Stack, more: int) -> None:
    cat = length(served, CAT)
    for tail in ([], [9], [9, OPEN, *[PAD] * cat, CLOSE]):
        images = [data_url(CAT)] * (2 if PAD in tail else 1)
        found = refused(served, body([5, OPEN, *[PAD] * (cat + more), CLOSE, *tail], images))
        assert found["code"] == "media_expanded"
        assert f"have {cat + more} ids" in found["message"]
        assert f"it has {cat}" in found["message"]


def test_a_length_that_nobody_told_is_refused(served: Stack) -> None:
    """The rule of the family is an estimate: a run of that length proves nothing."""
    unseen = picture(64, 64, 99)
    found = refused(served, body([5, OPEN, *[PAD] * 4, CLOSE], [data_url(unseen)]))
    assert found["code"] == "media_expanded"
    assert "have 4 ids" in found["message"]
    assert served.generate(body([5, OPEN, PAD, CLOSE], [data_url(unseen)]), headers=EXPANDED).records


@pytest.mark.parametrize(
    ("ids", "images", "code"),
    [
        ([5, OPEN, PAD, CLOSE, OPEN, PAD, PAD, CLOSE], 1, "media_count"),
        ([5, OPEN, PAD, CLOSE, OPEN, PAD, CLOSE], 1, "media_count"),
        ([5, OPEN, PAD, CLOSE], 2, "media_count"),
        ([5], 1, "media_count"),
        ([5, *[PAD] * 9], 0, "media_expanded"),
    ],
)
def test_another_number_of_pictures_is_refused(served: Stack, ids: list[int], images: int, code: str) -> None:
    length(served, CAT)
    assert refused(served, body(ids, [data_url(CAT)] * images))["code"] == code


@pytest.mark.parametrize("run", [1, 2, 3, 4])
def test_ids_without_images_may_have_placeholders_that_the_model_sampled(served: Stack, run: int) -> None:
    """They are sent and kept as they are, as long as they are too few for an image."""
    prompt = [61, *[PAD] * run, 62]
    sent = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}}
    if run == 4:
        assert refused(served, sent, {})["code"] == "media_expanded"
        return
    reply = served.generate(sent)
    assert (reply.record.input_ids, reply.record.images) == (prompt, ())
    assert reply.answer.headers["x-radix-recorded"] == "exact"


def test_the_header_is_checked(served: Stack) -> None:
    cat = length(served, CAT)
    sent = body([5, OPEN, *[PAD] * cat, CLOSE], [data_url(CAT)])
    assert refused(served, sent, {})["code"] == "media_expanded"
    assert "x-radix-media" in refused(served, sent, {"x-radix-media": "compact"})["message"]
    assert "x-radix-media" in refused(served, sent, {"x-radix-medai": "expanded"})["message"]


def test_a_text_has_one_placeholder_for_each_picture(served: Stack) -> None:
    """The header is about ids: a text is compact, whatever it says."""
    text = "Text: <|vision_start|><|image_pad|><|vision_end|>"
    asked: Json = {"text": text, "image_data": [data_url(CAT)], "sampling_params": {"max_new_tokens": 2}}
    record = served.generate(asked, headers=EXPANDED).record
    assert record.input_ids.count(PAD) == length(served, CAT)
    decoded = text.replace("<|image_pad|>", "<|image_pad|>" * 5)
    for path in ("/generate", "/retrieve_from_text"):
        answer = served.post(path, asked | {"text": decoded}, headers=EXPANDED)
        assert (answer.status, answer.json()["error"]["code"]) == (400, "media_count")
        assert "(<|image_pad|>) in the text: 5, images in `image_data`: 1." in answer.json()["error"]["message"]


def test_after_a_restart_the_chain_tells_the_length(tmp_path: Path) -> None:
    store = StoreConfig(url=f"sqlite:{tmp_path / 'store'}")
    with stack("qwen", folder=FOLDER, store=store) as served:
        record = served.generate(body([5, OPEN, PAD, CLOSE], [data_url(CAT)])).record
    ids = record.input_ids + record.output_ids
    with stack("qwen", folder=FOLDER, store=store) as served:
        wrong = [*ids[:2], PAD, *ids[2:]]
        assert refused(served, body([*wrong, 6], [data_url(CAT)]))["code"] == "media_expanded"
        again = served.generate(body([*ids, 6], [data_url(CAT)]), headers=EXPANDED).record
        assert again.input_ids == [*ids, 6]
