"""Sampling from a model, against a naive computation, token by token, in double precision."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.usual import usual
from tests.support.vocabularies import vocabulary
from worker.engine.source import SamplingParams, float32
from worker.models.sampler import ModelPlace, ModelSource, penalized
from worker.vocabulary import EngineVocabulary, load_vocabulary

SIZE = 12
LOGITS = np.log(np.array([30, 20, 12, 10, 8, 6, 5, 4, 2, 1, 1, 1], np.float32) / 100)


class Stub:
    """A model that gives probability to its first few tokens only."""

    def __init__(self, size: int) -> None:
        self.size = size

    def next_logprobs(self, ids: Sequence[int]) -> NDArray[np.float32]:
        found = np.full(self.size, -30, np.float32)
        found[:SIZE] = np.roll(LOGITS, ids[-1] if ids else 0)
        return found


@pytest.fixture(scope="module")
def known() -> EngineVocabulary:
    return load_vocabulary(str(vocabulary("qwen")))


def place(sampling: SamplingParams, seed: int = 0, logits: NDArray[np.float32] = LOGITS) -> ModelPlace:
    return ModelPlace(logits, sampling, np.random.default_rng(seed))


def softmax(logits: Sequence[float], temperature: float) -> list[float]:
    weights = [math.exp(logit / temperature) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def naive(logits: Sequence[float], sampling: SamplingParams) -> list[float]:
    """What may be drawn, and how likely."""
    reported = softmax(logits, sampling.temperature)
    order = sorted(range(len(reported)), key=lambda token: (-reported[token], token))
    kept, before = [], 0.0
    for rank, token in enumerate(order):
        among_the_first = sampling.top_k == -1 or rank < sampling.top_k
        if among_the_first and before <= sampling.top_p and reported[token] >= reported[order[0]] * sampling.min_p:
            kept.append(token)
        before += reported[token]
    total = sum(reported[token] for token in kept)
    return [reported[token] / total if token in kept else 0.0 for token in range(len(reported))]


SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=2.0),
    SamplingParams(top_k=4),
    SamplingParams(top_p=0.61),
    SamplingParams(min_p=0.3),
    SamplingParams(temperature=0.7, top_k=6, top_p=0.9, min_p=0.05),
    SamplingParams(top_k=1),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_what_is_drawn_and_what_is_reported(sampling: SamplingParams) -> None:
    found = place(sampling)
    reported = softmax(LOGITS.tolist(), sampling.temperature)
    assert np.exp(found.logprobs) == pytest.approx(reported, rel=1e-5)
    assert found.probabilities == pytest.approx(naive(LOGITS.tolist(), sampling), rel=1e-5)
    assert all(float32(found.logprob(token)) == found.logprob(token) for token in range(SIZE))


@pytest.mark.parametrize("sampling", usual(SAMPLINGS, *SAMPLINGS[2:5], SAMPLINGS[-2]), ids=str)
def test_draws_follow_the_distribution(sampling: SamplingParams) -> None:
    """Pearson's chi-squared; with at most 11 degrees of freedom 35 is passed once in ten thousand times."""
    count, expected = 4000, naive(LOGITS.tolist(), sampling)
    drawn = Counter(place(sampling, seed).draw() for seed in range(count))
    assert all(expected[token] for token in drawn)
    assert (
        sum((drawn[token] - count * share) ** 2 / (count * share) for token, share in enumerate(expected) if share) < 35
    )


def test_greedy_takes_the_likeliest_and_tells_the_logprob_of_temperature_one() -> None:
    found = place(SamplingParams(temperature=0), logits=np.roll(LOGITS, 3))
    assert found.draw() == 3
    assert found.logprob(3) == pytest.approx(math.log(0.3), rel=1e-5)


def test_what_cannot_be_drawn_has_a_logprob_that_json_can_say() -> None:
    logits = LOGITS.copy()
    logits[2] = -np.inf
    assert math.isfinite(place(SamplingParams(), logits=logits).logprob(2))


def test_the_likeliest_and_the_chosen() -> None:
    found = place(SamplingParams())
    assert [token for _, token in found.top((None, 0), 3)] == [0, 1, 2]
    assert [token for _, token in found.top((None, 0), 99)][:9] == list(range(9))
    assert found.chosen([7, 2]) == [(found.logprob(7), 7), (found.logprob(2), 2)]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(frequency_penalty=0.5),
        SamplingParams(presence_penalty=-0.7),
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(frequency_penalty=0.5, presence_penalty=0.2, repetition_penalty=0.8, logit_bias={4: 2.5, 0: -1}),
    ],
    ids=str,
)
def test_penalties_and_bias(sampling: SamplingParams) -> None:
    outputs = [1, 1, 1, 5, 1, 0]
    expected = []
    for token, given in enumerate(LOGITS.tolist()):
        count, logit = outputs.count(token), given
        logit -= sampling.frequency_penalty * count + sampling.presence_penalty * bool(count)
        if count:
            logit = logit / sampling.repetition_penalty if logit > 0 else logit * sampling.repetition_penalty
        expected.append(logit + sampling.logit_bias.get(token, 0))
    assert penalized(LOGITS, outputs, sampling, [9]) == pytest.approx(expected, rel=1e-5)


def test_no_end_before_its_time() -> None:
    sampling = SamplingParams(min_new_tokens=3)
    assert penalized(LOGITS, [1, 1], sampling, [9])[9] == -np.inf
    assert penalized(LOGITS, [1, 1, 1], sampling, [9])[9] == LOGITS[9]


def test_nothing_asked_for_leaves_the_logits_alone() -> None:
    assert penalized(LOGITS, [1], SamplingParams(), [9]) is LOGITS


def test_a_seed_depends_on_the_place_and_on_nothing_else(known: EngineVocabulary) -> None:
    """Two replies of one `sampling_seed` are the same, whatever the worker's own seed says."""
    source = ModelSource(Stub(known.size), known)

    def draw(sampling: SamplingParams, seed: str) -> list[int]:
        drawing, ids = source.begin([3], sampling, seed), list[int]()
        for _ in range(12):
            ids.append(drawing.next(ids).draw())
        return ids

    assert draw(SamplingParams(sampling_seed=5), "0/1") == draw(SamplingParams(sampling_seed=5), "0/2")
    assert draw(SamplingParams(sampling_seed=5), "0/1") != draw(SamplingParams(sampling_seed=-5), "0/1")
    assert draw(SamplingParams(), "0/1") == draw(SamplingParams(), "0/1") != draw(SamplingParams(), "0/2")


def test_a_prompt_is_read_without_the_sampling_parameters(known: EngineVocabulary) -> None:
    drawing = ModelSource(Stub(known.size), known).begin(
        [3, 4, 5], SamplingParams(temperature=0.1, logit_bias={4: 9}), "s"
    )
    assert drawing.read(1).logprob(4) == pytest.approx(float(np.roll(LOGITS, 3)[4]), rel=1e-4)
