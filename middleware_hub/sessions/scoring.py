"""`POST /trajectories/score`: how likely a teacher or a reference finds the tokens of trajectories.

The numbers of a scorer named `ref` are `ref_logprobs`, one for each token from the first sampled one on (of given ids: from
`start` on), and `ref_top_logprobs`, its likeliest tokens there. They are about the trajectory's own ids, which are never
encoded again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
from msgspec import Raw
from starlette.types import Receive, Scope, Send

from middleware_hub.sessions.export.formats import trajectory_json
from middleware_hub.sessions.export.trajectories import BranchTrajectory
from middleware_hub.sessions.exports import SessionSamples, fields_of
from middleware_hub.spans.chain import printed_ids
from router.engines.form.fields import typed
from router.errors import BadRequestError
from router.generate.scorers import Scored, Scorers
from router.http.bodies import read_json
from router.http.disconnect import ClientConnection
from router.http.request_state import request_state
from router.http.responses import send_json

MOST_TOP: Final = 128
_LARGEST: Final = 2**31 - 1
FIELDS: Final = frozenset({"session_id", "sequences", "workers", "top_logprobs", "roots"})


class _Given(msgspec.Struct, forbid_unknown_fields=True):
    """A sequence of the request; `start` is the first position that is scored."""

    input_ids: list[int]
    start: int = 1


class ScoreRequest(msgspec.Struct, frozen=True):
    """A request.

    Attributes:
        session: whose trajectories are scored; None for `sequences`.
        head: whether only the task's trajectories are.
    """

    session: str | None
    sequences: Sequence[tuple[Raw, int]]
    workers: Sequence[str]
    top: int
    head: bool

    @classmethod
    def of(cls, fields: Mapping[str, Raw], scorers: Scorers | None, most: int) -> ScoreRequest:
        """Read a body. Raises BadRequestError."""
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
        roots = typed(given, "roots", str, "a string") or "all"
        if roots not in ("all", "head"):
            raise BadRequestError(f"`roots` must be one of all, head, not {roots!r}")
        session = typed(given, "session_id", str, "the id of a session")
        several = typed(given, "sequences", list[_Given], "a list of objects with `input_ids` and `start`")
        if (session is None) is (several is None):
            raise BadRequestError("say what to score: `session_id`, or `sequences`")
        if several is not None and not 1 <= len(several) <= most:
            raise BadRequestError(f"`sequences` must have 1 to {most} entries, not {len(several)}")
        return cls(
            session, [_checked(one, number) for number, one in enumerate(several or ())], workers, top, roots == "head"
        )


def _checked(one: _Given, number: int) -> tuple[Raw, int]:
    if not 1 <= one.start < len(one.input_ids):
        raise BadRequestError(
            f"`sequences[{number}].start` must be 1 to {len(one.input_ids) - 1}, not {one.start}: nothing stands before the"
            " first token, so it has no logprob"
        )
    if min(one.input_ids) < 0 or max(one.input_ids) > _LARGEST:
        raise BadRequestError(f"`sequences[{number}].input_ids` must be 0 to {_LARGEST}")
    return Raw(msgspec.json.encode(one.input_ids)), one.start


class Scoring:
    """Serves the call.

    Args:
        scorers: None where no model scores.
        most: sequences of one request.
    """

    def __init__(self, scorers: Scorers | None, samples: SessionSamples, *, most: int, max_body_bytes: int) -> None:
        self._scorers = scorers
        self._samples = samples
        self._most = most
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        fields = fields_of(await read_json(scope, receive, self._max_body_bytes, ids=True))
        wanted = ScoreRequest.of(fields, self._scorers, self._most)
        async with ClientConnection(receive) as client:
            found = await self._scored(request_state(scope).caller.tenant, wanted)
            client.stop_watching()
        ignored = sorted(fields.keys() - FIELDS)
        head = msgspec.json.encode({**({"ignored": ignored} if ignored else {}), **found})
        await send_json(send, 200, head)

    async def _scored(self, tenant: str, wanted: ScoreRequest) -> dict[str, Any]:
        """Return the answer to a request. Raises UnknownSessionError, UpstreamError, StoreError, and BadRequestError."""
        assert self._scorers is not None
        if wanted.session is None:
            told = await self._scorers.score(wanted.workers, wanted.sequences, wanted.top)
            return {"sequences": [described(wanted.workers, one) for one in told]}
        found = await self._samples.branches(tenant, wanted.session, head=wanted.head)
        told = await self._scorers.score(wanted.workers, [sequence_of(one) for one in found], wanted.top)
        pairs = list(zip(found, told, strict=True))
        shown = await asyncio.to_thread(lambda: [with_scores(one, wanted.workers, said) for one, said in pairs])
        return {"session_id": wanted.session, "trajectories": shown}


def sequence_of(trajectory: BranchTrajectory) -> tuple[Raw, int]:
    """Return the ids of a trajectory, and where its response begins. Raises BadRequestError for one with images."""
    if trajectory.pictures:
        raise BadRequestError(
            f"trajectory {trajectory.branch} has images, and scorers are given ids only", code="unsupported_content"
        )
    ids = np.concatenate((trajectory.prompt_ids, trajectory.response_ids)).astype(np.int32, copy=False)
    return Raw(printed_ids(ids.tobytes())), len(trajectory.prompt_ids)


def with_scores(trajectory: BranchTrajectory, names: Sequence[str], scored: Sequence[Scored]) -> Raw:
    """Return the JSON of a trajectory, as `finalize` gives it, with what scorers say of it."""
    added = msgspec.json.encode(described(names, scored))
    return Raw(b"".join(trajectory_json(trajectory))[:-1] + b"," + added[1:])


def described(names: Sequence[str], scored: Sequence[Scored]) -> dict[str, Any]:
    """Return what scorers say of one sequence."""
    found: dict[str, Any] = {}
    for name, one in zip(names, scored, strict=True):
        found[f"{name}_logprobs"] = one.logprobs
        if one.top is not None:
            found[f"{name}_top_logprobs"] = one.top
    return found
