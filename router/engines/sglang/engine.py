"""SGLang as an engine of the fleet. Its JSON is the common form."""

from __future__ import annotations

import msgspec

from router.engines.engine import Native
from router.engines.form.kv_events import KvReader, KvSource, configured_source, kv_source
from router.engines.json import JSON_ERRORS


class _Published(msgspec.Struct):
    publisher: str
    endpoint_port_base: int
    topic: str = ""
    dp_size: int = 1
    replay_endpoint_port_base: int | None = None


class _Described(msgspec.Struct):
    """The fields of `GET /server_info` about KV events: ports and topic or, from older workers, the text of the flag."""

    kv_events: _Published | None = None
    kv_events_config: str | None = None
    dp_size: int = 1


class _Flag(msgspec.Struct):
    publisher: str = "null"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    topic: str = ""


def published_source(url: str, server_info: bytes) -> KvSource | None:
    """Return where the worker at `url` publishes, from its answer to `GET /server_info`; None if it does not, over TCP."""
    try:
        info = msgspec.json.decode(server_info, type=_Described)
        if (found := info.kv_events) is not None:
            ports = found.endpoint_port_base, found.replay_endpoint_port_base
            return kv_source(url, found.publisher, ports, topic=found.topic, ranks=found.dp_size)
        if not info.kv_events_config:
            return None
        flag = msgspec.json.decode(info.kv_events_config, type=_Flag)
    except JSON_ERRORS:
        return None
    return configured_source(
        url, flag.publisher, flag.endpoint, flag.replay_endpoint, topic=flag.topic, ranks=info.dp_size
    )


SGLANG = Native("sglang", KvReader(("/server_info", "/get_server_info"), published_source))
"""The second path is the name before SGLang 0.5."""
