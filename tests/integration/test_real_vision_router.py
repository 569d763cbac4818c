"""Conversations with images through the router, on a real engine: by the worker's own words, each is one sequence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import real_router
from tests.support.client import call
from tests.support.counted_wire import counted_wire
from tests.support.engine_server import EngineServer
from tests.support.pictures import data_url, digest, picture
from tests.support.vision import IMAGE as PICTURE_IDS
from tests.support.vision import PLACEHOLDER, Vision, models

Json = dict[str, Any]
ENGINES = ("sglang", "vllm")
PICTURES = [picture(56, 56, seed) if seed % 2 else picture(300, 200, seed) for seed in range(5)]
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture(scope="module")
def router(vision: Vision, vision_worker: EngineServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("router") / "router.log"
    with real_router([vision_worker.url], models() / vision.family, log) as url:
        yield url


def ask(url: str, path: str, body: Json) -> tuple[Json, dict[str, str]]:
    answer = call(url + path, body, timeout=120)
    assert answer.status in (200, 201), answer.content
    return answer.json(), answer.headers


def test_a_session_with_a_picture_in_each_turn_is_one_sequence(router: str, vision: Vision) -> None:
    """The engine finds every turn's whole prompt and reply in its cache at the next turn, but for the last token."""
    name = ask(router, "/sessions", {})[0]["session_id"]
    messages: list[Json] = []
    before = 0
    for turn, content in enumerate(PICTURES):
        part = {"type": "image_url", "image_url": {"url": data_url(content)}}
        messages.append({"role": "user", "content": [{"type": "text", "text": f"Look {turn}"}, part]})
        body = {"messages": messages, "max_tokens": 8, "temperature": 1.0}
        reply, headers = ask(router, f"/sessions/{name}/v1/chat/completions", body)
        assert headers["x-radix-recorded"] == "exact"
        assert "x-radix-reasons" not in headers
        usage = reply["usage"]
        assert int(headers["x-radix-reused-tokens"]) == before
        if before:
            assert usage["prompt_tokens_details"]["cached_tokens"] >= vision.cached(before)
        before = usage["prompt_tokens"] + usage["completion_tokens"]
        messages.append(reply["choices"][0]["message"])
    (found,) = ask(router, f"/sessions/{name}/finalize", {})[0]["trajectories"]
    assert (found["exact"], found["num_turns"]) == (True, len(PICTURES))
    assert len(found["prompt_ids"]) + len(found["response_ids"]) == before
    assert [one["digest"] for one in found["multi_modal_data"]["images"]] == [digest(one) for one in PICTURES]


def test_a_text_with_pictures_is_one_sequence(router: str, vision: Vision) -> None:
    text, trained, total = "", 0, 0
    for turn in range(len(PICTURES)):
        text += f" {turn} {IMAGE}"
        images = [data_url(one) for one in PICTURES[: turn + 1]]
        body = {"text": text, "image_data": images, "sampling_params": {"max_new_tokens": 6, "temperature": 1.0}}
        reply, headers = ask(router, "/generate", body)
        assert headers["x-radix-recorded"] == "exact"
        meta = reply["meta_info"]
        assert int(headers["x-radix-prompt-tokens"]) == meta["prompt_tokens"]
        assert meta["cached_tokens"] >= (vision.cached(total) if turn else 0)
        text += reply["text"]
        trained += meta["completion_tokens"]
        total = meta["prompt_tokens"] + meta["completion_tokens"]
    named = [digest(one) for one in PICTURES]
    found, _ = ask(router, "/retrieve_from_text", {"text": text, "image_data": named})
    assert (found["exact"], found["reasons"]) == (True, [])
    assert (found["token_length"], sum(found["loss_mask"])) == (total, trained)
    assert [one["digest"] for one in found["multi_modal_data"]["images"]] == named


@pytest.mark.parametrize("unknown", [151_669, 151_935])
def test_an_id_that_the_tokenizer_does_not_know_is_kept(router: str, vision: Vision, unknown: int) -> None:
    """These models have more ids than their tokenizer. SGLang shows token 0 for such an id, vLLM nothing."""
    sampling = {"max_new_tokens": 3, "logit_bias": {str(unknown): 100}, "temperature": 0}
    first, headers = ask(router, "/generate", {"text": "Look", "sampling_params": sampling})
    assert headers["x-radix-recorded"] == "exact"
    assert first["text"] == {"SGLang": "!!!", "vLLM": ""}[vision.kit.name]
    text = "Look" + first["text"]
    found, _ = ask(router, "/retrieve_from_text", {"text": text})
    assert (found["exact"], found["reasons"], found["tokens"][-3:]) == (True, [], [unknown] * 3)
    _, headers = ask(router, "/generate", {"text": text + " again", "sampling_params": {"max_new_tokens": 2}})
    assert headers["x-radix-recorded"] == "exact"
    name = ask(router, "/sessions", {})[0]["session_id"]
    messages: list[Json] = [{"role": "user", "content": "Look"}]
    for more in ({"max_tokens": 3, "logit_bias": {str(unknown): 100}}, {"max_tokens": 2}):
        reply, headers = ask(router, f"/sessions/{name}/v1/chat/completions", {"messages": messages, **more})
        assert headers["x-radix-recorded"] == "exact"
        messages += [reply["choices"][0]["message"], {"role": "user", "content": "Again"}]
    (kept,) = ask(router, f"/sessions/{name}/finalize", {})[0]["trajectories"]
    assert (kept["exact"], kept["num_turns"]) == (True, 2)
    assert kept["response_ids"][:3] == [unknown] * 3


def test_a_picture_crosses_the_wire_to_vllm_once(vision: Vision, vision_worker: EngineServer, tmp_path: Path) -> None:
    """Ten turns with a picture in each take about what ten uploads take. SGLang gets all of them in every turn."""
    pictures = [picture(300, 200, 100 + seed, compress_level=0) for seed in range(10)]
    upload = sum(len(data_url(one)) for one in pictures)
    text = ""
    with (
        counted_wire(vision_worker.url) as wire,
        real_router([wire.url], models() / vision.family, tmp_path / "router.log") as url,
    ):
        before = wire.sent
        for turn in range(len(pictures)):
            text += f" {turn} {IMAGE}"
            images = [data_url(one) for one in pictures[: turn + 1]]
            reply, headers = ask(
                url, "/generate", {"text": text, "image_data": images, "sampling_params": {"max_new_tokens": 4}}
            )
            assert headers["x-radix-recorded"] == "exact"
            text += reply["text"]
        ratio = (wire.sent - before) / upload
    print(f"{vision.kit.name}: {ratio:.3f} uploads")
    if vision.kit.name == "vLLM":
        assert ratio <= 1.2
    else:
        assert ratio == pytest.approx(5.5, rel=0.1)


def test_vllm_keeps_a_placeholder_behind_the_last_picture(vision: Vision, vision_worker: EngineServer) -> None:
    """So a conversation in which the model sampled one goes on, as long as no picture follows."""
    words = (3_838, 374, 419)
    sent = (*words, *PICTURE_IDS, *words, PLACEHOLDER, *words)
    seen = vision.ask(vision_worker, sent, PICTURES[:1])
    assert seen.spans is not None
    ((offset, length),) = seen.spans
    assert offset == len(words) + 1
    assert seen.prompt_ids == [*sent[:offset], *[PLACEHOLDER] * length, *sent[offset + 1 :]]
