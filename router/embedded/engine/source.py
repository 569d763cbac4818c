"""Where the tokens of a reply come from."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Protocol

from router.embedded.engine.sampling import Sampling

Scored = tuple[float | None, int]  # a logprob, which is exactly a float32, and its token


class Distribution(Protocol):
    """Of the token at one place."""

    def draw(self) -> int:
        """Sample a token."""
        ...

    def logprob(self, token: int) -> float:
        """Of the token that is there: drawn, put there by a script, or of the prompt."""
        ...

    def top(self, sampled: Scored, count: int) -> list[Scored]:
        """The likeliest tokens."""
        ...

    def chosen(self, tokens: Sequence[int]) -> list[Scored]:
        """Of tokens that were named, in their order."""
        ...


class Drawing(Protocol):
    """The distributions along one sequence."""

    def next(self, output_ids: Sequence[int]) -> Distribution:
        """Of the token after those of the reply."""
        ...

    def read(self, position: int) -> Distribution:
        """Of a token of the prompt."""
        ...


class Source(Protocol):
    """A model's weights, or what stands for them."""

    burst: int  # how many tokens may be drawn before others are let run

    def begin(self, prompt_ids: Sequence[int], sampling: Sampling, seed: str) -> Drawing:
        """A reply begins. `seed` differs from reply to reply and is the same in every run."""
        ...


def float32(value: float) -> float:
    """The nearest float32, as the double that its decimal form reads back as: what an engine's logprobs look like."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])
