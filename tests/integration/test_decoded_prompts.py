"""What workers make of texts that spell a placeholder, and how the router learns whether they look at texts at all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.support.asking import until
from tests.support.pictures import data_url, digest, picture
from tests.support.stack import Stack, stack
from worker.models.ngram import shipped_image_tokenizer

Json = dict[str, Any]
FOLDER = shipped_image_tokenizer()
PAD = "<|image_pad|>"
IMAGE = f"<|vision_start|>{PAD}<|vision_end|>"
CAT = picture(40, 30, 81)


def spelled(word: str) -> list[int]:
    """Ordinary tokens that spell a word."""
    encode = Tokenizer.from_file(str(FOLDER / "tokenizer.json")).encode
    return [*encode(word[:4], add_special_tokens=False).ids, *encode(word[4:], add_special_tokens=False).ids]


def generated(text: str, *images: bytes) -> Json:
    made: Json = {"text": text, "sampling_params": {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}}
    return made | {"image_data": [data_url(one) for one in images]} if images else made


def chat(text: str, *images: bytes) -> Json:
    parts = [{"type": "image_url", "image_url": {"url": data_url(one)}} for one in images]
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}], "max_tokens": 2}


def refused(served: Stack, path: str, body: Json) -> Json:
    before = served.workers[0].received
    answer = served.post(path, body)
    assert answer.status == 400, answer.content
    assert served.workers[0].received == before, "it reached a worker"
    found: Json = answer.json()["error"]
    return found


@pytest.mark.parametrize("cache", [0, 64])
@pytest.mark.parametrize("word", [PAD, "<image>"])
def test_a_sampled_text_that_spells_a_placeholder(cache: int, word: str) -> None:
    """It is kept either way; beside an image it is refused if the worker would make a text of the ids."""
    with stack("qwen", styles=("cumulative",), folder=FOLDER, preprocess_cache=cache) as served:
        if not cache:  # it is asked in the background
            until(lambda: b"--mm-preprocess-cache-size-mb" in served.get("/workers").content)
        ids = spelled(word)
        served.workers[0].script(ids=ids, finish="length")
        first = served.generate({"text": "Say:", "sampling_params": {"max_new_tokens": len(ids)}}).record
        assert first.output_ids == ids
        sent = [*first.input_ids, *ids, *spelled("\n\nand"), 4097]
        body = {"input_ids": sent, "image_data": [data_url(CAT)], "sampling_params": {"max_new_tokens": 2}}
        if cache:
            assert served.generate(body).record.images == (digest(CAT),)
            assert b"--mm-preprocess-cache-size-mb" not in served.get("/workers").content
        else:
            assert refused(served, "/generate", body)["code"] == "placeholder_in_text"
            plain = {"input_ids": sent[:-1], "sampling_params": {"max_new_tokens": 2}}
            assert served.generate(plain).record.images == ()


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_sglangs_own_word_for_an_image(kind: str) -> None:
    options: Json = {"interface": "vllm"} if kind == "vllm" else {}
    with stack("qwen", styles=("cumulative",), folder=FOLDER, **options) as served:
        for path, body in (
            ("/generate", generated(f"<image> {IMAGE}", CAT)),
            ("/v1/chat/completions", chat("An <image> tag", CAT)),
        ):
            if kind == "sglang":
                assert refused(served, path, body)["code"] == "placeholder_in_text"
            else:
                assert served.post(path, body).status == 200
        assert served.post("/generate", generated("<image> alone")).status == 200
        assert served.post("/v1/chat/completions", chat("An <image> tag")).status == 200


@pytest.mark.parametrize("number", [5, 10**6])
def test_another_models_placeholder_is_found_at_the_start(
    tmp_path: Path, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(FOLDER, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"image_token_id": number}))
    with stack("qwen", styles=("cumulative",), folder=folder) as served:
        assert f"does not spell the token {number}" in caplog.text
        answer = served.post("/generate", generated("Look", CAT))
        assert answer.headers["x-radix-recorded"].startswith("no; multimodal")
