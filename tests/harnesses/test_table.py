"""The page's tables say what the rows of a run say; needs no harness."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harnesses import harness
from tests.harnesses.harness import harnesses
from tests.harnesses.table import families, scenes, table
from tests.support import debian

ROW: dict[str, Any] = {
    **{
        "name": "one",
        "family": "qwen3",
        "packages": ["one==1"],
        "dialect": "chat",
        "match": "",
        "because": "",
        "scene": "",
    },
    **{"turns": 3, "side": 0, "statuses": [], "trajectories": 1, "sampled": 1000, "trained": 1000, "reusable": 50},
    **{"reused": 40, "reasons": {}, "changes": []},
}
SCENE: dict[str, Any] = {
    **{
        "name": "one_agents",
        "scene": "agents",
        "sampled": 100,
        "trained": 100,
        "is_head": True,
        "reasons": {"setting": 1},
    },
    "parts": [[["beside"], 1, True], [["task", "task", "beside", "task"], 0, False]],
}


def test_the_table_counts_what_is_whole() -> None:
    rows = [ROW, {**ROW, "trajectories": 2}, {**ROW, "trained": 999}]
    told = table(rows, datetime.date(2030, 1, 2)).splitlines()
    assert told[0] == "Run on 2030-01-02: 1 of 3 give one trajectory that has every sampled token."
    assert told[4] == "| one<br><small>one==1</small> | chat | 3 | 1 | 100% | 80.0% | 0 | nothing |"


def test_families_have_a_column_each() -> None:
    other = {**ROW, "family": "gpt-oss", "trained": 999, "reasons": {"left_out": 1}}
    alone = {**ROW, "name": "two"}
    told = families([ROW, other, alone]).splitlines()
    assert told[2:] == ["| one | 1, 100.0%, 80.0% |  |  | 1, 99.9%, 80.0%, `left_out` |"]


def test_a_scene_names_the_turns_of_each_trajectory() -> None:
    (line,) = scenes([SCENE]).splitlines()[2:]
    parts = "the other 1 (root 1, `side_request`)<br>task 2 + the other 1 + task 1 (root 0)"
    assert line == f"| one_agents | the task calls a sub-agent | {parts} | the task's last turn | 100.0% | `setting` |"
    assert "| another |" in scenes([{**SCENE, "is_head": False}])


def test_a_scene_shares_the_environment_of_its_harness() -> None:
    found = {one.name: one for one in [*harnesses(), *harnesses(scenes=True)]}
    assert found["claude_code_agents"].environment == found["claude_code"].environment
    assert found["claude_code_agents"].tool == found["claude_code"].tool


def test_a_python_is_one_of_the_wanted_versions() -> None:
    assert harness._python("") == harness._python(f"=={sys.version.split()[0]}") == sys.executable
    assert harness._python(">=99") is None
    assert Path(str(harness._python(">=3.11"))).exists()


def test_a_program_that_is_not_to_be_had_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(name: str) -> Path:
        raise RuntimeError(f"these tests need {name}")

    one = next(one for one in harnesses() if one.needs)
    monkeypatch.setattr(debian, "program", away)
    assert one.lacks == f"these tests need {one.needs}"
