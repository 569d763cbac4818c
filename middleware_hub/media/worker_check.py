"""Whether a worker takes the ids of a prompt with images as they are, and whether it takes images that the router cannot read.

SGLang (0.5.23) decodes those of some families to a text, looks for placeholders in it, and encodes it again, unless it has a
cache of preprocessed images (`--mm-preprocess-cache-size-mb`), which `/server_info` tells.
Whether it takes images, `/model_info` tells. vLLM (0.32) does not say.
"""

from __future__ import annotations

import msgspec

from middleware_hub.media.family_files import SIGHT
from middleware_hub.media.media import Media
from router.engines.engine import EngineCall
from router.engines.json import JSON_ERRORS
from router.workers.worker import WorkerCheck

_DECODED = frozenset({"qwen2_vl", "qwen2_5_vl", "tito_demo_vl"})


class _ServerInfo(msgspec.Struct):
    mm_preprocess_cache_size_mb: int | None = None


_decode = msgspec.json.Decoder(_ServerInfo).decode


def decoding_check(media: Media) -> WorkerCheck:
    """Return the question. If a worker decodes prompts, `media` is told."""

    def judge(answer: bytes) -> str | None:
        try:
            cache = _decode(answer).mm_preprocess_cache_size_mb
        except JSON_ERRORS:
            return None
        if cache != 0 or media.family.model_type not in _DECODED:
            return None
        media.decoding = True
        return (
            "it keeps no preprocessed images, so it decodes prompts with images, and a conversation that spells the"
            " placeholder is refused: start it with --mm-preprocess-cache-size-mb 64"
        )

    return WorkerCheck(EngineCall("GET", "/server_info"), judge)


class _ModelInfo(msgspec.Struct):
    has_image_understanding: bool | None = None


_decode_model = msgspec.json.Decoder(_ModelInfo).decode


def sight_check(path: str) -> WorkerCheck:
    """Return the question for a router that reads no images. `path` is the path of its tokenizer."""

    def judge(answer: bytes) -> str | None:
        try:
            sees = _decode_model(answer).has_image_understanding
        except JSON_ERRORS:
            return None
        return f"it takes images, and the router reads none with --tokenizer-path {path}. {SIGHT}" if sees else None

    return WorkerCheck(EngineCall("GET", "/model_info"), judge)
