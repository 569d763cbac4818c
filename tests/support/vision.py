"""The real engines with models that see, which `tests/vlm_cpu/setup.sh` makes, and how each is asked about images."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.support.client import call
from tests.support.engine_server import EngineServer, Kit
from tests.support.engines import SGLANG, VLLM, Engine
from tests.support.pictures import data_url, digest

Json = dict[str, Any]
FAMILIES = ("qwen2_5_vl", "qwen3_vl")
PLACEHOLDER = 151_655
"""`<|image_pad|>` of both families."""
IMAGE = (151_652, PLACEHOLDER, 151_653)
"""An image as a template writes it, between its start and its end."""
SETUP = Path(__file__).resolve().parents[1] / "vlm_cpu" / "setup.sh"


def models() -> Path:
    """The folder of the models: the same rule as in setup.sh."""
    given = os.environ.get("TITO_VLM_DIR")
    return Path(given) if given else Path.home() / ".cache" / "tito-router" / "vlm-1"


@dataclass(frozen=True)
class Seen:
    """What an engine said about a prompt with images, and what it sampled behind it.

    Attributes:
        prompt_ids: expanded: as it computed with them.
        output_ids: sampled.
        logprobs: of what was sampled.
        text: of what was sampled.
        cached: how many of the prompt's ids it found in its cache.
        spans: where it put the images, as (offset, length); None where it does not say.
    """

    prompt_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]
    text: str
    cached: int
    spans: list[tuple[int, int]] | None


@dataclass(frozen=True)
class Vision(ABC):
    """An engine with a model that sees.

    Attributes:
        engine: the same one without.
        family: of the model, by the name of its chat template.
    """

    engine: Engine
    family: str

    @property
    def kit(self) -> Kit:
        return replace(self.engine.kit, served=models() / self.family, mark=".vision")

    @property
    @abstractmethod
    def flags(self) -> tuple[str, ...]:
        """The flags of its workers."""

    @abstractmethod
    def ask(self, worker: EngineServer, ids: Sequence[int], images: Sequence[bytes], tokens: int = 8) -> Seen:
        """Send ids with a placeholder for each image, sample greedily, and return what the worker said."""

    def cached(self, known: int) -> int:
        """Return how many of so many tokens, read and sampled, it finds in its cache."""
        return self.engine.cached(known)


class _SGLangVision(Vision):
    @property
    def flags(self) -> tuple[str, ...]:
        # 20,000 tokens take little. With a smaller share it ends at its start if a neighbour takes memory meanwhile.
        return ("--mm-preprocess-cache-size-mb", "64", "--mem-fraction-static", "0.5")

    def ask(self, worker: EngineServer, ids: Sequence[int], images: Sequence[bytes], tokens: int = 8) -> Seen:
        body: Json = {"input_ids": list(ids), "return_logprob": True, "return_prompt_token_ids": True}
        body["sampling_params"] = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        if images:
            body["image_data"] = [data_url(image) for image in images]
            body["mm_content_hashes"] = [digest(image) for image in images]
        reply = _posted(f"{worker.url}/generate", body)
        meta = reply["meta_info"]
        logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
        return Seen(
            reply["prompt_token_ids"], reply["output_ids"], logprobs, reply["text"], meta["cached_tokens"], None
        )


class _VLLMVision(Vision):
    @property
    def flags(self) -> tuple[str, ...]:
        return ("--block-size", str(self.engine.page))

    def ask(self, worker: EngineServer, ids: Sequence[int], images: Sequence[bytes], tokens: int = 8) -> Seen:
        body: Json = {"token_ids": list(ids), "return_token_ids": True, "output_mode": "text"}
        body["sampling_params"] = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "logprobs": 0}
        if images:
            parts = [{"type": "image_url", "url": data_url(image), "uuid": digest(image)} for image in images]
            body["content_parts"] = parts
        reply = _posted(f"{worker.url}/inference/v1/generate", body)
        (choice,) = reply["choices"]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        spans = [(one["offset"], one["length"]) for one in (reply["mm_placeholders"] or {}).get("image", [])]
        cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        return Seen(reply["prompt_token_ids"], choice["token_ids"], logprobs, choice["text"], cached, spans)


def _posted(url: str, body: Json) -> Json:
    answer = call(url, body)
    assert answer.status == 200, answer.content
    found: Json = answer.json()
    return found


VISIONS: dict[str, list[Vision]] = {
    "sglang": [_SGLangVision(SGLANG, family) for family in FAMILIES],
    "vllm": [_VLLMVision(VLLM, family) for family in FAMILIES],
}
"""Each engine with each family."""
