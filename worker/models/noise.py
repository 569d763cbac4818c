"""Samples ids without a model, so that encoding the text of a reply almost never gives its ids."""

from __future__ import annotations

import random
from collections.abc import Sequence

from worker.engine.source import SamplingParams, Scored, TokenDistributions, float32
from worker.vocabulary import EngineVocabulary


class NoiseSource:
    """Takes half of its ids from all ordinary ones and half from the crumbs, whatever the text before is.

    Only images count: with images in its prompt a greedy reply, or one with a `sampling_seed`, is the same for equal prompts,
    and another one for other images.

    Evenly chosen ids are mostly long words, which encoding their text gives again. With crumbs between them it does not.
    `sample_from` has the only ids to sample, and `eos_share` is the probability of the EOS at each place.
    """

    burst = 64

    def __init__(
        self, vocabulary: EngineVocabulary, *, sample_from: Sequence[int] | None = None, eos_share: float = 0.0
    ) -> None:
        self.vocabulary = vocabulary
        self.sample_from = sample_from
        self.eos_share = eos_share

    def begin(self, prompt_ids: Sequence[int], sampling: SamplingParams, seed: str) -> TokenDistributions:
        if max(prompt_ids) >= self.vocabulary.size:  # with images in it
            fixed = 0 if sampling.greedy else sampling.sampling_seed
            seed = f"{seed if fixed is None else fixed}/{list(prompt_ids)}"
        return _Noise(self, random.Random(seed))


class _Noise:
    """A sequence and all of its distributions, since all places are alike."""

    def __init__(self, source: NoiseSource, rng: random.Random) -> None:
        self._source = source
        self._rng = rng

    def next(self, output_ids: Sequence[int]) -> _Noise:
        return self

    def read(self, position: int) -> _PromptNoise:
        return _PromptNoise(self._source, self._rng)

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


class _PromptNoise(_Noise):
    """A place of a prompt, where no randomness is used up."""

    def logprob(self, token: int) -> float:
        return -1.5
