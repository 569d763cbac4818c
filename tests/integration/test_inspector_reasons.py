"""Why a conversation is not exact, in the inspector: the same as in an export, with the turns where it is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from middleware_hub.inspector import finding
from middleware_hub.spans import chain
from tests.integration.doc_pages import ROOT
from tests.support import templates
from tests.support.agents import AgentSession, user
from tests.support.stack import Stack, stack

WORDS = Path(finding.__file__).parent / "static" / "lib" / "words.js"


@pytest.fixture(scope="module")
def served() -> Iterator[Stack]:
    sessions = {"chat_template": str(templates.folder() / "qwen2_5.jinja")}
    with stack("qwen", styles=("cumulative",), sessions=sessions) as made:
        yield made


def look(agent: AgentSession, path: str = "") -> dict[str, Any]:
    name = quote(f"session:{agent.name}", safe="")
    answer = agent.stack.exchange("GET", f"/inspect/api/conversations/{name}{path}")
    assert answer.status == 200, answer.content
    found: dict[str, Any] = answer.json()
    return found


def where(agent: AgentSession, branch: str) -> list[list[str]]:
    """The reasons of each part of a branch."""
    return [turn["reasons"] for turn in look(agent, f"/branches/{branch}")["turns"]]


def test_the_parts_of_a_branch_have_its_reasons(served: Stack) -> None:
    agent = AgentSession.make(served)
    first = agent.must(user("a"), says="One.")
    second = agent.must(user("a"), first.message, user("b"), says="Two, and more.")
    edited = {"role": "assistant", "content": "Two"}
    third = agent.must(user("a"), first.message, user("b"), edited, user("c"), says="Three.")
    assert where(agent, second.generation) == [[], [], [], []]
    *before, last = where(agent, third.generation)
    assert (before, last) == ([[]] * 5, ["edited_turn"])

    served.workers[0].script(text="Four.", finish="eos", fault="wrong_text")
    bad = agent.must(user("a"), first.message, user("d"))
    assert where(agent, bad.generation) == [[], [], [], ["engine_mismatch"]]
    for one in look(agent)["branches_list"]:
        assert set(one["reasons"]) == {reason for part in where(agent, one["id"]) for reason in part}


def test_a_lost_reply_makes_all_doubtful_that_nobody_sampled(served: Stack) -> None:
    """Also what was sampled before it was lost: its words may be those of the lost reply."""
    agent = AgentSession.make(served)
    warm = agent.must(user("a"), {"role": "assistant", "content": "My words."}, user("b"), says="Yes.")
    sure = agent.must(user("a"), says="One.")
    served.workers[0].script(text="Lost.", finish="eos", fault="wrong_logprob_ids")
    agent.must(user("other"))
    found = look(agent)
    exported = {one["branch"]: (one["exact"], one["reasons"]) for one in agent.finalize()}
    assert exported == {warm.generation: (False, ["unknown_reply"]), sure.generation: (True, [])}
    assert {one["id"]: (one["exact"], one["reasons"]) for one in found["branches_list"]} == exported
    assert (found["exact"], found["reasons"]) == (False, ["unknown_reply"])


def test_the_page_has_words_for_every_reason() -> None:
    words = WORDS.read_text()
    known = set(
        re.findall(r"^  (\w+): \"", words.partition("export const REASONS")[2].partition("};")[0], re.MULTILINE)
    )
    table = (ROOT / "docs" / "sessions.md").read_text().partition("### Reasons")[2].partition("###")[0]
    documented = {
        name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    }
    assert len(documented) > 20
    assert known >= documented | {name for _, name in chain.REASONS}
    grave = re.search(r"INEXACT = new Set\(\[(.*?)\]", words)
    assert grave is not None
    assert set(re.findall(r"\w+", grave[1])) == chain.INEXACT | {"retokenized"}
