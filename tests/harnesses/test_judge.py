"""The judge of harnesses sees what an echo changed, and which sampled tokens no trajectory has; needs no harness."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.harnesses.harness import harnesses
from tests.harnesses.judge import changes, judge, said
from tests.harnesses.plan import ANSWERS, Turn, odd, spelled, task
from tests.harnesses.recorder import Exchange
from tests.support.vocabularies import load
from worker.engine.records import GenerationRecord

PLAN = task("look", {"where": "there"}, {"where": "here"}, {})


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


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"reasoning_content": None}, "reasoning dropped"),
        ({"reasoning_content": "I ended."}, "reasoning changed"),
        ({"content": None}, "text dropped"),
        ({"content": "I look"}, "text changed"),
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
    assert said({"messages": [{"role": "assistant", "content": blocks}]}) == said({"input": items})


def test_a_lost_turn_is_not_trained_on() -> None:
    log = [GenerationRecord.__new__(GenerationRecord) for _ in range(2)]
    for record, (read, sampled) in zip(log, [((1, 2), (3, 4)), ((1, 2, 3, 4, 5), (6,))], strict=True):
        object.__setattr__(record, "input_ids", read)
        object.__setattr__(record, "output_ids", sampled)
    asked = [Exchange("/", {"messages": []}, 200, {"x-radix-reused-tokens": kept}, b"", False) for kept in ("0", "3")]
    whole = {"exact": True, "response_ids": [3, 4, 5, 6], "response_mask": [1, 1, 0, 1]}
    part = {"exact": True, "response_ids": [3, 4, 5, 6], "response_mask": [0, 0, 0, 1]}
    found = [judge("", asked, log, [one], PLAN[:2]) for one in (whole, part)]
    assert [(one.trained, one.sampled, one.reused, one.reusable) for one in found] == [(3, 3, 3, 4), (1, 3, 3, 4)]


def test_replies_are_spelled_as_no_encoder_would() -> None:
    known = load("qwen")
    text = PLAN[0].sampled

    def encode(piece: str) -> list[int]:
        return known.encode(piece, add_special_tokens=False).ids

    ids = spelled(text, encode, 0)
    assert known.decode(ids, skip_special_tokens=False) == text
    assert ids != encode(text)
    assert json.loads(odd({"where": "there"})) == {"where": "there"}


def test_each_harness_has_pinned_packages() -> None:
    found = harnesses()
    assert len({one.name for one in found}) == len(found)
    assert all("==" in one.packages[0] or "@" in one.packages[0][1:] for one in found)
    assert all(one.because for one in found if one.trajectories != 1)
    assert ANSWERS
