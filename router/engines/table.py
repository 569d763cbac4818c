"""The engines that workers may run. A new one is a row here."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from router.engines.engine import Engine
from router.engines.form.fleet_paths import COMMON, FleetPath
from router.engines.sglang.engine import SGLANG
from router.engines.vllm.engine import Vllm


def engines(*, incremental_streams: bool = False) -> Mapping[str, Engine]:
    """Return all engines by name. `incremental_streams`: events of the streams that adapters make hold only new tokens."""
    found: tuple[Engine, ...] = (SGLANG, Vllm(cumulative=not incremental_streams))
    return {engine.name: engine for engine in found}


def fleet_paths() -> tuple[FleetPath, ...]:
    """Return the calls that go to all workers: the common form's, and each engine's own."""
    own = (replace(path, engine=name) for name, engine in engines().items() for path in engine.fleet_paths)
    return (*COMMON, *own)
