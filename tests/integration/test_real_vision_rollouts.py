"""Rollouts with pictures on real engines: ten turns of `/generate` are one sequence, by the worker's own words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import real_router
from tests.support.client import call
from tests.support.engine_server import EngineServer
from tests.support.pictures import data_url, digest, picture
from tests.support.vision import PLACEHOLDER, Vision

ENGINES = ("sglang", "vllm")
TURNS = 10
PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture
def router(vision: Vision, vision_worker: EngineServer, tmp_path: Path) -> Iterator[str]:
    model = vision.kit.served
    assert model is not None
    with real_router([vision_worker.url], model, tmp_path / "router.log") as url:
        yield url


@pytest.mark.parametrize("stream", [False, True])
def test_ten_turns_with_a_picture_each_are_one_sequence(router: str, vision: Vision, stream: bool) -> None:
    """Each prompt, as the worker computed with it, begins with all that was computed and sampled before."""
    text, ids, pictures, cached = f"Rollout {stream}: ", list[int](), list[bytes](), list[tuple[int, int]]()
    mask = list[int]()
    for turn in range(TURNS):
        pictures.append(picture(90 + 30 * (turn % 3), 80 + turn, turn + 20 * stream))
        text += f"<|im_start|>user\nPicture {turn}: {PICTURE} What is new?<|im_end|>\n<|im_start|>assistant\n"
        images = [data_url(one) for one in pictures]
        body: dict[str, Any] = {"text": text, "image_data": images, "return_prompt_token_ids": True, "stream": stream}
        # A random model may sample a placeholder, which would end the rollout, or the end of a turn.
        body["sampling_params"] = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
        body["sampling_params"]["logit_bias"] = {str(PLACEHOLDER): -100}
        answer = call(f"{router}/generate", body)
        assert answer.status == 200, answer.content
        reply = last_event(answer.content) if stream else answer.json()
        prompt = reply["prompt_token_ids"]
        assert prompt[: len(ids)] == ids
        cached.append((reply["meta_info"]["cached_tokens"], len(ids)))
        asked = {"text": text + reply["text"], "image_data": [digest(one) for one in pictures]}
        found = call(f"{router}/retrieve_from_text", asked).json()
        assert (found["exact"], found["reasons"]) == (True, []), found["reasons"]
        sampled = found["tokens"][len(prompt) :]
        assert found["tokens"][: len(prompt)] == prompt
        assert len(sampled) == reply["meta_info"]["completion_tokens"]
        mask += [0] * (len(prompt) - len(ids)) + [1] * len(sampled)
        assert found["loss_mask"] == mask[len(mask) - len(found["loss_mask"]) :]
        shown = found["multi_modal_data"]["images"]
        assert [one["digest"] for one in shown] == [digest(one) for one in pictures]
        assert sum(end - begin for begin, end in (one["span"] for one in shown)) == prompt.count(PLACEHOLDER)
        ids, text = found["tokens"], text + reply["text"]
    for known, before in cached[1:]:
        assert known >= vision.cached(before), "the worker has the turns before in its cache"


def last_event(content: bytes) -> Any:
    lines = [line for line in content.split(b"\n") if line.startswith(b"data: {")]
    return json.loads(lines[-1][6:])
