"""Trajectories in ATIF 1.7, the Agent Trajectory Interchange Format (Harbor's RFC 0001, `harbor.models.trajectories` 0.26).

    system, user            a step of that source
    assistant               a step of the agent: text, reasoning, calls; `metrics` if it was sampled here
    tool                    a result in the `observation` of the agent's step before it

`metrics` have the ids of the generation as the engine had them: all that was sent, and all that was sampled, one logprob for
each. So a document grows with the square of its turns. A step whose tokens are trained in another trajectory, or were not
sampled here, has `is_copied_context`: consumers leave it out of training. What the format has no field for stands in `extra`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

import msgspec
import numpy as np
from msgspec import Raw

from middleware_hub.media.part import IMAGE
from middleware_hub.media.picture import base64_pieces
from middleware_hub.sessions.export.trajectories import BranchTrajectory
from middleware_hub.spans.chain import printed_ids, unpack_logprobs
from middleware_hub.spans.trajectory import SampledTurn

VERSION: Final = "ATIF-v1.7"
_MIMES: Final = frozenset({"image/jpeg", "image/png", "image/gif", "image/webp"})
"""The format has no others."""
_UNKNOWN: Final = "unknown"

_encode = msgspec.json.Encoder().encode


def as_atif(found: Iterable[BranchTrajectory], head: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield `{...head, "trajectories": [...]}` in pieces, as `formats.as_json` does; each trajectory is a document."""
    yield _encode(head)[:-1] + b',"trajectories":['
    for number, trajectory in enumerate(found):
        if number:
            yield b","
        yield from atif_json(trajectory, head)
    yield b"]}"


def atif_json(trajectory: BranchTrajectory, head: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield the document of one trajectory in pieces, one for each step.

    Args:
        head: has `session_id`, and `metadata`, whose object `agent` may name the agent: `name`, `version`, `model_name`.
    """
    given = (head.get("metadata") or {}).get("agent")
    agent = given if isinstance(given, dict) else {"name": given} if isinstance(given, str) else {}
    document = {
        "schema_version": VERSION,
        "session_id": head["session_id"],
        "trajectory_id": trajectory.branch,
        "agent": {
            "name": _word(agent, "name") or _UNKNOWN,
            "version": _word(agent, "version") or _UNKNOWN,
            **({"model_name": name} if (name := _word(agent, "model_name")) else {}),
        },
        "final_metrics": {
            "total_prompt_tokens": sum(turn.start for turn in trajectory.turns),
            "total_completion_tokens": sum(turn.span.count for turn in trajectory.turns),
        },
        "extra": _beside(trajectory),
    }
    steps = _Steps(trajectory)
    yield _encode(document)[:-1] + b',"steps":['
    for number, step in enumerate(steps, 1):
        if number > 1:
            yield b","
        yield _encode({"step_id": number, **step})
    yield b"]}"


def _word(fields: Mapping[str, Any], name: str) -> str | None:
    found = fields.get(name)
    return found if isinstance(found, str) else None


def _beside(trajectory: BranchTrajectory) -> dict[str, Any]:
    """Return what the format has no fields for. Positions are those of `finalize`: offsets into its `response_ids`."""
    stepless = [turn.request_id for turn in trajectory.turns if turn.request_id not in trajectory.answers]
    return {
        "parent_branch": trajectory.parent_branch,
        "root": trajectory.root,
        "system_digest": trajectory.system_digest,
        "tools_digest": trajectory.tools_digest,
        "side_request": trajectory.side_request,
        "lora_path": trajectory.lora,
        "finish_reason": trajectory.finish_reason,
        "reward_info": trajectory.reward_info,
        "weight_versions": [{"version": v, "start": low, "end": high} for v, low, high in trajectory.weight_versions],
        "exact": trajectory.exact,
        "reasons": trajectory.reasons,
        **({"missed_request_ids": trajectory.missed} if trajectory.missed else {}),
        # Of a turn that was edited afterwards, the message is the edited one.
        **({"edited_generation_ids": stepless} if stepless else {}),
    }


class _Steps:
    """The steps of a trajectory, in order, without their numbers. Iterated once."""

    def __init__(self, trajectory: BranchTrajectory) -> None:
        self._trajectory = trajectory
        self._mask = trajectory.response_mask
        self._ids = np.concatenate((trajectory.prompt_ids, trajectory.response_ids)).astype(np.int32, copy=False)
        self._begin = len(trajectory.prompt_ids)
        turns = {turn.request_id: turn for turn in trajectory.turns}
        self._turns = {at: turns[name] for name, at in trajectory.answers.items() if name in turns}
        self._images = {image["digest"]: image for image in trajectory.images}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        step: dict[str, Any] | None = None
        for at, raw in enumerate(self._trajectory.messages):
            message = msgspec.json.decode(raw)
            role = message.get("role")
            if role == "tool":
                step = step or {"source": "system", "message": ""}  # a result without a call before it
                step.setdefault("observation", {"results": []})["results"].append(self._result(message, step))
                continue
            if step is not None:
                yield step
            step = self._step(at, role, message)
        if step is not None:
            yield step

    def _step(self, at: int, role: str, message: Mapping[str, Any]) -> dict[str, Any]:
        content, lost = self._content(message.get("content"))
        step: dict[str, Any] = {
            "source": {"assistant": "agent", "user": "user"}.get(role, "system"),
            "message": "" if content is None else content,
        }
        extra: dict[str, Any] = {"images_unknown": lost} if lost else {}
        if role not in ("assistant", "user", "system"):
            extra["role"] = role
        if name := message.get("name"):
            extra["name"] = name
        if role == "assistant":
            if message.get("reasoning_content"):
                step["reasoning_content"] = message["reasoning_content"]
            if calls := message.get("tool_calls"):
                step["tool_calls"] = [_call(one) for one in calls]
            turn = self._turns.get(at)
            if turn is None or not self._mask[turn.start - self._begin : turn.end - self._begin].any():
                step["is_copied_context"] = True
            if turn is not None:
                step["llm_call_count"] = 1
                step["metrics"] = self._metrics(turn)
        if extra:
            step["extra"] = extra
        return step

    def _metrics(self, turn: SampledTurn) -> dict[str, Any]:
        span = turn.span
        found: dict[str, Any] = {
            "prompt_tokens": turn.start,
            "completion_tokens": span.count,
            "prompt_token_ids": Raw(printed_ids(self._ids[: turn.start].tobytes())),
            "completion_token_ids": Raw(printed_ids(span.ids)),
        }
        if span.logprobs is not None:
            found["logprobs"] = unpack_logprobs(span.logprobs, span.count).tolist()
        return {**found, "extra": turn.described(self._begin)}

    def _result(self, message: Mapping[str, Any], step: Mapping[str, Any]) -> dict[str, Any]:
        content, lost = self._content(message.get("content"))
        call = message.get("tool_call_id")
        known = any(one["tool_call_id"] == call for one in step.get("tool_calls", ()))
        extra = {
            **({} if known or not call else {"tool_call_id": call}),
            **({"name": message["name"]} if message.get("name") else {}),
            **({"images_unknown": lost} if lost else {}),
        }
        found: dict[str, Any] = {"content": content, **({"extra": extra} if extra else {})}
        return {"source_call_id": call, **found} if known else found

    def _content(self, content: Any) -> tuple[str | list[dict[str, Any]] | None, list[str]]:
        """Return a message's content, and the digests of images of which the type is not known."""
        if not isinstance(content, list):
            return content, []
        parts, lost = list[dict[str, Any]](), list[str]()
        for part in content:
            if part.get("type") != IMAGE:
                parts.append({"type": "text", "text": part.get("text", "")})
            elif (image := self._images.get(part["digest"])) is not None and image["mime"] in _MIMES:
                mime, data = image["mime"], image.get("bytes")
                path: str | Raw = f"/media/{part['digest']}" if data is None else _data_url(mime, data)
                parts.append({"type": "image", "source": {"media_type": mime, "path": path}})
            else:
                lost.append(part["digest"])
        return parts, lost


def _data_url(mime: str, data: bytes) -> Raw:
    """Return the JSON of a file's data URL. As a string, all of it would be looked through for characters to escape."""
    return Raw(b"".join((b'"data:%b;base64,' % mime.encode(), *base64_pieces(data), b'"')))


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call. Arguments that are no JSON object are kept as their text, beside an empty object."""
    function = call["function"]
    given = arguments = function["arguments"]
    if isinstance(given, str):  # of a sampled call
        with suppress(msgspec.DecodeError):
            arguments = msgspec.json.decode(given)
    found = {"tool_call_id": call.get("id") or "", "function_name": function["name"]}
    if isinstance(arguments, dict):
        return {**found, "arguments": arguments}
    return {**found, "arguments": {}, "extra": {"arguments": given}}
