"""What the router relies on where a real engine sees images: it takes one placeholder for each, and says how long each is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.integration.test_both_engines import kinds
from tests.support.engine_server import EngineServer
from tests.support.pictures import picture
from tests.support.recorded import exchanges
from tests.support.recorded.make import empty_cache, perform
from tests.support.vision import IMAGE, PLACEHOLDER, Vision

ENGINES = ("sglang", "vllm")

Json = Any

SIZES = [(56, 56), (300, 200), (1024, 768)]
PATCH = {"qwen2_5_vl": 28, "qwen3_vl": 32}
"""The pixels of a token on a side."""
LEAST = {"qwen2_5_vl": 4, "qwen3_vl": 64}
"""The tokens of the smallest image."""
# Of Qwen's vocabulary, which both families have: <|im_start|>user\n, <|im_end|>\n<|im_start|>assistant\n, and words.
USER, ASSISTANT = (151_644, 872, 198), (151_645, 198, 151_644, 77_091, 198)
WORDS, MORE = (3_838, 374, 419), (437, 323, 419)
ODD = (289, 632, 27, 26_865, 29)  # letters and brackets that encoding their text would join


def expanded(ids: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Write each image's placeholder as often as it has tokens; those behind the last image were sampled, and stay."""
    left = list(lengths)
    return [one for number in ids for one in [number] * (left.pop(0) if number == PLACEHOLDER and left else 1)]


def length_of(vision: Vision, worker: EngineServer, image: bytes) -> int:
    return vision.ask(worker, IMAGE, [image], tokens=1).prompt_ids.count(PLACEHOLDER)


@pytest.mark.parametrize("size", SIZES)
def test_one_placeholder_comes_back_as_long_as_the_image(
    vision: Vision, vision_worker: EngineServer, size: tuple[int, int]
) -> None:
    sent = (*USER, *IMAGE, *WORDS, *ASSISTANT)
    seen = vision.ask(vision_worker, sent, [picture(*size)])
    length = len(seen.prompt_ids) - len(sent) + 1
    sides = [round(side / PATCH[vision.family]) for side in size]
    assert length == sides[0] * sides[1] or (length >= LEAST[vision.family] > sides[0] * sides[1])
    assert seen.prompt_ids == expanded(sent, [length])
    assert seen.spans in (None, [(len(USER) + 1, length)])


def test_the_next_turn_is_computed_with_the_same_ids(vision: Vision, vision_worker: EngineServer) -> None:
    """It sends the first one's ids again, sampled ones too, with its image and another: all come back, and are in the cache."""
    first, second = picture(300, 200, 1), picture(200, 300, 2, "JPEG")
    lengths = [length_of(vision, vision_worker, image) for image in (first, second)]
    prompt = (*USER, *IMAGE, *WORDS, *ODD, *ASSISTANT)
    one = vision.ask(vision_worker, prompt, [first], tokens=40)
    assert one.prompt_ids == expanded(prompt, lengths[:1])
    assert len(one.output_ids) == len(one.logprobs) == 40

    chain = (*prompt, *one.output_ids)
    assert PLACEHOLDER not in one.output_ids, "the model has sampled one: choose other words"
    sent = (*chain, *ASSISTANT[:2], *USER, *MORE, *IMAGE, *ASSISTANT)
    two = vision.ask(vision_worker, sent, [first, second])
    assert two.prompt_ids == expanded(sent, lengths)
    assert two.cached >= vision.cached(len(one.prompt_ids) + len(one.output_ids))
    if two.spans is not None:
        assert [length for _, length in two.spans] == lengths


def test_other_bytes_are_another_image(vision: Vision, vision_worker: EngineServer) -> None:
    """The cache is asked by the file that was sent: the same pixels in other bytes are not found."""
    sent = (*USER, *IMAGE, *WORDS * 20, *ASSISTANT)
    whole = vision.ask(vision_worker, sent, [picture(300, 200, 3)])
    again = vision.ask(vision_worker, sent, [picture(300, 200, 3)])
    other = vision.ask(vision_worker, sent, [picture(300, 200, 3, compress_level=1)])
    assert again.cached >= vision.cached(len(whole.prompt_ids))
    assert other.cached <= len(USER) + 1
    assert other.prompt_ids == again.prompt_ids
    assert other.output_ids == again.output_ids


def test_replies_are_as_recorded(vision: Vision, vision_worker: EngineServer) -> None:
    """In their keys, the kinds of values, the ids of prompts, where images stand, and how much of them was cached."""
    empty_cache(vision, vision_worker)
    for recorded in exchanges(vision.engine.kit.name.lower(), vision.family):
        now = perform(vision, vision_worker, recorded.name, recorded.path, recorded.body)
        assert now.status == recorded.status, recorded.name
        compared = (kinds(now.ends), kinds(recorded.ends))
        if "abort" in recorded.name:  # when it comes decides whether a token is still in the last event
            compared = (without_deltas(compared[0]), without_deltas(compared[1]))
        assert compared[0] == compared[1], recorded.name
        assert list(told(now.ends)) == list(told(recorded.ends)), recorded.name


DELTAS = frozenset({"token_ids", "output_ids", "logprobs", "output_token_logprobs", "text"})


def without_deltas(value: Json) -> Json:
    if isinstance(value, list):
        return [without_deltas(one) for one in value]
    if isinstance(value, dict):
        return {key: "new" if key in DELTAS else without_deltas(one) for key, one in value.items()}
    return value


TOLD = ("prompt_token_ids", "mm_placeholders", "prompt_tokens", "image_tokens", "cached_tokens")


def told(value: Json) -> Iterator[Json]:
    if isinstance(value, list):
        for one in value:
            yield from told(one)
    elif isinstance(value, dict):
        for key, one in value.items():
            if key in TOLD:
                yield key, one
            else:
                yield from told(one)
