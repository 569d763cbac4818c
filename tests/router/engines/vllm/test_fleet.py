"""Fleet calls in SGLang's words, as a vLLM worker gets them: bad ones are refused, and odd answers survived."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from router.engines.engine import EngineAnswer, EngineCall, KnownWorker
from router.engines.vllm.engine import DEV_MODE
from router.engines.vllm.fleet import fleet_exchange

WORKER = KnownWorker(frozenset({DEV_MODE}))


@pytest.mark.parametrize("mode", ["x", "", None, {}, [], [1], 5])
def test_a_pause_of_another_mode_is_refused(mode: Any) -> None:
    found = fleet_exchange(EngineCall("POST", "/pause_generation", msgspec.json.encode({"mode": mode})), WORKER)
    assert isinstance(found, EngineAnswer)
    assert found.status == 400


@pytest.mark.parametrize("models", [{}, {"data": None}, {"data": []}, {"data": {"a": 1}}, {"data": ["a"]}, {"data": 5}])
def test_a_description_without_a_model_names_none(models: dict[str, Any]) -> None:
    exchange = fleet_exchange(EngineCall("GET", "/get_model_info", b""), KnownWorker())
    assert exchange is not None
    assert not isinstance(exchange, EngineAnswer)
    found = exchange.whole([EngineAnswer(200, msgspec.json.encode(models))])
    assert isinstance(found, EngineAnswer)
    assert (found.status, msgspec.json.decode(found.body)["model_path"]) == (200, None)
