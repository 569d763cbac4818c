"""Ids of calls: which generation they name."""

from __future__ import annotations

import pytest

from middleware_hub.chat.call_ids import call_id, is_of, place_of


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
