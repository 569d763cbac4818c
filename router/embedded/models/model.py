"""What a language model is to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class LanguageModel(Protocol):
    """A distribution of the next token."""

    def next_logprobs(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Natural logs of the next token's probabilities after `ids`, prompt and reply so far: [vocabulary's size]."""
        ...
