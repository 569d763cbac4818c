"""Sampling from a language model, as SGLang's `Sampler` does on its PyTorch backend.

The logits of a place are the model's logprobs, less the penalties, plus the bias. From them come

* the *reported* logprobs: the log softmax of the logits over the temperature, with nothing cut off;
* the *sampled* distribution: its softmax after top_k, top_p (a token stays if the sum before it does not exceed top_p) and
  min_p. Each of the three looks at the same sorted probabilities, not at the result of the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from worker.engine.source import SamplingParams, Scored, TokenDistributions
from worker.vocabulary import EngineVocabulary

Floats = NDArray[np.float32]


class LanguageModel(Protocol):
    """A distribution of the next token."""

    def next_logprobs(self, ids: Sequence[int]) -> Floats:
        """Return the natural logs of the next token's probabilities after prompt and reply so far: [vocabulary's size]."""
        ...


class ModelSource:
    """Samples a language model."""

    burst = 8

    def __init__(self, model: LanguageModel, vocabulary: EngineVocabulary) -> None:
        self.model = model
        self.vocabulary = vocabulary

    def begin(self, prompt_ids: Sequence[int], sampling: SamplingParams, seed: str) -> TokenDistributions:
        """Begin a reply. With a `sampling_seed` it is the same for every equal request."""
        chosen = sampling.sampling_seed
        return _Reading(self, prompt_ids, sampling, [*seed.encode()] if chosen is None else [chosen % 2**64])


class _Reading:
    """A prompt and its reply."""

    def __init__(
        self, source: ModelSource, prompt_ids: Sequence[int], sampling: SamplingParams, seed: list[int]
    ) -> None:
        self._model = source.model
        self._stops = sorted(source.vocabulary.eos_ids | sampling.stop_token_ids)
        self._prompt = list(prompt_ids)
        self._sampling = sampling
        self._seed = seed

    def next(self, output_ids: Sequence[int]) -> ModelPlace:
        logits = penalized(
            self._model.next_logprobs([*self._prompt, *output_ids]), output_ids, self._sampling, self._stops
        )
        # Seeded by the place, so that a token does not depend on what other replies sample in the meantime.
        return ModelPlace(logits, self._sampling, np.random.default_rng([*self._seed, len(output_ids)]))

    def read(self, position: int) -> ModelPlace:
        logits = self._model.next_logprobs(self._prompt[:position])
        return ModelPlace(logits, SamplingParams(), np.random.default_rng(0))


class ModelPlace:
    """The distribution of one token.

    Args:
        logits: by id; minus infinity for a token that cannot be sampled.
        sampling: temperature, top_k, top_p and min_p are used.
        rng: the randomness.
    """

    def __init__(self, logits: Floats, sampling: SamplingParams, rng: np.random.Generator) -> None:
        self._logits = logits
        self._sampling = sampling
        self._rng = rng

    @cached_property
    def logprobs(self) -> Floats:
        """The reported logprobs: [vocabulary's size], at the temperature, before anything is cut off."""
        temperature = 1.0 if self._sampling.temperature < 1e-6 else self._sampling.temperature
        scaled = self._logits.astype(np.float64) / temperature
        scaled -= scaled.max()
        found: Floats = (scaled - np.log(np.exp(scaled).sum())).astype(np.float32)
        return found

    @cached_property
    def probabilities(self) -> NDArray[np.float64]:
        """The sampled distribution: [vocabulary's size]; the sum is one."""
        sampling = self._sampling
        found: NDArray[np.float64] = np.exp(self.logprobs.astype(np.float64))
        if sampling.top_k == -1 and sampling.top_p == 1 and sampling.min_p == 0:
            found /= found.sum()
            return found
        order = np.argsort(-found, kind="stable")
        sorted_ = found[order]
        kept = (np.cumsum(sorted_) - sorted_ <= sampling.top_p) & (sorted_ >= sorted_[0] * sampling.min_p)
        if sampling.top_k != -1:
            kept[sampling.top_k :] = False
        cut = np.zeros_like(found)
        cut[order[kept]] = sorted_[kept]
        cut /= cut.sum()
        return cut

    def draw(self) -> int:
        """Sample a token; greedily, the first of the likeliest ones."""
        if self._sampling.greedy:
            return int(np.argmax(self._logits))
        reached = np.cumsum(self.probabilities)
        return int(np.searchsorted(reached, self._rng.random() * reached[-1], side="right"))

    def logprob(self, token: int) -> float:
        return float(max(self.logprobs[token], np.finfo(np.float32).min))

    def top(self, sampled: Scored, count: int) -> list[Scored]:
        size = min(count, len(self.logprobs))
        found = np.argpartition(-self.logprobs, size - 1)[:size]
        order = found[np.argsort(-self.logprobs[found], kind="stable")]
        return [(self.logprob(token), token) for token in order.tolist()]

    def chosen(self, tokens: Sequence[int]) -> list[Scored]:
        return [(self.logprob(token), token) for token in tokens]


_LARGEST = 1e30


def penalized(logits: Floats, output_ids: Sequence[int], sampling: SamplingParams, stops: Sequence[int]) -> Floats:
    """Return the logits after penalties, `min_new_tokens` and bias. Penalties look at the reply only, not at the prompt."""
    frequency, presence, repetition = (
        sampling.frequency_penalty,
        sampling.presence_penalty,
        sampling.repetition_penalty,
    )
    if not (frequency or presence or repetition != 1 or sampling.logit_bias or sampling.min_new_tokens):
        return logits
    found = logits.astype(np.float32)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        if output_ids and (frequency or presence or repetition != 1):
            counted = Counter(output_ids)
            ids = np.fromiter(counted.keys(), np.int64, len(counted))
            counts = np.fromiter(counted.values(), np.float32, len(counted))
            found[ids] -= frequency * counts + presence
            found[ids] = np.where(found[ids] > 0, found[ids] / repetition, found[ids] * repetition)
        if len(output_ids) < sampling.min_new_tokens:
            found[stops] = -np.inf
        for token, bias in sampling.logit_bias.items():
            found[token] += bias
    # Infinite logits would make every logprob NaN, so they become very large ones.
    return np.nan_to_num(found, nan=-np.inf, posinf=_LARGEST, neginf=-np.inf)
