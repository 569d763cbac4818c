"""The report at the end, above all where something is wrong."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from tokenizers import Tokenizer

from tests.worker.demo.agent.session import evidence, record, trajectories, turns
from worker.demo.agent.show import Report
from worker.demo.agent.team import Played, reward
from worker.engine.records import GenerationRecord
from worker.models.ngram import shipped_tokenizer

TOKENIZER = Tokenizer.from_file(str(shipped_tokenizer() / "tokenizer.json"))


def report(given: list[dict[str, Any]], known: dict[str, GenerationRecord]) -> Report:
    return Report(Played(turns(), {"two": 0.5}, given), known, TOKENIZER)


def printed(content: Any, *, colors: bool = False) -> str:
    out = io.StringIO()
    Console(file=out, width=110, force_terminal=colors).print(content, highlight=False)
    return out.getvalue()


def test_the_table_has_a_row_for_each_trajectory_and_one_for_all() -> None:
    found = report(trajectories(), evidence())
    _, _, first, second, _, last, _ = printed(found.table()).splitlines()
    assert first.split()[:9] == ["A", "1", "2", "3", "1", "5", "1,", "2", "yes"]
    assert second.split()[:10] == ["B", "(1)", "2", "3", "3", "2", "1,", "2", "yes", "8"]
    assert last.split()[:5] == ["all", "3", "6", "4", "7"]
    assert found.holds
    assert found.conclusion().plain.startswith("17 ids in 2 trajectories, and each is the one that a worker wrote down")
    assert "7 were sampled, in 3 generations" in found.conclusion().plain


def test_a_trajectory_that_is_not_exact_is_shown() -> None:
    given = trajectories()
    given[1]["response_ids"][3] += 1
    found = report(given, evidence())
    assert not found.holds
    assert found.conclusion().plain.splitlines() == [
        "NOT EXACT: this should not happen, please report it",
        "turn 2: what was sampled is not what the worker has",
    ]
    assert "NO: 7 of 8" in printed(found.table())


def test_no_trajectories_are_not_exact() -> None:
    assert not report([], {}).holds


def test_a_generation_that_is_in_no_trajectory_is_shown() -> None:
    known = evidence()
    known["four"] = known["three"]
    assert "generation four is in no trajectory" in report(trajectories(), known).conclusion().plain


@pytest.mark.parametrize(
    ("scripted", "said"),
    [(0, "0 of the scripted ones, 2"), (1, "1 of the scripted ones, 1"), (3, "2 of the scripted ones, 0")],
)
def test_only_trained_ids_count_as_wrong_if_encoded_again(scripted: int, said: str) -> None:
    """` se` and `arch` were sampled, ` search` is what encoding their text gives; shared turns count once."""
    pieces = [TOKENIZER.encode(piece, add_special_tokens=False).ids for piece in ("The", " se", "arch", "<|im_end|>")]
    assert all(len(piece) == 1 for piece in pieces)
    prompt, *sampled = [piece[0] for piece in pieces]
    given = trajectories()[:1]
    given[0].update(
        branch="one",
        prompt_ids=[prompt],
        response_ids=sampled,
        response_mask=[1, 1, 1],
        response_logprobs=[-1.0] * 3,
        weight_versions=[{"version": "1", "start": 0, "end": 3}],
    )
    given[0]["extra_fields"]["turns"] = [{"generation_id": "one", "start": 0, "end": 3}]
    played = Played({"one": replace(turns()["one"], scripted=scripted)}, {}, given)
    known = {"one": record([prompt], sampled, [-1.0] * 3, ["1"] * 3)}
    found = Report(played, known, TOKENIZER)
    assert f"2 of these 3 wrong (67%): {said} of the others" in found.conclusion().plain
    assert "sampled [ se][arch]; its text encodes to [ search]" in found.conclusion().plain


@pytest.mark.parametrize("colors", [False, True])
def test_only_a_terminal_gets_colors(colors: bool) -> None:
    found = report(trajectories(), evidence())
    assert ("\033[" in printed(found, colors=colors)) == colors


def test_an_answer_with_all_numbers_has_the_best_reward() -> None:
    assert reward("By 814 m: 3,776 m against 2,962 m") == 1
    assert reward("no idea") == 0
