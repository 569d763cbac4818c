"""Calls of one turn that a client wrote apart: their ids put them together."""

from __future__ import annotations

from typing import Any

import pytest

from middleware_hub.chat.call_ids import call_id
from middleware_hub.dialects.messages import rejoined

Said = dict[str, Any]


def a(*ids: str, content: str | None = None) -> Said:
    calls = [{"id": i, "type": "function", "function": {"name": "f", "arguments": {}}} for i in ids]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def t(name: str) -> Said:
    return {"role": "tool", "tool_call_id": name, "content": name}


def u(text: str) -> Said:
    return {"role": "user", "content": text}


C = [call_id("g", number) for number in range(3)]
OTHER = call_id("h", 0)


@pytest.mark.parametrize(
    ("listed", "wanted"),
    [
        (
            [[u("x")], [a(C[0])], [t(C[0])], [a(C[1])], [t(C[1])]],
            [[u("x")], [a(*C[:2]), t(C[0])], [], [], [t(C[1])]],
        ),
        (
            [[a(C[0], content="w")], [t(C[0])], [a(C[1], content="w")], [t(C[1])], [a(C[2])], [t(C[2])], [u("x")]],
            [[a(*C, content="w"), t(C[0]), t(C[1])], [], [], [], [], [t(C[2])], [u("x")]],
        ),
        ([[a(C[0])], [a(C[1])], [t(C[0]), t(C[1])]], [[a(*C[:2])], [], [t(C[0]), t(C[1])]]),
    ],
    ids=["call, result, call, result", "three, with their text twice", "calls apart, results together"],
)
def test_calls_of_a_turn_that_were_written_apart_are_one_message(
    listed: list[list[Said]], wanted: list[list[Said]]
) -> None:
    assert [list(one) for one in rejoined(listed)] == wanted


@pytest.mark.parametrize(
    "listed",
    [
        [[a(C[0])], [t(C[0])], [a(OTHER)], [t(OTHER)]],
        [[a(C[1])], [t(C[1])], [a(C[0])], [t(C[0])]],
        [[a(C[0])], [t(C[0]), u("and")], [a(C[1])], [t(C[1])]],
        [[a(C[0])], [t(C[0])], [a(C[1], content="other words")], [t(C[1])]],
        [[a(C[0], content="w")], [t(C[0])], [{"role": "assistant", "content": "w"}]],
        [[a("call00001")], [t("call00001")], [a("call00002")], [t("call00002")]],
        [[a(*C)], [t(one) for one in C]],
    ],
)
def test_what_is_no_one_turn_stays_as_it_is(listed: list[list[Said]]) -> None:
    assert [list(one) for one in rejoined(listed)] == listed
