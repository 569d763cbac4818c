"""Ids drawn without a model, such that nearly no reply is what re-encoding its text gives."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.embedded.engine.sampling import Sampling
from router.embedded.engine.source import Drawing, Scored, float32
from router.embedded.models.vocabulary import Vocabulary


class NoiseSource:
    """Draws half of its ids from all ordinary ones, half from the crumbs, whatever the context is.

    Ids drawn evenly are long words, which re-encoding mostly finds again; crumbs between them it does not.

    Args:
        vocabulary: to draw from.
        sample_from: the only ids to draw.
        eos_share: how likely the EOS is at each place.
    """

    burst = 64

    def __init__(
        self, vocabulary: Vocabulary, *, sample_from: Sequence[int] | None = None, eos_share: float = 0.0
    ) -> None:
        self.vocabulary = vocabulary
        self.sample_from = sample_from
        self.eos_share = eos_share

    def begin(self, prompt_ids: Sequence[int], sampling: Sampling, seed: str) -> Drawing:
        """A reply of noise."""
        return _Noise(self, random.Random(seed))


class _Noise:
    """Each place is like any other, so this is the sequence and all of its distributions."""

    def __init__(self, source: NoiseSource, rng: random.Random) -> None:
        self._source = source
        self._rng = rng

    def next(self, output_ids: Sequence[int]) -> _Noise:
        return self

    def read(self, position: int) -> _Text:
        return _Text(self._source, self._rng)

    def draw(self) -> int:
        source, rng = self._source, self._rng
        if rng.random() < source.eos_share:
            return source.vocabulary.eos_id
        if source.sample_from is not None:
            return rng.choice(source.sample_from)
        crumb = rng.random() < 0.5
        return rng.choice(source.vocabulary.crumbs if crumb else source.vocabulary.ordinary)

    def logprob(self, token: int) -> float:
        return float32(-self._rng.expovariate(0.7))

    def top(self, sampled: Scored, count: int) -> list[Scored]:
        return [sampled] * count

    def chosen(self, tokens: Sequence[int]) -> list[Scored]:
        return [(float32(-8 - token % 7 / 3), token) for token in tokens]


class _Text(_Noise):
    """A place of a prompt, where the noise has no say."""

    def logprob(self, token: int) -> float:
        return -1.5
