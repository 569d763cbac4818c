"""Where SGLang's workers publish their KV events."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.engines.form.kv_events import KvSource
from router.engines.sglang.engine import published_source

URL = "http://10.0.0.7:30001"

DESCRIBED = {
    "publisher": "zmq",
    "endpoint_host": "*",
    "endpoint_port_base": 5557,
    "topic": "",
    "block_size": 16,
    "dp_size": 1,
    "replay_endpoint_port_base": 5558,
}


class TestSources:
    def test_a_worker_describes_its_publisher(self) -> None:
        source = published_source(URL, json.dumps({"version": "0.5.23", "kv_events": DESCRIBED}).encode())
        assert source == KvSource("10.0.0.7", 5557, replay_port=5558)
        assert source.endpoint(0) == "tcp://10.0.0.7:5557"
        assert source.replay_endpoint(0) == "tcp://10.0.0.7:5558"

    def test_each_rank_has_ports_of_its_own(self) -> None:
        source = published_source(URL, json.dumps({"kv_events": {**DESCRIBED, "dp_size": 4, "topic": "kv"}}).encode())
        assert source is not None
        assert (source.ranks, source.topic) == (4, "kv")
        assert source.endpoint(3) == "tcp://10.0.0.7:5560"
        assert source.replay_endpoint(3) == "tcp://10.0.0.7:5561"

    def test_without_replays(self) -> None:
        told = {key: value for key, value in DESCRIBED.items() if key != "replay_endpoint_port_base"}
        source = published_source(URL, json.dumps({"kv_events": told}).encode())
        assert source is not None
        assert source.replay_endpoint(0) is None

    @pytest.mark.parametrize(
        ("url", "host"), [("http://[::1]:30001", "[::1]"), ("https://gpu-7.example", "gpu-7.example")]
    )
    def test_the_host_is_that_of_the_workers_url(self, url: str, host: str) -> None:
        told = {**DESCRIBED, "endpoint_host": "169.254.169.254"}
        source = published_source(url, json.dumps({"kv_events": told}).encode())
        assert source is not None
        assert source.endpoint(0) == f"tcp://{host}:5557"

    def test_an_older_worker_is_read_by_its_flag(self) -> None:
        flag = {"publisher": "zmq", "endpoint": "tcp://*:6000", "replay_endpoint": "tcp://*:6100", "topic": "kv"}
        info = {"kv_events_config": json.dumps(flag), "dp_size": 2, "page_size": 16}
        assert published_source(URL, json.dumps(info).encode()) == KvSource("10.0.0.7", 6000, "kv", 2, 6100)

    @pytest.mark.parametrize(
        "info",
        [
            {},
            {"kv_events": None, "kv_events_config": None},
            {"kv_events": {**DESCRIBED, "publisher": "null"}},
            {"kv_events": {**DESCRIBED, "endpoint_port_base": 0}},
            {"kv_events": {**DESCRIBED, "endpoint_port_base": 65535, "dp_size": 2}},
            {"kv_events": {**DESCRIBED, "dp_size": 0}},
            {"kv_events": "yes"},
            {"kv_events_config": ""},
            {"kv_events_config": "{"},
            {"kv_events_config": "{}"},
            {"kv_events_config": '{"publisher": "zmq", "endpoint": "ipc:///tmp/kv"}'},
            {"kv_events_config": '{"publisher": "zmq", "endpoint": "tcp://*:no"}'},
            [],
        ],
    )
    def test_a_worker_that_does_not_publish_has_no_source(self, info: Any) -> None:
        assert published_source(URL, json.dumps(info).encode()) is None

    def test_an_invalid_answer_has_no_source(self) -> None:
        assert (
            published_source(URL, b"") is published_source(URL, b"\xff") is published_source("nonsense", b"{}") is None
        )
