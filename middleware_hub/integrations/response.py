"""A sequence for a trainer: cut into prompt and response, with every array present even if tokens were lost.

A trainer's batch has every array in every sample, or fails as a whole. So a sequence that must not be trained on (`usable` is
false) still has arrays of the right lengths: missing values are filled with valid values that mean nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from middleware_hub.client.trajectory import TokenRows, TopP, Trajectory

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NOTHING = Trajectory([0, 0], [0, 0], [0.0, 0.0], 2, (), (), "", False, 0, ("nothing_sampled",), "", {}, None, {})
"""Stands for a rollout that sampled nothing: a trainer counts it, but trains on none of it."""
LOST: Final = replace(NOTHING, reasons=("unknown_reply",))
"""Stands for a rollout whose session the router does not have any more: it restarted without a store, or it expired."""


@dataclass(frozen=True)
class Replayed:
    """The decisions of the engine that a trainer replays.

    Attributes:
        top_p: whether the sets from which tokens were drawn are replayed.
        experts: the layers, and the experts of each token in one.
        indexer: whether the rows of a sparse attention's indexer are replayed.
    """

    top_p: bool = False
    experts: tuple[int, int] | None = None
    indexer: bool = False


@dataclass(frozen=True)
class Response:
    """Arrays of one sample. `mask`, `logprobs` and `versions` have one entry for each token from `start` on.

    Attributes:
        tokens: prompt and response.
        start: where the response begins: the first sampled token.
        usable: whether it may be trained on; `reasons` says why not.
        versions: the weight version of each token; None for context.
        version_runs: runs of the versions of sampled tokens, in order, equal neighbours joined.
        kv_versions: `[version, start, end]` of each turn whose `kv_version` is known, from `start` on.
        top_p_ids, top_p_offsets: of the response; there is one more offset than tokens.
        experts: (tokens - 1, layers, experts of a token), int32.
        indexer: (tokens - 1, numbers of a row), int32.
    """

    tokens: list[int]
    start: int
    mask: list[int]
    logprobs: list[float]
    usable: bool
    reasons: tuple[str, ...]
    versions: list[str | None]
    version_runs: list[str]
    finish: str
    top_p_ids: NDArray[np.int32] | None
    top_p_offsets: NDArray[np.int32] | None
    experts: NDArray[np.int32] | None
    indexer: NDArray[np.int32] | None
    kv_versions: list[list[Any]]

    @property
    def length(self) -> int:
        """Return the number of the response's tokens."""
        return len(self.tokens) - self.start


def response_of(found: Trajectory, replayed: Replayed | None = None, off_policy: Collection[str] = ()) -> Response:
    """Cut a sequence, and complete it.

    Args:
        found: a sequence.
        replayed: the decisions of the engine that the trainer replays.
        off_policy: replies of earlier steps, whose tokens get mask 0.
    """
    replayed = replayed or Replayed()
    tokens = found.tokens or [0, 0]
    reasons = list(found.reasons)
    start = found.prompt_length
    if start >= len(tokens):  # a response has at least one token
        start = len(tokens) - 1
        reasons.append("nothing_sampled")
    count = len(tokens) - start
    mask = found.loss_mask[start:] or [0] * count
    for turn in found.turns:
        if turn.request_id in off_policy:
            mask[turn.start - start : turn.end - start] = [0] * (turn.end - turn.start)
    logprobs = found.logprobs
    if logprobs is None:
        reasons += [] if "no_logprobs" in reasons else ["no_logprobs"]
        logprobs = [0.0] * len(tokens)
    ids, offsets, complete = _top_p(found.top_p, start, mask) if replayed.top_p else (None, None, True)
    if not complete:
        reasons.append("top_p_missing")
    experts, whole = _experts(found.extras.get("routed_experts"), len(tokens), replayed.experts)
    if not whole:
        reasons.append("routed_experts_missing")
    indexer = found.extras["indexer_topk"].array() if replayed.indexer and "indexer_topk" in found.extras else None
    if replayed.indexer and (indexer is None or not found.extras["indexer_topk"].whole):
        reasons.append("indexer_topk_missing")
    lacks = {"nothing_sampled", "no_logprobs", "top_p_missing", "routed_experts_missing", "indexer_topk_missing"}
    return Response(
        tokens=tokens,
        start=start,
        mask=mask,
        logprobs=logprobs[start:] or [0.0] * count,
        usable=found.exact and lacks.isdisjoint(reasons),
        reasons=tuple(reasons),
        versions=found.token_versions()[start:] or [None] * count,
        version_runs=[run.version for run in found.versions],
        finish=found.finish,
        top_p_ids=ids,
        top_p_offsets=offsets,
        experts=experts,
        indexer=indexer,
        kv_versions=[
            [turn.kv_version, turn.start - start, turn.end - start]
            for turn in found.turns
            if turn.kv_version is not None
        ],
    )


def _top_p(found: TopP | None, start: int, mask: list[int]) -> tuple[Any, Any, bool]:
    """Return the sets of a response, and whether every token that is trained on has one."""
    import numpy as np

    if found is None:
        return np.zeros(0, np.int32), np.zeros(len(mask) + 1, np.int32), not any(mask)
    ids, offsets = found.arrays()
    own = offsets[start:]
    empty = np.diff(own)[: len(mask)] == 0
    trained = np.array(mask, bool)
    return ids[own[0] : own[-1]].copy(), own - own[0], not bool((empty & trained).any())


def _experts(found: TokenRows | None, tokens: int, shape: tuple[int, int] | None) -> tuple[Any, bool]:
    """Return the rows of a sequence, and whether every row was reported and has the model's shape.

    A missing row is filled with the first experts of each layer: a router takes them like any other choice, while -1 would be
    out of range, and all zeros are taken for a failed capture.
    """
    if shape is None:
        return None, True
    import numpy as np

    layers, chosen = shape
    rows = np.tile(np.arange(chosen, dtype=np.int32), (max(tokens - 1, 1), layers, 1))[: max(tokens - 1, 0)]
    if found is None or found.shape != (tokens - 1, layers * chosen):
        return rows, False
    told = found.array().reshape(tokens - 1, layers, chosen)
    missing = (told < 0).reshape(tokens - 1, -1).max(axis=1, initial=False)
    return np.where(missing[:, None, None], rows, told), not bool(missing.any())
