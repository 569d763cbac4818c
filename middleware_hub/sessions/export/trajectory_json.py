"""Trajectories as JSON, in pieces, so that the event loop can serve other requests in between."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
from msgspec import Raw
from numpy.typing import NDArray

from middleware_hub.sessions.export.trajectories import ARRAYS, BranchTrajectory

CHUNK = 8_192
"""Numbers that are encoded at once: about half a millisecond."""


def as_json(found: Iterable[BranchTrajectory], head: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield `{...head, "trajectories": [...]}` in pieces, each of which takes little time."""
    opening = msgspec.json.encode(head)[:-1]
    yield opening + (b"," if head else b"") + b'"trajectories":['
    for number, trajectory in enumerate(found):
        if number:
            yield b","
        yield from trajectory_json(trajectory)
    yield b"]}"


def trajectory_json(trajectory: BranchTrajectory) -> Iterator[bytes]:
    """Yield one trajectory in pieces."""
    fields = described(trajectory)
    for name in trajectory.per_token:
        del fields["extra_fields"][name]
    # `extra_fields` comes last and is never empty, so both objects stay open for the long arrays.
    yield msgspec.json.encode(fields)[:-2]
    for name, array in trajectory.per_token.items():
        yield b',"%b":%b,"base64":"' % (name.encode(), msgspec.json.encode(array.described())[:-1])
        yield from array.as_base64()
        yield b'"}'
    yield b"}"
    for name in ARRAYS:
        numbers = getattr(trajectory, name)
        yield b',"%b":' % name.encode()
        if numbers is None:
            yield b"null"
        else:
            yield from _numbers(numbers)
    yield b"}"


def described(trajectory: BranchTrajectory) -> dict[str, Any]:
    """Return everything but the arrays of a trajectory, ready to be encoded as JSON."""
    begin = len(trajectory.prompt_ids)
    return {
        "branch": trajectory.branch,
        "parent_branch": trajectory.parent_branch,
        "root": trajectory.root,
        "system_digest": trajectory.system_digest,
        "tools_digest": trajectory.tools_digest,
        "side_request": trajectory.side_request,
        "messages": [Raw(message) for message in trajectory.messages],
        "weight_versions": [{"version": v, "start": low, "end": high} for v, low, high in trajectory.weight_versions],
        "num_turns": len(trajectory.turns),
        "turns": [turn.described(begin) for turn in trajectory.turns],
        "finish_reason": trajectory.finish_reason,
        "reward_info": trajectory.reward_info,
        "multi_modal_data": None,
        "exact": trajectory.exact,
        "reasons": trajectory.reasons,
        **({"missed_request_ids": trajectory.missed} if trajectory.missed else {}),
        "extra_fields": {
            "turns": [
                {"generation_id": turn.request_id, "start": turn.start - begin, "end": turn.end - begin}
                for turn in trajectory.turns
            ],
            **{
                name: [{"generation_id": i, "value": value} for i, value in values]
                for name, values in trajectory.extra.items()
            },
            **{name: array.described() for name, array in trajectory.per_token.items()},
        },
    }


def _numbers(array: NDArray[Any]) -> Iterator[bytes]:
    yield b"["
    for begin in range(0, len(array), CHUNK):
        inner = msgspec.json.encode(array[begin : begin + CHUNK].tolist())[1:-1]
        yield b"," + inner if begin else inner
    yield b"]"
