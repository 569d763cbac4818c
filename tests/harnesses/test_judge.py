"""The judge of harnesses sees what an echo changed, and which sampled tokens no trajectory has; needs no harness."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from tests.harnesses.families import FAMILIES, odd
from tests.harnesses.harness import harnesses
from tests.harnesses.judge import changes, judge, judge_scene, said
from tests.harnesses.plan import ANSWERS, Turn, spelled, task
from tests.harnesses.recorder import Exchange
from tests.support.vocabularies import load
from worker.engine.records import GenerationRecord

PLAN = task(FAMILIES[0], "look", {"where": "there"}, {"where": "here"}, {})


def echo(turn: Turn) -> dict[str, Any]:
    """A turn as a chat's client sends it back that keeps all of it."""
    content = "\n".join(part for part in (turn.text, turn.broken) if part)
    calls = [{"function": {"name": one.name, "arguments": one.arguments}} for one in turn.calls]
    return {"role": "assistant", "reasoning_content": turn.thought, "content": content, "tool_calls": calls}


def echoed(**changed: Any) -> list[str]:
    """What the judge says of a conversation whose first reply was changed."""
    messages: list[dict[str, Any]] = []
    for turn in PLAN:
        messages += [{"role": "user", "content": "and?"}, echo(turn)]
    messages[1] |= changed
    return changes(said({"messages": messages}), PLAN)


def test_an_echo_that_keeps_all_changes_nothing() -> None:
    assert echoed() == []


def test_turns_that_come_back_as_others_are_counted() -> None:
    said_all = [turn for one in PLAN for turn in said({"messages": [echo(one)]})]
    assert changes(said_all[1:], PLAN) == [f"1 of {len(PLAN)} turns dropped"]
    assert changes([said_all[0], *said_all], PLAN) == [f"{len(PLAN)} turns come back as {len(PLAN) + 1}"]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"reasoning_content": None}, "reasoning dropped"),
        ({"reasoning_content": "I ended."}, "reasoning changed"),
        ({"content": None}, "text dropped"),
        ({"content": "I look"}, "text changed"),
        ({"content": "  I \u200dlook. "}, "a zero-width joiner in a text"),
        ({"content": "I look."}, "outer white space of texts dropped"),
        ({"tool_calls": None}, "0 calls in place of 1"),
        (
            {"tool_calls": [{"function": {"name": "see", "arguments": PLAN[0].calls[0].arguments}}]},
            "a call's name changed",
        ),
        (
            {"tool_calls": [{"function": {"name": "look", "arguments": '{"where": "there"}'}}]},
            "arguments written again",
        ),
        ({"tool_calls": [{"function": {"name": "look", "arguments": "{}"}}]}, "arguments changed"),
    ],
)
def test_each_change_has_its_words(changed: dict[str, Any], told: str) -> None:
    assert echoed(**changed) == [told]


def test_dialects_say_the_same() -> None:
    used = {"type": "tool_use", "name": "look", "input": {"where": "there"}}
    blocks = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "I look."}, used]
    items = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "name": "look", "arguments": '{"where": "there"}'},
    ]
    parts: list[dict[str, Any]] = [{"text": "hm", "thought": True}, {"text": "I look."}]
    parts.append({"functionCall": {"name": "look", "args": {"where": "there"}}})
    found = said({"messages": [{"role": "assistant", "content": blocks}]})
    assert found == said({"input": items}) == said({"contents": [{"role": "model", "parts": parts}]})


def test_a_lost_turn_is_not_trained_on() -> None:
    log = [record((1, 2), (3, 4)), record((1, 2, 3, 4, 5), (6,))]
    asked = [Exchange("/", {"messages": []}, 200, {"x-radix-reused-tokens": kept}, b"", "task") for kept in ("0", "3")]
    whole = {"exact": True, "response_ids": [3, 4, 5, 6], "response_mask": [1, 1, 0, 1]}
    part = {"exact": True, "response_ids": [3, 4, 5, 6], "response_mask": [0, 0, 0, 1]}
    found = [judge("", asked, log, [one], PLAN[:2]) for one in (whole, part)]
    assert [(one.trained, one.sampled, one.reused, one.reusable) for one in found] == [(3, 3, 3, 4), (1, 3, 3, 4)]


def test_replies_are_spelled_as_no_encoder_would() -> None:
    known = load("qwen")
    text = FAMILIES[0].reply(PLAN[0])

    def encode(piece: str) -> list[int]:
        return known.encode(piece, add_special_tokens=False).ids

    ids = spelled(text, encode, 0)
    assert known.decode(ids, skip_special_tokens=False) == text
    assert ids != encode(text)
    assert json.loads(odd({"where": "there"})) == {"where": "there"}


def test_each_harness_has_pinned_packages() -> None:
    found = [*harnesses(), *harnesses(scenes=True)]
    assert len({one.name for one in found}) == len(found)
    assert all("==" in one.packages[0] or "@" in one.packages[0][1:] for one in found)
    assert all(one.because for one in found if one.trajectories != 1)
    assert ANSWERS


def test_the_token_that_ended_a_turn_may_be_missing() -> None:
    """Where a template writes another end, all of the turn but that token is trained on."""
    log = [record((1, 2), (3, 4, 5))]
    asked = [Exchange("/", {"messages": []}, 200, {}, b"", "task")]
    for kept, trained in (((3, 4, 5), 3), ((3, 4, 7), 2), ((3, 7, 7), 0)):
        one = {"exact": True, "response_ids": list(kept), "response_mask": [1, 1, 1]}
        assert judge("", asked, log, [one], PLAN[:1]).trained == trained


def test_a_scene_tells_whose_turns_a_trajectory_has() -> None:
    asked = [
        Exchange("/", {}, 200, {"x-generation-id": name, "x-radix-reasons": "left_out, edited_turn"}, b"", who)
        for name, who in (("a", "task"), ("b", "beside"), ("c", "task"))
    ]
    log = [record((1,), (2, 3)), record((1,), (4, 5)), record((1, 2, 3), (6, 7))]
    found = [
        {"exact": True, "root": root, "side_request": bool(root), "response_ids": ids, "response_mask": [1] * len(ids)}
        | {"extra_fields": {"turns": [{"generation_id": name} for name in turns]}}
        for root, turns, ids in ((1, "b", [4, 5]), (0, "ac", [2, 3, 6, 7]))
    ]
    cast = judge_scene("", asked, log, found, "c")
    assert cast.parts == ((("beside",), 1, True), (("task", "task"), 0, False))
    assert (cast.turns, cast.is_head, cast.sampled, cast.trained) == ({"task": 2, "beside": 1}, True, 6, 6)
    assert cast.reasons == {"left_out": 3, "edited_turn": 3}
    assert not judge_scene("", asked, log, found, "b").is_head
    assert judge_scene("", asked, log, found[1:], "c").trained == 4


@pytest.mark.parametrize(
    ("told", "who"),
    [
        ({"tools": [1]}, "task"),
        ({}, "side"),
        ({"tools": [1], "input": "Sum it up."}, "beside"),
        ({"a": "Sum it up."}, "beside"),
    ],
)
def test_who_asks_is_told_by_words_and_by_tools(told: dict[str, Any], who: str) -> None:
    one = dataclasses.replace(harnesses()[0], beside="Sum it up.")
    assert one.who(told) == who
    assert dataclasses.replace(one, beside="", marks="Sum").who({"input": "Sum it up."}) == "task"


def record(read: tuple[int, ...], sampled: tuple[int, ...]) -> GenerationRecord:
    made = GenerationRecord.__new__(GenerationRecord)
    object.__setattr__(made, "input_ids", read)
    object.__setattr__(made, "output_ids", sampled)
    return made
