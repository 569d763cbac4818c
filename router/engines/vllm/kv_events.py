"""Where a vLLM worker publishes its KV cache events. The events and their sockets are those of SGLang."""

from __future__ import annotations

import msgspec

from router.engines.json import JSON_ERRORS
from router.engines.sglang.kv_events import KvReader, KvSource, published


class _Publisher(msgspec.Struct):
    """One entry of `GET /kv_event_sources`, which maps data-parallel ranks to the `--kv-events-config` of each."""

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    topic: str = ""


def kv_source(url: str, sources: bytes) -> KvSource | None:
    """Return where the worker at `url` publishes, from its answer to `GET /kv_event_sources`; None if it does not, over TCP."""
    try:
        ranks = msgspec.json.decode(sources, type=dict[int, _Publisher])
    except JSON_ERRORS:
        return None
    first = ranks.get(0)
    if first is None or not first.enable_kv_cache_events:
        return None
    return published(
        url, first.publisher or "zmq", first.endpoint, first.replay_endpoint, topic=first.topic, ranks=len(ranks)
    )


VLLM_KV = KvReader(("/kv_event_sources",), kv_source)
