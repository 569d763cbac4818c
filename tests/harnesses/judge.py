"""What a harness did to the tokens of one task, judged by the worker's log, the session's trajectories and the echoes."""

from __future__ import annotations

import collections
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.harnesses.plan import Call, Turn
from tests.harnesses.recorder import Exchange
from worker.engine.records import GenerationRecord

Json = dict[str, Any]
JOINER = "\u200d"


@dataclass(frozen=True)
class Verdict:
    """A row of the table.

    Attributes:
        answer: what it printed, in the end.
        turns: replies of the task that it asked for.
        side: requests that were none of the task's turns.
        statuses: of its requests that were refused.
        trajectories: those with a turn of the task; side requests' own are left out.
        exact: whether all of them are, the side requests' too.
        sampled: tokens that the worker sampled in turns of the task.
        trained: of these, the ones that are in a trajectory with mask 1.
        reusable, reused: tokens that the turn before had, and how many of them were kept, over all turns behind the first.
        reasons: words of the router, with the number of replies that say them.
        changes: how its echoes differ from what was sampled, in words.
    """

    answer: str
    turns: int
    side: int
    statuses: tuple[int, ...]
    trajectories: int
    exact: bool
    sampled: int
    trained: int
    reusable: int
    reused: int
    reasons: dict[str, int]
    changes: tuple[str, ...]


def judge(
    answer: str,
    exchanges: Sequence[Exchange],
    log: Sequence[GenerationRecord],
    trajectories: Sequence[Json],
    plan: Sequence[Turn],
) -> Verdict:
    """Judge one run; `log` has a record for each exchange that was answered, in their order."""
    answered = [one for one in exchanges if one.status == 200]
    assert len(answered) == len(log), "the worker sampled once for each reply"
    main = [(one, record) for one, record in zip(answered, log, strict=True) if not one.is_side]
    reusable = reused = 0
    for (_, before), (one, _) in itertools.pairwise(main):
        whole = len(before.input_ids) + len(before.output_ids)
        reusable += whole
        reused += min(whole, int(one.headers.get("x-radix-reused-tokens", 0)))
    wanted = [tuple(record.output_ids) for _, record in main]
    kept = [one for one in trajectories if any(_trained(one, ids) for ids in wanted)]
    echo = main[-1][0].body if main else {}
    return Verdict(
        answer,
        len(main),
        sum(one.is_side for one in exchanges),
        tuple(one.status for one in exchanges if one.status != 200),
        len(kept),
        all(one["exact"] for one in trajectories),
        sum(map(len, wanted)),
        sum(max((_trained(one, ids) for one in kept), default=0) for ids in wanted),
        reusable,
        reused,
        _reasons(answered),
        tuple(_named(echo) or changes(said(echo), plan[: len(main) - 1])),
    )


@dataclass(frozen=True)
class Cast:
    """What became of a scene: two conversations in one session.

    Attributes:
        answer: what it printed, in the end.
        turns: replies by who asked: the `task`, `beside`, `side`.
        sampled, trained: tokens of all of them; those that are in a trajectory with mask 1.
        exact: whether all trajectories are.
        parts: for each trajectory, whose turns it has, its root, and whether it says `side_request`.
        is_head: whether `current_head` is the last turn of the task.
        reasons: words of the router, with the number of replies that say them.
    """

    answer: str
    turns: dict[str, int]
    sampled: int
    trained: int
    exact: bool
    parts: tuple[tuple[tuple[str, ...], int, bool], ...]
    is_head: bool
    reasons: dict[str, int]


def judge_scene(
    answer: str,
    exchanges: Sequence[Exchange],
    log: Sequence[GenerationRecord],
    trajectories: Sequence[Json],
    head: str,
) -> Cast:
    """Judge a scene; `head` is the session's `current_head`, and `log` has a record for each answer, in their order."""
    answered = [one for one in exchanges if one.status == 200]
    assert len(answered) == len(log), "the worker sampled once for each reply"
    whose = {one.headers["x-generation-id"]: one.who for one in answered}
    sampled = [tuple(record.output_ids) for record in log]
    turns = collections.Counter(whose.values())
    parts = tuple(
        (
            tuple(whose[turn["generation_id"]] for turn in one["extra_fields"]["turns"]),
            one["root"],
            one["side_request"],
        )
        for one in trajectories
    )
    last = [one.headers["x-generation-id"] for one in answered if not one.is_side][-1]
    return Cast(
        answer,
        dict(turns),
        sum(map(len, sampled)),
        sum(max((_trained(one, ids) for one in trajectories), default=0) for ids in sampled),
        all(one["exact"] for one in trajectories),
        parts,
        last == head,
        _reasons(answered),
    )


def _reasons(answered: Sequence[Exchange]) -> dict[str, int]:
    words = (one.headers.get("x-radix-reasons", "").split(", ") for one in answered)
    return dict(collections.Counter(word for found in words for word in found if word))


def _named(body: Json) -> list[str]:
    """What a request of the Responses API names in place of repeating it."""
    if body.get("previous_response_id"):
        return ["names the response before in place of its history"]
    items = body.get("input") or []
    return ["names items in place of repeating them"] if any(_kind(one) == "item_reference" for one in items) else []


def _kind(item: Any) -> str:
    return str(item.get("type")) if isinstance(item, dict) else ""


def _trained(trajectory: Json, sampled: tuple[int, ...]) -> int:
    """How many of these ids a trajectory has in a row with mask 1: all, all but the one that ended the turn, or none."""
    ids, mask = trajectory["response_ids"], trajectory["response_mask"]
    for size in (len(sampled), len(sampled) - 1):
        places = (at for at in range(len(ids) - size + 1) if tuple(ids[at : at + size]) == sampled[:size])
        if size and any(all(mask[at : at + size]) for at in places):
            return size
    return 0


@dataclass
class Said:
    """A reply as a harness sends it back."""

    thought: str = ""
    text: str = ""
    calls: list[Call] | None = None


def said(body: Json) -> list[Said]:
    """Return the assistant's turns of a request, of any dialect; what stands between two results is one turn."""
    turns: list[Said] = []
    fresh = True
    for item in body.get("messages", body.get("input", body.get("contents", ()))):
        if isinstance(item, str):
            continue
        kind, role = item.get("type", "message"), item.get("role")
        if role in ("assistant", "model") or kind in ("reasoning", "function_call", "custom_tool_call"):
            if fresh:
                turns.append(Said(calls=[]))
            fresh = False
            _read(item, turns[-1])
        else:
            fresh = True
    return turns


def _read(item: Json, turn: Said) -> None:
    assert turn.calls is not None
    kind = item.get("type", "message")
    if kind == "function_call":
        turn.calls.append(Call(item["name"], item["arguments"]))
    elif kind == "reasoning":
        parts = (item.get("content") or []) + (item.get("summary") or [])
        turn.thought += "".join(part.get("text", "") for part in parts)
    elif kind == "message":
        turn.thought += item.get("reasoning_content") or item.get("reasoning") or ""
        content = item.get("content") or item.get("parts") or []
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            if "functionCall" in part:
                turn.calls.append(Call(part["functionCall"]["name"], json.dumps(part["functionCall"]["args"])))
            elif part.get("thought"):
                turn.thought += part["text"]
            elif part.get("type") == "tool_use":
                turn.calls.append(Call(part["name"], json.dumps(part["input"])))
            elif part.get("type") == "thinking":
                turn.thought += part["thinking"]
            else:
                turn.text += part.get("text", "")
        for call in item.get("tool_calls") or ():
            turn.calls.append(Call(call["function"]["name"], call["function"]["arguments"]))


def changes(echoes: Sequence[Said], plan: Sequence[Turn]) -> list[str]:
    """Tell in words what echoes changed in the replies of the plan, each kind of change once."""
    if len(echoes) < len(plan):
        return [f"{len(plan) - len(echoes)} of {len(plan)} turns dropped"]
    if len(echoes) > len(plan):
        return [f"{len(plan)} turns come back as {len(echoes)}"]
    found: dict[str, None] = {}
    for echo, turn in zip(echoes, plan, strict=True):
        if turn.thought and not echo.thought.strip():
            found["reasoning dropped"] = None
        elif turn.thought.strip() != echo.thought.strip():
            found["reasoning changed"] = None
        whole = "\n".join(part for part in (turn.text, turn.broken) if part)
        text = echo.text.replace(JOINER, "")
        if text != echo.text:
            found["a zero-width joiner in a text"] = None
        if whole.strip() and not text.strip():
            found["text dropped"] = None
        elif whole.strip() != text.strip():
            found["text changed"] = None
        elif whole != text and turn.text:
            found["outer white space of texts dropped"] = None
        calls = echo.calls or []
        if len(calls) != len(turn.calls):
            found[f"{len(calls)} calls in place of {len(turn.calls)}"] = None
            continue
        for call, sampled in zip(calls, turn.calls, strict=True):
            if call.name != sampled.name:
                found["a call's name changed"] = None
            if call.arguments == sampled.arguments:
                continue
            same = _json(call.arguments) == _json(sampled.arguments)
            found["arguments written again" if same else "arguments changed"] = None
    return list(found)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
