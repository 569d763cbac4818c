"""Whether a worker takes the ids of a prompt with images as they are.

SGLang (0.5.23) decodes those of some families to a text, looks for placeholders in it, and encodes it again, unless it has a
cache of preprocessed images (`--mm-preprocess-cache-size-mb`), which `/server_info` tells.
"""

from __future__ import annotations

import msgspec

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
