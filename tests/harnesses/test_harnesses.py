"""Harnesses for real: one task, a scripted model, an unchanged agent; every sampled token is trained on.

`make test-harnesses` runs them all, with `ARGS="-k codex"` one; each installs its own environment at its first run. The rows go
to `TITO_HARNESSES_OUT`, a folder, for `python -m tests.harnesses.table`.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harnesses.harness import Harness, harnesses
from tests.harnesses.judge import judge
from tests.harnesses.plan import ANSWERS, QUESTIONS, Turn, more, spelled, task
from tests.harnesses.recorder import recording
from tests.support import templates
from tests.support.agents import AgentSession
from tests.support.stack import Stack, stack

TEMPLATE = os.environ.get("TITO_HARNESSES_TEMPLATE", "qwen3")


@pytest.fixture(scope="module")
def served() -> Iterator[Stack]:
    sessions = {"chat_template": str(templates.folder() / f"{TEMPLATE}.jinja")}
    with stack("qwen", styles=("incremental",), sessions=sessions) as made:
        yield made
        assert made.idle()


def planned(harness: Harness) -> list[Turn]:
    if harness.replies:
        return [Turn("its own form", "", text) for text in harness.replies]
    turns = task(harness.tool, harness.first, harness.second, harness.last, unknown=harness.unknown)
    return [*turns, more()] if harness.resume else turns


@pytest.mark.harness
@pytest.mark.parametrize("harness", harnesses(), ids=lambda one: one.name)
def test_one_task_is_one_trajectory(harness: Harness, served: Stack, tmp_path: Path) -> None:
    (worker,) = served.workers
    if harness.lacks:
        pytest.skip(harness.lacks)
    harness.install()
    session = AgentSession.make(served, **({"match": harness.match} if harness.match else {}))
    since = len(worker.log)
    plan = planned(harness)
    encode = worker.vocabulary.encode_bare
    replies = [spelled(turn.sampled, encode, seed) for seed, turn in enumerate(plan)]

    def script(body: Any) -> bool:
        is_side = harness.marks not in json.dumps(body) if harness.marks else not body.get("tools")
        done = sum(one.status == 200 and not one.is_side for one in exchanges)
        worker.forget_scripts()  # a request that was refused took none
        worker.script(spelled("A title", encode, 0) if is_side or done >= len(replies) else replies[done])
        return is_side

    with recording(served.url, script) as (url, exchanges):
        base = f"{url}{session.path}"
        ran = harness.run({"OPENAI_BASE_URL": f"{base}/v1", "ANTHROPIC_BASE_URL": base}, QUESTIONS, tmp_path)
    worker.forget_scripts()
    (tmp_path / "exchanges.json").write_text(json.dumps([_plain(one) for one in exchanges], indent=1))
    assert ran.returncode == 0, f"{ran.stdout[-3000:]}\n{ran.stderr[-6000:]}"
    verdict = judge(ran.stdout.strip(), exchanges, worker.log[since:], session.finalize(), plan)
    out = os.environ.get("TITO_HARNESSES_OUT")
    if out:
        row = {"name": harness.name, "packages": harness.packages, "dialect": harness.dialect, "match": harness.match}
        row["because"] = harness.because
        Path(out, f"{harness.name}.json").write_text(json.dumps(row | dataclasses.asdict(verdict), indent=1))
    print(verdict)
    assert verdict.turns == len(plan)
    assert " ".join(ANSWERS[harness.resume].split()) in " ".join(verdict.answer.split())
    assert (verdict.trajectories, verdict.exact) == (harness.trajectories, True)
    assert verdict.trained == verdict.sampled


def _plain(exchange: Any) -> Any:
    return dataclasses.asdict(exchange) | {"reply": exchange.reply.decode()}
