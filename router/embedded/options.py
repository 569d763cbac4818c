"""What an embedded worker is set up with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

StreamStyle = Literal["cumulative", "incremental", "mixed"]


@dataclass(frozen=True)
class WorkerOptions:
    """What a worker is set up with.

    Attributes:
        scripted: cut replies out of a pool, for measuring load.
        host: where to listen.
        port: 0 takes a free one.
        stream_style: cumulative (the default of SGLang), incremental (`--incremental-streaming-output`), or mixed (up to 0.5.5:
            `output_ids` are deltas, the rest is cumulative).
        stream_interval: tokens per event.
        seed: of what is sampled; the k-th sample of a worker is the same in every run.
        eos_share: of noise: the probability of the EOS at each place.
        sample_from: of noise: the ids to sample from.
        weight_version: the first version.
        version_spans: False leaves `weight_versions` out, as before 0.5.19.
        context_length: longer prompts are refused.
        health_timeout: seconds that `/health` waits for a paused engine before it answers 503.
        token_delay: seconds per token.
        keep_log: False keeps neither `log` nor `calls`, for a worker that serves for long.
        on_death: called with the reason, in the worker's thread, when a request has killed the worker.
        new_loop: makes its event loop.
    """

    scripted: bool = False
    host: str = "127.0.0.1"
    port: int = 0
    stream_style: StreamStyle = "cumulative"
    stream_interval: int = 1
    seed: int = 0
    eos_share: float = 0.0
    sample_from: tuple[int, ...] | None = None
    weight_version: str = "default"
    version_spans: bool = True
    context_length: int = 32768
    health_timeout: float = 20.0
    token_delay: float = 0.0
    keep_log: bool = True
    on_death: Callable[[str], object] | None = None
    new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
