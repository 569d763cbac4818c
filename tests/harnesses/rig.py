"""One run of a harness in a session: a scripted model, its requests recorded, and what the session says in the end."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.harnesses.families import Family
from tests.harnesses.harness import Harness
from tests.harnesses.plan import QUESTIONS, Turn, spelled
from tests.harnesses.recorder import Exchange, recording
from tests.support.agents import AgentSession
from tests.support.stack import Stack
from worker.engine.records import GenerationRecord


@dataclass(frozen=True)
class Run:
    """What came of it; `log` has the worker's record of each reply, `head` is the session's `current_head`."""

    answer: str
    exchanges: list[Exchange]
    log: list[GenerationRecord]
    trajectories: list[dict[str, Any]]
    head: str


def run(harness: Harness, family: Family, served: Stack, plan: Mapping[str, Sequence[Turn]], folder: Path) -> Run:
    """Run a harness, which must end well; `plan` has the replies by who asks. Skips the test where a registry is away."""
    if harness.lacks:
        pytest.skip(harness.lacks)
    harness.install()
    (worker,) = served.workers
    session = AgentSession.make(served, **({"match": harness.match} if harness.match else {}))
    since, encode = len(worker.log), worker.vocabulary.encode_bare
    replies = {
        who: [spelled(family.reply(turn), encode, seed) for seed, turn in enumerate(turns)]
        for who, turns in plan.items()
    }
    other = spelled(family.reply(Turn("a side request", "", "A title")), encode, 0)

    def script(body: Any) -> str:
        who = harness.who(body)
        done = collections.Counter(one.who for one in exchanges if one.status == 200)[who]
        worker.forget_scripts()  # a request that was refused took none
        left = replies.get(who, [])[done:]
        worker.script(left[0] if left else other)
        return who

    with recording(served.url, script) as (url, exchanges):
        base = f"{url}{session.path}"
        urls = {"OPENAI_BASE_URL": f"{base}/v1", "ANTHROPIC_BASE_URL": base, "GOOGLE_GEMINI_BASE_URL": base}
        ran = harness.run(urls, QUESTIONS, folder)
    worker.forget_scripts()
    plain = [dataclasses.asdict(one) | {"reply": one.reply.decode()} for one in exchanges]
    (folder / "exchanges.json").write_text(json.dumps(plain, indent=1))
    assert ran.returncode == 0, f"{ran.stdout[-3000:]}\n{ran.stderr[-6000:]}"
    head = session.show()["current_head"]
    return Run(ran.stdout.strip(), exchanges, worker.log[since:], session.finalize(), head)
