"""The sources that the engine samples from, and the parameters of sampling."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

Scored = tuple[float | None, int]  # a logprob, which is exactly a float32, and its token


@dataclass
class LogprobDetails:
    """The logprobs of the prompt, and those of other tokens at each place of the reply."""

    prompt: list[Scored] = field(default_factory=list)
    prompt_top: list[list[Scored] | None] = field(default_factory=list)
    prompt_chosen: list[list[Scored] | None] = field(default_factory=list)
    output_top: list[list[Scored]] = field(default_factory=list)
    output_chosen: list[list[Scored]] = field(default_factory=list)


def float32(value: float) -> float:
    """Return the nearest float32, as a double: an engine's logprobs have this precision."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


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


class Distribution(Protocol):
    """The distribution of the token at one place."""

    def draw(self) -> int: ...

    def logprob(self, token: int) -> float:
        """Return the logprob of the token there, whether it was sampled, scripted, or read from the prompt."""
        ...

    def top(self, sampled: Scored, count: int) -> list[Scored]:
        """Return the likeliest tokens."""
        ...

    def chosen(self, tokens: Sequence[int]) -> list[Scored]:
        """Return these tokens with their logprobs, in their order."""
        ...


class TokenDistributions(Protocol):
    """The distributions along one sequence."""

    def next(self, output_ids: Sequence[int]) -> Distribution:
        """Return the distribution of the token that follows the reply so far."""
        ...

    def read(self, position: int) -> Distribution:
        """Return the distribution of a token of the prompt."""
        ...


class Source(Protocol):
    """A model's weights, or a substitute for them."""

    burst: int  # how many tokens may be sampled before the other samples run

    def begin(self, prompt_ids: Sequence[int], sampling: SamplingParams, seed: str) -> TokenDistributions:
        """Begin a reply. `seed` differs from reply to reply and is the same in every run."""
        ...
