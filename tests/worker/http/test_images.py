"""Images in /generate, in front of the shipped tokenizer and a real vocabulary."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.image_vocabularies import data_url, image_vocabulary
from tests.worker.talk import events, generate, request
from worker.engine.prompt_images import LONGEST, SHORTEST
from worker.models.ngram import shipped_image_tokenizer
from worker.worker import EmbeddedWorker

CAT, DOG = b"\x89PNG a cat", b"\x89PNG a dog"
START, PAD, END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
PICTURE = START + PAD + END
GREEDY = {"temperature": 0, "max_new_tokens": 24}


@pytest.fixture(params=["shipped", "qwen"])
def worker(request: pytest.FixtureRequest) -> Iterator[EmbeddedWorker]:
    folder = shipped_image_tokenizer() if request.param == "shipped" else image_vocabulary("qwen")
    with EmbeddedWorker(folder) as running:
        yield running


def digest(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


def compact(worker: EmbeddedWorker, *parts: str) -> list[int]:
    return worker.vocabulary.encode_bare("".join(parts))


def runs(worker: EmbeddedWorker, expanded: list[int], sent: list[int], images: int) -> list[int]:
    """The length of the run that each of the first `images` placeholders of `sent` became; all other ids must be equal."""
    pad, found, at = worker.vocabulary.image_id, [], 0
    for place, number in enumerate(sent):
        assert expanded[at] == number
        length = 1
        if number == pad and len(found) < images:
            after = sent[place + 1]
            assert after != pad, "ambiguous"
            length = expanded.index(after, at) - at
            assert expanded[at : at + length] == [pad] * length
            found.append(length)
        at += length
    assert at == len(expanded)
    return found


def answer(worker: EmbeddedWorker, sent: Any, images: Any, **body: Any) -> Any:
    body = {"return_prompt_token_ids": True, "sampling_params": GREEDY, **body}
    return generate(worker, sent, image_data=images, **body)


def refused(worker: EmbeddedWorker, **body: Any) -> str:
    status, content, _ = request(worker, "/generate", body)
    assert status == 400, content
    return content.decode()


def test_each_placeholder_becomes_the_run_of_its_image(worker: EmbeddedWorker) -> None:
    sent = compact(worker, "Look: ", PICTURE, " and ", PICTURE, "!")
    reply = answer(worker, sent, [data_url(CAT), data_url(DOG)])
    lengths = runs(worker, reply["prompt_token_ids"], sent, 2)
    assert all(SHORTEST <= length <= LONGEST for length in lengths)
    assert len(set(lengths)) == 2
    assert reply["meta_info"]["prompt_tokens"] == len(sent) + sum(lengths) - 2
    assert reply["meta_info"]["image_tokens"] == sum(lengths)
    (record,) = worker.log
    assert record.input_ids == reply["prompt_token_ids"]
    assert record.images == (digest(CAT), digest(DOG))
    assert not record.from_text
    swapped = answer(worker, sent, [data_url(DOG), data_url(CAT, "image/jpeg")])["prompt_token_ids"]
    assert runs(worker, swapped, sent, 2) == lengths[::-1], "the length is a function of the bytes"


def test_lengths_are_spread(worker: EmbeddedWorker) -> None:
    sent = compact(worker, PICTURE)
    replies = answer(worker, [sent] * 64, [[data_url(os.urandom(8))] for _ in range(64)])
    lengths = {len(reply["prompt_token_ids"]) - len(sent) + 1 for reply in replies}
    assert len(lengths) > 20
    assert lengths <= set(range(SHORTEST, LONGEST + 1))


def test_surplus_images_are_dropped_and_surplus_placeholders_stay(worker: EmbeddedWorker) -> None:
    sent = compact(worker, PICTURE, PICTURE)
    fewer = answer(worker, sent, data_url(CAT))
    (length,) = runs(worker, fewer["prompt_token_ids"], sent, 1)
    none = answer(worker, sent, None)
    assert none["prompt_token_ids"] == sent
    assert "image_tokens" not in none["meta_info"]
    one = compact(worker, PICTURE)
    more = answer(worker, one, [data_url(CAT), data_url(DOG)])
    assert runs(worker, more["prompt_token_ids"], one, 1) == [length]
    assert [record.images for record in worker.log] == [(digest(CAT),), (), (digest(CAT),)]
    assert worker.out_of_range == []


def test_a_batch_has_a_list_a_prompt_and_n_repeats_them(worker: EmbeddedWorker) -> None:
    one, none = compact(worker, PICTURE), compact(worker, "Hello")
    hashes = [[digest(CAT)], [], [digest(DOG)]]
    images = [[data_url(CAT)], [], [data_url(DOG)]]
    params = {"n": 2, "max_new_tokens": 2}
    replies = answer(worker, [one, none, one], images, mm_content_hashes=hashes, sampling_params=params)
    assert [record.images for record in worker.log] == [tuple(row) for row in hashes for _ in range(2)]
    assert [reply["prompt_token_ids"] for reply in replies] == [record.input_ids for record in worker.log]
    flat = answer(worker, [one, one], [data_url(CAT), data_url(DOG)])
    assert [reply["prompt_token_ids"] for reply in flat] == [
        replies[0]["prompt_token_ids"],
        replies[4]["prompt_token_ids"],
    ]
    assert "equal to the batch size" in refused(worker, input_ids=[one, one], image_data=[[data_url(CAT)]])


def test_every_event_of_a_stream_has_the_expanded_ids(worker: EmbeddedWorker) -> None:
    sent = compact(worker, PICTURE)
    whole = answer(worker, sent, data_url(CAT))
    body = {"input_ids": sent, "image_data": data_url(CAT), "return_prompt_token_ids": True, "stream": True}
    status, content, _ = request(worker, "/generate", {**body, "sampling_params": GREEDY})
    assert status == 200
    got = events(content)
    assert len(got) > 1
    assert all(event["prompt_token_ids"] == whole["prompt_token_ids"] for event in got)


def test_hashes_are_checked(worker: EmbeddedWorker) -> None:
    sent, images = compact(worker, PICTURE, PICTURE), [data_url(CAT), data_url(DOG)]
    answer(worker, sent, images, mm_content_hashes=[digest(CAT), digest(DOG)])
    body = {"input_ids": sent, "image_data": images}
    assert "content hash mismatch" in refused(worker, **body, mm_content_hashes=[digest(DOG), digest(CAT)])
    assert "1 entries for 2 images" in refused(worker, **body, mm_content_hashes=[digest(CAT)])
    assert "64 hex digits" in refused(worker, **body, mm_content_hashes=["cat", "dog"])
    batch = {"input_ids": [sent, sent], "image_data": [images, images]}
    assert "batch size" in refused(worker, **batch, mm_content_hashes=[[digest(CAT), digest(DOG)]])
    assert len(worker.log) == 1
    assert worker.out_of_range == []


@pytest.mark.parametrize(
    "image",
    [
        "http://127.0.0.1:9/cat.png",
        "/tmp/cat.png",
        "file:///tmp/cat.png",
        "iVBORw0KGgo=",
        "data:image/png,cat",
        "data:image/png;base64,c@t",
        {"url": data_url(CAT)},
        7,
    ],
)
def test_an_image_is_a_data_url(image: Any) -> None:
    """A worker would open anything else, so a router that sends it is wrong: it is noted."""
    with EmbeddedWorker(shipped_image_tokenizer()) as worker:
        refused(worker, input_ids=compact(worker, PICTURE), image_data=[image])
        assert len(worker.out_of_range) == 1


def test_the_text_wins(worker: EmbeddedWorker) -> None:
    reply = answer(worker, "Look: " + PICTURE, data_url(CAT), input_ids=[5, 6])
    sent = compact(worker, "Look: ", PICTURE)
    assert reply["prompt_token_ids"] == answer(worker, sent, data_url(CAT))["prompt_token_ids"]
    assert [record.from_text for record in worker.log] == [True, False]
    assert generate(worker, "Look", input_ids=[5, 6], return_prompt_token_ids=True)["prompt_token_ids"] == [5, 6]


def test_what_is_sampled_depends_on_the_images(worker: EmbeddedWorker) -> None:
    sent = compact(worker, "<|im_start|>user\n", PICTURE, PICTURE, "What?<|im_end|>\n<|im_start|>assistant\n")
    pairs = [(CAT, DOG), (DOG, CAT), (CAT, CAT), (DOG, DOG)]
    for params in (GREEDY, {"sampling_seed": 3, "max_new_tokens": 24}):
        first, again = (
            [
                tuple(answer(worker, sent, list(map(data_url, pair)), sampling_params=params)["output_ids"])
                for pair in pairs
            ]
            for _ in range(2)
        )
        assert first == again
        assert len(set(first)) == len(pairs)


def test_ids_of_images_have_no_ids_among_the_logprobs(worker: EmbeddedWorker) -> None:
    sent = compact(worker, "Look: ", PICTURE, "!")
    reply = answer(worker, sent, data_url(CAT), return_logprob=True, logprob_start_len=0)
    said = [entry[1] for entry in reply["meta_info"]["input_token_logprobs"]]
    pad = worker.vocabulary.image_id
    assert said == [0 if number == pad else number for number in reply["prompt_token_ids"]]
    assert said.count(0) >= SHORTEST
    stray = answer(worker, sent, None, return_logprob=True, logprob_start_len=0)
    assert [entry[1] for entry in stray["meta_info"]["input_token_logprobs"]] == sent


def test_the_cache_knows_ids_and_images(worker: EmbeddedWorker) -> None:
    """Two images of one length make the same ids; only the same image is a hit."""
    sent = compact(worker, "Look: ", PICTURE, " there")

    def cached(content: bytes | None, ids: list[int] = sent) -> int:
        found: int = answer(worker, ids, content and data_url(content))["meta_info"]["cached_tokens"]
        return found

    def length(content: bytes) -> int:
        cached(content)
        return len(worker.log[-1].input_ids)

    wanted = length(CAT)
    twin = next(content for number in range(10_000) if length(content := b"%d" % number) == wanted)
    before = sent.index(worker.vocabulary.image_id or 0)
    assert request(worker, "/flush_cache", {})[0] == 200
    assert cached(CAT) == 0
    assert cached(CAT) == wanted - 1
    scored = answer(worker, sent, data_url(CAT), return_logprob=True, logprob_start_len=before + 2)["meta_info"]
    assert (scored["cached_tokens"], len(scored["input_token_logprobs"])) == (before + 2, wanted - before - 2)
    ids = worker.log[-1].input_ids
    assert cached(twin) == before
    assert worker.log[-1].input_ids == ids
    output = worker.log[-2].output_ids
    assert cached(CAT, [*sent, *output, 5]) == wanted + len(output) - 1, "the last sampled token is not computed"
    assert request(worker, "/update_weights_from_disk", {"model_path": "x"})[0] == 200
    assert cached(CAT) == 0


def test_the_worker_says_that_it_sees(worker: EmbeddedWorker) -> None:
    def told(folder: Any, **options: Any) -> tuple[Any, ...]:
        with EmbeddedWorker(folder, **options) as running:
            model, server = (json.loads(request(running, path)[1]) for path in ("/get_model_info", "/server_info"))
        return model["has_image_understanding"], model["model_type"], server.get("mm_preprocess_cache_size_mb")

    assert told(worker.tokenizer_path) == (True, "tito_demo_vl", 64)
    assert told(worker.tokenizer_path, preprocess_cache=0) == (True, "tito_demo_vl", 0)
    assert told(None) == (False, "embedded", None)


def test_a_model_that_sees_nothing_ignores_images_and_has_no_cache() -> None:
    with EmbeddedWorker() as worker:
        for _ in range(2):
            reply = generate(worker, [5, 6, 7], image_data=["/tmp/cat.png"], return_prompt_token_ids=True)
            assert reply["prompt_token_ids"] == [5, 6, 7]
            assert reply["meta_info"]["cached_tokens"] == 0


def test_the_context_is_as_long_as_the_expanded_ids(worker: EmbeddedWorker) -> None:
    with EmbeddedWorker(worker.tokenizer_path, context_length=16) as short:
        sent = compact(short, PICTURE, PICTURE, PICTURE)
        assert generate(short, sent, sampling_params={"max_new_tokens": 1})["meta_info"]["prompt_tokens"] == len(sent)
        images = [data_url(CAT)] * 3
        assert "longer than the model's context length" in refused(short, input_ids=sent, image_data=images)
