"""Scores of trajectories: which scorers are asked, and what they say beside the ids of each trajectory.

The numbers of a scorer named `ref` are `ref_logprobs`, one for each token from the first sampled one on, and
`ref_top_logprobs`, its likeliest tokens there. They are about the trajectory's own ids, which are never encoded again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
from msgspec import Raw

from middleware_hub.sessions.export.trajectories import BranchTrajectory
from middleware_hub.spans.chain import printed_ids
from router.engines.form.fields import typed
from router.errors import BadRequestError
from router.generate.scorers import Scored, Scorers

MOST_TOP: Final = 128
SCORE_FIELDS: Final = frozenset({"workers", "top_logprobs"})


class AskedScorers(msgspec.Struct, frozen=True):
    """Who scores: the names of scorers; and how many likeliest tokens they tell at each position."""

    scorers: Scorers
    workers: Sequence[str]
    top: int

    @classmethod
    def of(cls, fields: Mapping[str, Raw], scorers: Scorers | None) -> AskedScorers:
        """Read `workers` and `top_logprobs`. Raises BadRequestError."""
        if scorers is None or not scorers.names:
            raise BadRequestError("no model scores here: start the router with --scorer NAME=URL")
        given = dict(fields)
        workers = typed(given, "workers", list[str], "a list of names")
        if workers is None:
            workers = list(scorers.names)
        unknown = [name for name in workers if name not in scorers.names]
        if unknown or not workers or len(set(workers)) != len(workers):
            raise BadRequestError(
                f"`workers` must name some of {', '.join(scorers.names)} (--scorer), each once, not {unknown or workers}"
            )
        top = typed(given, "top_logprobs", int, "a whole number") or 0
        if not 0 <= top <= MOST_TOP:
            raise BadRequestError(f"`top_logprobs` must be 0 to {MOST_TOP}, not {top}")
        return cls(scorers, workers, top)

    async def ask(self, sequences: Sequence[tuple[Raw, int]]) -> list[dict[str, Any]]:
        """Return what the scorers say of each sequence: its ids as JSON, and its first position that is scored.

        Raises UpstreamError, UpstreamTimeoutError and BadRequestError, as `Scorers.score` does.
        """
        told = await self.scorers.score(self.workers, sequences, self.top)
        return [_named(self.workers, one) for one in told]

    async def score(self, found: Sequence[BranchTrajectory]) -> list[BranchTrajectory]:
        """Return trajectories with their scores. Raises as `ask` does, and BadRequestError for one with images."""
        told = await self.ask([_sequence_of(one) for one in found])
        return [msgspec.structs.replace(one, scores=said) for one, said in zip(found, told, strict=True)]


def _sequence_of(trajectory: BranchTrajectory) -> tuple[Raw, int]:
    """Return the ids of a trajectory, and where its response begins. Raises BadRequestError for one with images."""
    if trajectory.pictures:
        raise BadRequestError(
            f"trajectory {trajectory.branch} has images, and scorers are given ids only", code="unsupported_content"
        )
    ids = np.concatenate((trajectory.prompt_ids, trajectory.response_ids)).astype(np.int32, copy=False)
    return Raw(printed_ids(ids.tobytes())), len(trajectory.prompt_ids)


def _named(names: Sequence[str], scored: Sequence[Scored]) -> dict[str, Any]:
    """Return what scorers say of one sequence, under the names of the answer."""
    found: dict[str, Any] = {}
    for name, one in zip(names, scored, strict=True):
        found[f"{name}_logprobs"] = one.logprobs
        if one.top is not None:
            found[f"{name}_top_logprobs"] = one.top
    return found
