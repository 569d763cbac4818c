"""Ids of calls: which generation they name, and which calls they put together."""

from __future__ import annotations

from typing import Any

import pytest

from middleware_hub.chat.call_ids import call_id, is_of, place_of, rejoined

Said = dict[str, Any]


def a(*ids: str, content: str | None = None) -> Said:
    calls = [{"id": i, "type": "function", "function": {"name": "f", "arguments": {}}} for i in ids]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def t(name: str) -> Said:
    return {"role": "tool", "tool_call_id": name, "content": name}


def u(text: str) -> Said:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("short", [False, True])
def test_an_id_says_whose_it_is(short: bool) -> None:
    ids = [call_id(generation, number, short=short) for generation in ("g1", "g2") for number in range(40)]
    assert len(set(ids)) == 80
    assert [place.number for one in ids if (place := place_of(one))] == [*range(40), *range(40)]
    assert [is_of(one, "g1") for one in ids] == [True] * 40 + [False] * 40
    assert {len(one) for one in ids} == {9 if short else 29}
    assert all(one.isalnum() for one in ids) is short


@pytest.mark.parametrize("name", ["call_1", "call00001", "call00002", "f" * 24, "call_" + "0" * 24, None, 3, ""])
def test_other_ids_say_nothing(name: object) -> None:
    assert place_of(name) is None
    assert not is_of(name, "g1")


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
