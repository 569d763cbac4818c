"""The group of a rollout, for trainers elsewhere that claim it (docs/http-api.md).

Only on demand: the trainers' own loops hold their groups themselves, and an unclaimed group stays in memory.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Protocol

from middleware_hub.client.errors import RefusedError

logger = logging.getLogger(__name__)


class RewardClient(Protocol):
    """The part of a client that takes rewards."""

    async def reward(self, request_id: str, reward: float | None) -> bool:
        """Give the reward of a rollout, which is named by its last reply and is complete now."""
        ...


@dataclass(frozen=True)
class Group:
    """The group of a prompt's samples.

    Attributes:
        id: its name at the router; None if the router does not know it.
        size: how many samples there will be.
    """

    id: str | None = None
    size: int | None = None

    @classmethod
    def of(cls, run: str | None, number: object, size: int) -> Group:
        """Return the group of a prompt, named by the run's name and the prompt's number. Without a run it has no name.

        Raises ValueError if the trainer gave the prompt no number.
        """
        if run is None:
            return cls()
        if number is None:
            raise ValueError("the trainer did not number the prompt's group, so `groups` cannot name it")
        return cls(f"{run}/{number}", size)

    async def end_text(self, client: RewardClient, replies: Sequence[str], reward: object) -> None:
        """Report that a rollout is complete, with its reward if that is known already."""
        if self.id is None or not replies:
            return
        try:
            await client.reward(replies[-1], as_number(reward))
        except RefusedError as error:  # the trainer still has its sample
            logger.warning("a rollout of group %r is not complete for those who claim it: %s", self.id, error)


def as_number(reward: object) -> float | None:
    """Return a reward as a float, also one of numpy's; None if it is no number, or not finite."""
    return float(reward) if isinstance(reward, Real) and math.isfinite(reward) else None
