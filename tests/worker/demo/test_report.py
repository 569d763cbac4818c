"""The report of the rollouts, above all where something is wrong."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from tests.worker.demo.support import TOKENIZER, rollout
from worker.demo.respelling import Speller
from worker.demo.rollout import Rollout
from worker.demo.show import example, table, transcript

SPELLER = Speller(TOKENIZER)


def printed(content: Any) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=110).print(content)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def cells(rollouts: Sequence[Rollout]) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("  ") if cell] for line in printed(table(rollouts, SPELLER))]


def test_the_table_has_a_line_for_each_and_one_for_all() -> None:
    head, line, first, second, _, last = cells([rollout(), rollout()])
    assert head[0] == "turns"
    assert set(line[0]) == {"─"}
    assert first == ["1", "1", "3", "2", "2 (100%)", "exact", "0 of 1"]
    assert second == ["2", *first[1:]]
    assert last[0] == "all"
    assert "4 (100%)" in last
    assert "2 of 2 exact" in last


def test_a_rollout_that_is_not_exact_is_shown() -> None:
    *_, second, _, last = cells([rollout(), rollout(tokens=[1, 2, 3])])
    assert "NOT EXACT" in second
    assert "1 of 2 exact" in last


def test_the_example_is_a_place_that_encodes_to_other_tokens() -> None:
    assert str(example([rollout()], SPELLER)) == "sampled [ se][arch]; its text encodes to [ search]"


def test_a_transcript_has_a_bar_before_each_line_and_bold_what_was_sampled() -> None:
    found = rollout()
    found.turns = [("\nQuestion: [b]?\nAction:", " look\nat it"), ("\nAnswer:", " 7")]
    shown = transcript(found)
    assert printed(shown) == [
        "  │ Answer the question. You may search and calculate.",
        "  │ Question: [b]?",
        "  │ Action: look",
        "  │ at it",
        "  │ Answer: 7",
    ]
    bold = [shown.plain[span.start : span.end] for span in shown.spans if span.style == "bold"]
    assert bold == [" look", "at it", " 7"]
