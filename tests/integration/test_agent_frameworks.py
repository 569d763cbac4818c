"""Agent frameworks in sessions: their agents get the address of a session, and nothing else. `make test-slow` installs them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support import templates
from tests.support.agents import AgentSession, call_text, ids_of
from tests.support.frameworks import AGENTS
from tests.support.stack import Stack, stack

pytestmark = pytest.mark.slow

THOUGHT = "<think>\nhm\n</think>\n\n"
ANSWER = "Nowhere,  it is gone."
SAID = (
    f"{THOUGHT}I look.\n{call_text('there', 2)}",
    f"{THOUGHT}{call_text('here')}\n{call_text('over there', 3)}",  # two calls, and nothing said
    f"{THOUGHT}{ANSWER}\n",
)
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false", "PYTHONWARNINGS": "ignore"}


@pytest.fixture(scope="module")
def served() -> Iterator[Stack]:
    template = str(templates.folder() / "qwen3.jinja")
    with stack("qwen", styles=("cumulative",), sessions={"chat_template": template}) as made:
        yield made
        assert made.idle()


@pytest.mark.parametrize("name", list(AGENTS))
def test_a_framework_s_agent_is_one_trajectory(name: str, served: Stack) -> None:
    (worker,) = served.workers
    since, session = len(worker.log), AgentSession.make(served)
    for said in SAID:
        worker.script(text=said)
    url = f"{served.url}{session.path}"
    ran = subprocess.run(
        [sys.executable, "-m", "tests.support.frameworks", name, f"{url}/v1", url],
        capture_output=True,
        text=True,
        env=os.environ | OFFLINE,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == ANSWER, ran.stderr
    (only,) = session.finalize()
    assert (only["exact"], only["reasons"], only["num_turns"]) == (True, [], 3)
    chain: list[int] = []
    for record in worker.log[since:]:
        assert list(record.input_ids)[: len(chain)] == chain
        chain = [*record.input_ids, *record.output_ids]
    assert ids_of(only) == chain
