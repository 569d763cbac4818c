"""A language model that sees: the images before a token change its distribution."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from worker.models.sampler import Floats, LanguageModel

_TILT = 2.0  # standard deviation, in logits: enough that greedy replies differ, too little for words that do not fit
_UNSEEN = -30.0  # the logprob of ids that the model does not have


class SeeingModel:
    """A model of fewer ids than its vocabulary has, which reads the keys of images among the ids.

    Nobody looks at pixels. The images tilt all logits in a direction of their own: equal images in the same one, and any
    others, or the same in another order, in another one.

    Args:
        model: of the first ids only.
        size: the vocabulary's. Numbers from there on are keys of images (`PromptImage.key`).
    """

    def __init__(self, model: LanguageModel, *, size: int) -> None:
        self._model = model
        self._size = size

    def next_logprobs(self, ids: Sequence[int]) -> Floats:
        known = self._model.next_logprobs(ids)
        seen = tuple(number for number in ids if number >= self._size)
        if seen:
            known = known + _tilt(seen, len(known))
        found: Floats = np.full(self._size, _UNSEEN, dtype=np.float32)
        found[: len(known)] = known
        found -= np.float32(np.log(np.exp(found.astype(np.float64)).sum()))
        return found


@lru_cache(maxsize=64)
def _tilt(seen: tuple[int, ...], size: int) -> NDArray[np.float32]:
    return np.random.default_rng(seen).normal(0, _TILT, size).astype(np.float32)
