"""The real engines that tests run on: what a test asks of a worker past the router, and what an engine cannot do.

To the router tests say the same, whatever engine is behind it.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from tests.support import sglang_server, vllm_server
from tests.support.client import call
from tests.support.engine_server import EngineServer, Kit, free_port

Json = dict[str, Any]


class Engine(ABC):
    """A kind of worker.

    Attributes:
        kit: sets it up and runs it.
        flush: the call that empties the cache.
        page: tokens in a block of its cache.
    """

    kit: Kit
    flush: str
    page: int
    _heard: str

    @property
    @abstractmethod
    def flags(self) -> list[tuple[str, ...]]:
        """The flags of the two workers that most tests share, with ports of their own each time."""

    @abstractmethod
    def progress(self, worker: EngineServer) -> tuple[int, int]:
        """Return for how many requests a worker samples, and a number that grows with what it has sampled."""

    @abstractmethod
    def version(self, worker: EngineServer) -> str: ...

    @abstractmethod
    def set_version(self, worker: EngineServer, version: str) -> None:
        """Name the weights, without an abort."""

    @abstractmethod
    def abort(self, worker: EngineServer, rid: str | None = None) -> None:
        """End one generation, by the id that the router gave it, or all of them."""

    @abstractmethod
    def is_idle(self, worker: EngineServer) -> bool: ...

    def cached(self, known: int) -> int:
        """Return how many of so many tokens, read and sampled, it finds in its cache: not the last one, and whole blocks."""
        return (known - 1) // self.page * self.page

    def aborts_heard(self, worker: EngineServer) -> int:
        """Return how often a worker was told to abort, by its own access log."""
        return len(re.findall(self._heard, worker.log_path.read_text(errors="replace")))


class _SGLang(Engine):
    kit = sglang_server.KIT
    flush = "/flush_cache"
    page = 1
    _heard = '"POST /abort_request'

    @property
    def flags(self) -> list[tuple[str, ...]]:
        """Streams: the first worker's are cumulative, the second's deltas."""
        return [(), ("--incremental-streaming-output",)]

    def progress(self, worker: EngineServer) -> tuple[int, int]:
        load = call(f"{worker.url}/v1/loads?include=core").json()["loads"][0]
        return load["num_running_reqs"], load["num_used_tokens"]

    def version(self, worker: EngineServer) -> str:
        found: str = call(f"{worker.url}/model_info").json()["weight_version"]
        return found

    def set_version(self, worker: EngineServer, version: str) -> None:
        body = {"new_version": version, "abort_all_requests": False}
        assert call(f"{worker.url}/update_weight_version", body).status == 200

    def abort(self, worker: EngineServer, rid: str | None = None) -> None:
        assert call(f"{worker.url}/abort_request", {"abort_all": True} if rid is None else {"rid": rid}).status == 200

    def is_idle(self, worker: EngineServer) -> bool:
        return call(f"{worker.url}/flush_cache", {}).status == 200  # which is refused while something runs


class _VLLM(Engine):
    kit = vllm_server.KIT
    flush = "/reset_prefix_cache"
    page = 32  # the least that its attention on CPUs takes
    _heard = '"POST (?:/inference/v1)?/abort_requests'

    @property
    def flags(self) -> list[tuple[str, ...]]:
        """Both publish KV events."""
        found = []
        for _ in range(2):
            ports = {name: f"tcp://*:{free_port()}" for name in ("endpoint", "replay_endpoint")}
            config = {"enable_kv_cache_events": True, "publisher": "zmq", **ports}
            found.append(("--block-size", str(self.page), "--kv-events-config", json.dumps(config)))
        return found

    def progress(self, worker: EngineServer) -> tuple[int, int]:
        numbers = self._metrics(worker)
        return int(numbers["num_requests_running"]), int(numbers["generation_tokens_total"])

    def version(self, worker: EngineServer) -> str:
        found: str = call(f"{worker.url}/weight_info").json()["weight_version"]
        return found

    def set_version(self, worker: EngineServer, version: str) -> None:
        assert call(f"{worker.url}/update_weight_version", {"new_version": version}).status == 200

    def abort(self, worker: EngineServer, rid: str | None = None) -> None:
        ids = [] if rid is None else [f"generate-tokens-{rid}", f"cmpl-{rid}-0"]
        assert call(f"{worker.url}/abort_requests", {"request_ids": ids}).status == 200

    def is_idle(self, worker: EngineServer) -> bool:
        numbers = self._metrics(worker)
        return numbers["num_requests_running"] + numbers["num_requests_waiting"] == 0

    def _metrics(self, worker: EngineServer) -> Mapping[str, float]:
        lines = call(f"{worker.url}/metrics").content.decode().splitlines()
        found = (re.fullmatch(r'vllm:(\w+)\{engine="0",model_name="[^"]*"\} (\S+)', line) for line in lines)
        return {match[1]: float(match[2]) for match in found if match}


SGLANG: Engine = _SGLang()
VLLM: Engine = _VLLM()
ENGINES = {"sglang": SGLANG, "vllm": VLLM}

CANNOT: dict[str, dict[str, str]] = {
    "sglang": {
        "test_real_vision_router.test_vllm_keeps_a_placeholder_behind_the_last_picture": (
            "SGLang takes it for a picture's, so it is never sent this"
        ),
    },
    "vllm": {
        "test_real_sglang.test_the_embedded_engine_says_the_same_about_the_same_ids": "in vLLM's words: test_both_vllm.py",
        "test_real_aborts.test_what_is_aborted_after_a_pause_retracted_it_is_kept": (
            "a vLLM stream never repeats what it has said: there is no such end"
        ),
        "test_real_aborts.test_an_update_that_was_refused_may_have_loaded_the_weights": (
            "vLLM flushes no cache with its weights: it refuses no update for a cache"
        ),
        "test_real_restarts.test_turns_at_two_routers_are_one_sequence": "what a store holds does not depend on the engine",
        "test_real_restarts.test_a_session_at_two_routers_is_one_sequence": "the same",
        "test_real_restarts.test_a_session_and_a_restart_after_each_turn_are_one_sequence": "the same",
        "test_real_trl.test_two_steps_of_messages": "what the rollout function makes of messages does not depend on the engine",
    },
}
"""For each engine the tests of shared modules, as `module.function`, that it does not run, and why."""


def cannot(engine: str, test: str) -> str | None:
    """Return why a test does not run on an engine; None if it does."""
    return CANNOT[engine].get(test)
