"""Arrays with a row for each token, joined along a chain and compared with a dictionary of rows."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw
from numpy.typing import NDArray

from middleware_hub.spans.per_token import MISSING, PerTokenArray, TurnRows, joined


def encoded(rows: NDArray[Any]) -> Raw:
    """As SGLang writes it."""
    return Raw(json.dumps(base64.b64encode(rows.astype("<i4").tobytes()).decode()).encode())


@dataclass(frozen=True)
class Reported:
    """One turn: its tokens, how many of them its branch keeps, and the first row that it told; None: it told nothing."""

    tokens: int
    kept: int
    start: int | None

    def rows(self, number: int, width: int) -> NDArray[np.int32]:
        """No two turns, rows or columns are alike."""
        assert self.start is not None
        places = np.arange(self.start, self.tokens - 1)[:, None] * 100 + np.arange(width)
        return (places + number * 10_000_000).astype(np.int32)


def values(turns: list[Reported], width: int) -> list[TurnRows]:
    return [
        TurnRows(str(number), turn.tokens, turn.kept, encoded(turn.rows(number, width)))
        for number, turn in enumerate(turns)
        if turn.start is not None
    ]


def oracle(turns: list[Reported], width: int) -> tuple[list[list[int]], list[str | None]]:
    """Each row, and who told it."""
    found: dict[int, tuple[list[int], str]] = {}
    for number, turn in enumerate(turns):
        if turn.start is None:
            continue
        for row, place in zip(turn.rows(number, width).tolist(), range(turn.start, turn.tokens - 1), strict=True):
            if place < turn.kept:
                found.setdefault(place, (row, str(number)))
    places = range(turns[-1].tokens - 1)
    return (
        [found[place][0] if place in found else [MISSING] * width for place in places],
        [found[place][1] if place in found else None for place in places],
    )


def tellers(found: PerTokenArray) -> list[str | None]:
    spread: list[str | None] = [None] * found.rows
    for part in found.described()["told"]:
        assert spread[part["start"] : part["end"]] == [None] * (part["end"] - part["start"]), "told twice"
        spread[part["start"] : part["end"]] = [part["generation_id"]] * (part["end"] - part["start"])
    return spread


def must(turns: list[Reported], width: int) -> PerTokenArray:
    found = joined(values(turns, width), turns[-1].tokens)
    assert found is not None
    return found


@st.composite
def conversations(draw: st.DrawFn) -> list[Reported]:
    """Turns of which at least one told all of its rows; some leave sampled tokens out for what comes behind them."""
    turns: list[Reported] = []
    kept = 0
    count = draw(st.integers(1, 6))
    for number in range(count):
        context = draw(st.integers(1, 5))
        sampled = draw(st.integers(1, 5))
        tokens = kept + context + sampled
        kept = tokens - (draw(st.integers(0, sampled)) if number < count - 1 else 0)
        turns.append(Reported(tokens, kept, draw(st.none() | st.just(0) | st.integers(0, tokens - 1))))
    whole = draw(st.integers(0, count - 1))
    turns[whole] = Reported(turns[whole].tokens, turns[whole].kept, 0)
    return turns


@given(conversations(), st.integers(1, 7))
def test_every_row_is_of_the_first_turn_that_reported_it(turns: list[Reported], width: int) -> None:
    found = must(turns, width)
    rows, who = oracle(turns, width)
    assert found.described()["shape"] == [turns[-1].tokens - 1, width]
    assert found.array().tolist() == rows
    assert tellers(found) == who
    assert b"".join(found.as_base64()) == base64.b64encode(found.array().tobytes())


def test_a_prompt_that_was_read_again_changes_no_row_of_earlier_samples() -> None:
    found = must([Reported(5, 5, 0), Reported(10, 10, 0)], 1)
    assert tellers(found) == ["0"] * 4 + ["1"] * 5


def test_a_turn_may_report_all_rows_or_only_new_ones() -> None:
    whole = must([Reported(5, 5, 0), Reported(10, 10, 0)], 3)
    assert must([Reported(5, 5, 0), Reported(10, 10, 4)], 3).array().tolist() == whole.array().tolist()


def test_rows_that_no_turn_reported_are_marked() -> None:
    found = must([Reported(4, 4, 0), Reported(8, 8, None), Reported(12, 12, 9)], 2)
    assert found.array()[3:9].tolist() == [[MISSING, MISSING]] * 6
    assert tellers(found) == ["0"] * 3 + [None] * 6 + ["2"] * 2


def test_a_stop_token_that_was_left_out_gives_no_row() -> None:
    found = must([Reported(6, 4, 0), Reported(9, 9, None)], 2)
    assert tellers(found) == ["0"] * 4 + [None] * 4


def test_long_ones_come_in_pieces() -> None:
    turns = [Reported(301, 301, 0), Reported(700, 700, None), Reported(1200, 1200, 850)]
    found = must(turns, 97)
    pieces = list(found.as_base64())
    assert max(map(len, pieces)) <= 64 * 1024 + 4 < sum(map(len, pieces))
    rows, _ = oracle(turns, 97)
    assert found.array().tolist() == rows
    assert np.frombuffer(base64.b64decode(b"".join(pieces)), "<i4").reshape(1199, 97).tolist() == rows


class TestWhatIsNotJoined:
    """What has another shape stays as it came."""

    def test_the_width_is_not_guessed_if_no_turn_reported_all_rows(self) -> None:
        assert joined(values([Reported(8, 8, 2)], 3), 8) is None
        assert joined(values([Reported(8, 8, 2), Reported(20, 20, 7)], 3), 20) is None

    def test_turns_with_different_widths(self) -> None:
        other = TurnRows("other", 20, 20, encoded(np.zeros((19, 4))))
        assert joined([*values([Reported(8, 8, 0)], 3), other], 20) is None

    @pytest.mark.parametrize(
        "value",
        [
            b"[[1, 2]]",
            b"null",
            b"7",
            b'""',
            b'"',
            b'"AAAA"',
            b'"AAAAAA=="AAAAAA"',
            b'"AAAAAAA"',
            b'"AAAAAAAAAAAAAAAAAA"',
            b'"AAAAA\\n=="',
            b'"AAAA\xc3\xa9AAAAAAAAAA"',
            b'"AA=AAAAAAAAAAAA="',
            b'"AAAAAAAAAAAA=A=="',
        ],
    )
    def test_what_is_no_base64_of_whole_numbers(self, value: bytes) -> None:
        for tokens in (2, 3, 4):
            assert joined([TurnRows("a", tokens, tokens, Raw(value))], tokens) is None

    def test_a_turn_of_one_token(self) -> None:
        assert joined([TurnRows("a", 1, 1, encoded(np.zeros(4)))], 1) is None

    def test_no_turn(self) -> None:
        assert joined([], 5) is None
