"""The engines that workers may run. A new one is a row here."""

from __future__ import annotations

from collections.abc import Mapping

from router.engines.engine import SGLANG, Engine
from router.engines.form.fleet_paths import COMMON, FleetPath
from router.engines.sglang.kv_events import SGLANG_KV, KvReader
from router.engines.vllm.engine import Vllm
from router.engines.vllm.fleet_paths import VLLM
from router.engines.vllm.kv_events import VLLM_KV


def engines(*, incremental_streams: bool = False) -> Mapping[str, Engine]:
    """Return all engines by name. `incremental_streams`: the streams that adapters make hold only what is new in each event."""
    found: tuple[Engine, ...] = (SGLANG, Vllm(cumulative=not incremental_streams))
    return {engine.name: engine for engine in found}


def fleet_paths() -> tuple[FleetPath, ...]:
    """Return the calls that go to all workers: those of the common form, and each engine's own."""
    return (*COMMON, *VLLM)


KV_READERS: Mapping[str, KvReader] = {"sglang": SGLANG_KV, "vllm": VLLM_KV}
"""How the workers of each engine tell where they publish the events of their caches."""
