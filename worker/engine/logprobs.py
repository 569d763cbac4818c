"""The logprobs of a reply's tokens."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

Scored = tuple[float | None, int]  # a logprob, which is exactly a float32, and its token


@dataclass
class LogprobDetails:
    """The logprobs of the prompt, and what a reply reports at each place besides the logprob of the sampled token."""

    prompt: list[Scored] = field(default_factory=list)
    prompt_top: list[list[Scored] | None] = field(default_factory=list)
    prompt_chosen: list[list[Scored] | None] = field(default_factory=list)
    output_top: list[list[Scored]] = field(default_factory=list)
    output_chosen: list[list[Scored]] = field(default_factory=list)


def float32(value: float) -> float:
    """Return the nearest float32, as a double: an engine's logprobs have this precision."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])
