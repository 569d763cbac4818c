"""Sampling from a language model, as SGLang's `Sampler` does it on its PyTorch backend.

A place's logits are the model's logprobs, less the penalties, plus the bias. From there two ways part:

* what is *told* is the softmax of the logits over the temperature, whatever is cut off afterwards;
* what is *drawn* is this after top_k, top_p (what lies before a token must not exceed it) and min_p, each of them looking at
  the same sorted probabilities, and not at what the others left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from router.embedded.engine.sampling import Sampling
from router.embedded.engine.source import Drawing, Scored
from router.embedded.models.model import LanguageModel
from router.embedded.models.vocabulary import Vocabulary

Floats = NDArray[np.float32]


class ModelSource:
    """A language model, which is sampled honestly."""

    burst = 8

    def __init__(self, model: LanguageModel, vocabulary: Vocabulary) -> None:
        self.model = model
        self.vocabulary = vocabulary

    def begin(self, prompt_ids: Sequence[int], sampling: Sampling, seed: str) -> Drawing:
        """A reply. With a `sampling_seed` it is the same whenever the same is asked."""
        chosen = sampling.sampling_seed
        return _Reading(self, prompt_ids, sampling, [*seed.encode()] if chosen is None else [chosen % 2**64])


class _Reading:
    """A prompt and its reply."""

    def __init__(self, source: ModelSource, prompt_ids: Sequence[int], sampling: Sampling, seed: list[int]) -> None:
        self._model = source.model
        self._stops = sorted(source.vocabulary.eos_ids | sampling.stop_token_ids)
        self._prompt = list(prompt_ids)
        self._sampling = sampling
        self._seed = seed

    def next(self, output_ids: Sequence[int]) -> Place:
        logits = penalized(
            self._model.next_logprobs([*self._prompt, *output_ids]), output_ids, self._sampling, self._stops
        )
        # By its place, so that a token does not depend on what was drawn for others in the meantime.
        return Place(logits, self._sampling, np.random.default_rng([*self._seed, len(output_ids)]))

    def read(self, position: int) -> Place:
        logits = self._model.next_logprobs(self._prompt[:position])
        return Place(logits, Sampling(), np.random.default_rng(0))


class Place:
    """The distribution of one token.

    Args:
        logits: by id; minus infinity for what cannot be drawn.
        sampling: temperature, top_k, top_p and min_p count here.
        rng: what chance is.
    """

    def __init__(self, logits: Floats, sampling: Sampling, rng: np.random.Generator) -> None:
        self._logits = logits
        self._sampling = sampling
        self._rng = rng

    @cached_property
    def logprobs(self) -> Floats:
        """What is told: [vocabulary's size], at the temperature, before anything is cut off."""
        temperature = 1.0 if self._sampling.temperature < 1e-6 else self._sampling.temperature
        scaled = self._logits.astype(np.float64) / temperature
        scaled -= scaled.max()
        found: Floats = (scaled - np.log(np.exp(scaled).sum())).astype(np.float32)
        return found

    @cached_property
    def probabilities(self) -> NDArray[np.float64]:
        """What is drawn from: [vocabulary's size]; they sum to one."""
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
        """Sample a token; the first of the likeliest ones if that is greedy."""
        if self._sampling.greedy:
            return int(np.argmax(self._logits))
        reached = np.cumsum(self.probabilities)
        return int(np.searchsorted(reached, self._rng.random() * reached[-1], side="right"))

    def logprob(self, token: int) -> float:
        """Of one token."""
        return float(max(self.logprobs[token], np.finfo(np.float32).min))

    def top(self, sampled: Scored, count: int) -> list[Scored]:
        """The likeliest tokens, the likeliest first."""
        size = min(count, len(self.logprobs))
        found = np.argpartition(-self.logprobs, size - 1)[:size]
        order = found[np.argsort(-self.logprobs[found], kind="stable")]
        return [(self.logprob(token), token) for token in order.tolist()]

    def chosen(self, tokens: Sequence[int]) -> list[Scored]:
        """Of some tokens."""
        return [(self.logprob(token), token) for token in tokens]


_LARGEST = 1e30


def penalized(logits: Floats, output_ids: Sequence[int], sampling: Sampling, stops: Sequence[int]) -> Floats:
    """Logits after everything that depends on what was sampled before, and the bias. Penalties look at the reply only."""
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
    # Beyond what a float32 can hold nothing is likelier than anything else there, and no logprob would be a number.
    return np.nan_to_num(found, nan=-np.inf, posinf=_LARGEST, neginf=-np.inf)
