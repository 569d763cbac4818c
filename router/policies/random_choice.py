"""A random worker."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.workers.policy import RouteQuery
from router.workers.worker import Target


class RandomChoice:
    """Chooses each worker with the same probability."""

    def __init__(self, generator: random.Random | None = None) -> None:
        self._random = generator or random.Random()

    def select(self, targets: Sequence[Target], query: RouteQuery) -> Target:
        return self._random.choice(targets)
