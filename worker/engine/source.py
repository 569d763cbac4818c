"""What the engine samples from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from worker.engine.logprobs import Scored
from worker.engine.sampling import SamplingParams


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
