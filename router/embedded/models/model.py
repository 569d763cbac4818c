"""The interface of a language model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class LanguageModel(Protocol):
    """A distribution of the next token."""

    def next_logprobs(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Return the natural logs of the next token's probabilities after prompt and reply so far: [vocabulary's size]."""
        ...
