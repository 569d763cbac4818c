"""The sampling parameters of a reply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

AS_MANY = 1 << 30  # tokens: as many as there is room for
_GREEDY_BELOW = 1e-6  # SGLang's _SAMPLING_EPS


@dataclass(frozen=True)
class SamplingParams:
    """The parameters of one reply; the defaults are SGLang's."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    n: int = 1
    stream_interval: int | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    sampling_seed: int | None = None

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken. Its logprob is that of temperature 1."""
        return self.temperature < _GREEDY_BELOW or self.top_k == 1
