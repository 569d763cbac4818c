"""The options of an embedded worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

StreamStyle = Literal["cumulative", "incremental", "mixed"]
"""The default of SGLang; its `--incremental-streaming-output`; up to 0.5.5: `output_ids` are deltas, the rest is cumulative."""


Role = Literal["null", "prefill", "decode"]
"""SGLang's `--disaggregation-mode`."""

Interface = Literal["sglang", "vllm"]
"""Whose HTTP interface a worker has."""


@dataclass(frozen=True)
class WorkerOptions:
    """The settings of a worker. The defaults are for tests."""

    interface: Interface = "sglang"
    dp_size: int = 1  # data-parallel ranks, each with a prefix cache of its own
    disaggregation_mode: Role = "null"
    bootstrap_timeout: float = 300.0  # seconds that a leg waits for its other leg
    scale_out: bool = True  # vLLM's --enable-scale-out
    kv_connector: bool = False  # vLLM's --kv-transfer-config with a NIXL connector, which takes and gives caches
    kv_lease: float = 30.0  # seconds that it keeps a cache for a worker that has not come for it
    dev_mode: bool = True  # vLLM's VLLM_SERVER_DEV_MODE
    weight_transfer: bool = False  # vLLM's --weight-transfer-config
    scripted: bool = False  # cut replies out of a pool, for measuring load
    host: str = "127.0.0.1"
    port: int = 0  # 0 takes a free one
    stream_style: StreamStyle = "cumulative"
    stream_interval: int = 1  # tokens per event
    seed: int = 0  # of sampling; the k-th sample of a worker is the same in every run
    eos_share: float = 0.0  # of noise: the probability of the EOS at each place
    sample_from: tuple[int, ...] | None = None  # of noise: the ids to sample from
    weight_version: str = "default"  # the first one
    version_spans: bool = True  # False leaves `weight_versions` out, as before 0.5.19
    served_name: str | None = None  # --served-model-name; None takes the tokenizer's path
    adapters: tuple[
        str, ...
    ] = ()  # SGLang's --lora-paths, vLLM's --lora-modules: they are listed, and sample as the model
    prefix_cache: bool = False  # whether there is a cache also without images
    context_length: int = 32768  # longer prompts are refused
    preprocess_cache: int = 64  # SGLang's --mm-preprocess-cache-size-mb, of a worker that takes images
    health_timeout: float = 20.0  # seconds that `/health` waits for a paused engine before it answers 503
    token_delay: float = 0.0  # seconds per token
    keep_log: bool = True  # False keeps neither `log` nor `calls`, for a worker that serves for long
    new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
