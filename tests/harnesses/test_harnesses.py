"""Harnesses for real: one task, a scripted model, an unchanged agent; every sampled token is trained on.

`make test-harnesses` runs them all, with `ARGS="-k codex"` one; each installs its own environment at its first run. The rows go
to `TITO_HARNESSES_OUT`, a folder, for `python -m tests.harnesses.table`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harnesses.families import FAMILIES, Family
from tests.harnesses.harness import Harness, harnesses
from tests.harnesses.judge import judge, judge_scene
from tests.harnesses.plan import ANSWERS, Turn, more, scene, task
from tests.harnesses.rig import run
from tests.support.stack import Stack, stack

OF_EACH_FAMILY = ("claude_code", "codex", "openai_agents", "openai_agents_responses", "langchain_chat", "inspect_ai")
"""Harnesses that run with models of all families; with `TITO_HARNESSES_FAMILIES=all` each of them does."""
ALL = os.environ.get("TITO_HARNESSES_FAMILIES") == "all"
RUNS = [
    pytest.param(harness, family, id=harness.name if family is FAMILIES[0] else f"{harness.name}-{family.name}")
    for family in FAMILIES
    for harness in harnesses()
    if family is FAMILIES[0] or ALL or harness.name in OF_EACH_FAMILY
]

pytestmark = pytest.mark.harness


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Family], Stack]]:
    """A stack for each family, as it is asked for."""
    with contextlib.ExitStack() as entered:

        @functools.cache
        def serve(family: Family) -> Stack:
            folder = family.tokenizer(tmp_path_factory.mktemp(family.template))
            return entered.enter_context(stack("qwen", styles=("incremental",), folder=folder))

        yield serve


def planned(harness: Harness, family: Family) -> list[Turn]:
    if harness.replies:
        return [Turn("its own form", "", text) for text in harness.replies]
    turns = task(family, harness.tool, harness.first, harness.second, harness.last, unknown=harness.unknown)
    return [*turns, more()] if harness.resume else turns


@pytest.mark.parametrize(("harness", "family"), RUNS)
def test_one_task_is_one_trajectory(
    harness: Harness, family: Family, served: Callable[[Family], Stack], tmp_path: Path
) -> None:
    made, plan = served(family), planned(harness, family)
    ran = run(harness, family, made, {"task": plan}, tmp_path)
    verdict = judge(ran.answer, ran.exchanges, ran.log, ran.trajectories, plan)
    write_row(harness, family, verdict)
    assert made.idle()
    assert verdict.turns == len(plan)
    assert same(ANSWERS[harness.resume], verdict.answer)
    assert (verdict.trajectories, verdict.exact) == (harness.trajectories, True)
    assert verdict.trained == verdict.sampled - verdict.reasons.get("left_out", 0)


@pytest.mark.parametrize("harness", harnesses(scenes=True), ids=lambda one: one.name)
def test_what_is_beside_the_task_is_told_from_it(
    harness: Harness, served: Callable[[Family], Stack], tmp_path: Path
) -> None:
    """Sub-agents and summaries: all that was sampled is exported, and the task's last turn is the head."""
    family = FAMILIES[0]
    told = harness.scene, family, harness.tool, harness.first, harness.then
    played = scene(*told, asks_on=harness.asks_on)
    ran = run(harness, family, served(family), {"task": played.task, "beside": played.beside}, tmp_path)
    verdict = judge_scene(ran.answer, ran.exchanges, ran.log, ran.trajectories, ran.head)
    write_row(harness, family, verdict)
    assert (verdict.turns["task"], verdict.turns["beside"]) == (len(played.task), len(played.beside))
    assert same(played.answer, verdict.answer)
    assert (verdict.exact, verdict.is_head) == (True, True)
    assert verdict.trained == verdict.sampled


def same(wanted: str, found: str) -> bool:
    """Whether an answer has these words."""
    return " ".join(wanted.split()) in " ".join(found.split())


def write_row(harness: Harness, family: Family, verdict: Any) -> None:
    print(verdict)
    out = os.environ.get("TITO_HARNESSES_OUT")
    if out:
        row = {"name": harness.name, "family": family.name, "packages": harness.packages, "dialect": harness.dialect}
        row |= {"match": harness.match, "because": harness.because, "scene": harness.scene}
        Path(out, f"{harness.name}-{family.name}.json").write_text(json.dumps(row | dataclasses.asdict(verdict)))
