"""How many data-parallel ranks a vLLM worker has, by what it says of itself."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from router.engines.vllm.engine import Vllm

INFO, SOURCES, METRICS = Vllm.rank_questions


def info(**parallel: Any) -> bytes:
    return msgspec.json.encode({"vllm_config": {"parallel_config": parallel, "model_config": {}}, "vllm_env": {}})


@pytest.mark.parametrize(
    ("path", "answer", "ranks"),
    [
        (INFO, info(data_parallel_size=4, data_parallel_size_local=2), 4),
        (INFO, info(data_parallel_size=8, data_parallel_size_local=1, data_parallel_external_lb=True), 1),
        (INFO, info(data_parallel_size=8, data_parallel_size_local=2, data_parallel_hybrid_lb=True), 2),
        (INFO, b'{"vllm_config": "data_parallel_size=4"}', None),
        (INFO, b'{"vllm_config": {}}', None),
        (SOURCES, b'{"0": {"publisher": "zmq"}, "1": {}, "2": null}', 3),
        (SOURCES, b'{"5": {}}', 1),
        (SOURCES, b"{}", None),
        (SOURCES, b"not json", None),
        (
            METRICS,
            b'# HELP a\nvllm:running{engine="0",model_name="m"} 1\nvllm:running{model_name="m",engine="1"} 0\n',
            2,
        ),
        (METRICS, b'vllm:x{engine="7"} 1\nvllm:y{engine="7"} 1\n', 1),
        (METRICS, b'vllm:cache_config_info{engine=""} 1\nother:x{engine="0"} 1\n# vllm:x{engine="3"} 1\n', None),
        (METRICS, b"", None),
    ],
)
def test_each_place_says_it_in_its_own_way(path: str, answer: bytes, ranks: int | None) -> None:
    assert Vllm().ranks(path, answer) == ranks


def test_the_rank_goes_into_a_header() -> None:
    headers = [(b"a", b"b")]
    assert Vllm().ranked("/generate", headers, b"{}", 3) == ([*headers, (b"x-data-parallel-rank", b"3")], b"{}")
