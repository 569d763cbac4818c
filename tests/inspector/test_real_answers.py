"""The inspector's page in a real browser, on a real router: its numbers are those of the calls that trainers use."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from playwright.sync_api import Page, expect

from tests.inspector.conftest import Opened, place
from tests.support.agents import AgentSession, ids_of, system, user
from tests.support.stack import Stack, stack

pytestmark = pytest.mark.slow


@dataclass
class Sample:
    """A chain, and what a trainer gets for it."""

    text: str
    rid: str
    true: dict[str, Any]

    @property
    def id(self) -> str:
        return f"text:{self.rid}"

    @property
    def sampled(self) -> int:
        return sum(self.true["loss_mask"])

    def version(self, index: int) -> str:
        (version,) = [run["version"] for run in self.true["weight_versions"] if run["start"] <= index < run["end"]]
        return str(version)


@dataclass
class Memory:
    """What a router remembers: a chain of two replies and its fork, two samples of one prompt, a session."""

    served: Stack
    chain: Sample
    fork: Sample
    samples: list[Sample]
    session: AgentSession


@pytest.fixture(scope="module")
def memory() -> Iterator[Memory]:
    with stack("qwen", styles=("cumulative",)) as served:
        served.set_weight_version("3")

        def turn(text: str, seed: int, rid: str, parent: str | None = None, **sampling: Any) -> str:
            body = {
                "text": text,
                "rid": rid,
                "sampling_params": {"max_new_tokens": 12, "sampling_seed": seed, **sampling},
            }
            reply = served.generate(body, headers={} if parent is None else {"x-radix-parent": parent})
            return text + str(reply.body["text"])

        def sample(text: str, rid: str, first: str) -> Sample:
            return Sample(text, first, served.retrieve(text, request_id=rid))

        begun = turn("What is the river 汉江?\n", 1, "one")
        served.set_weight_version("4")
        text = turn(f"{begun}\nObservation: مرحبا\t\n", 2, "two", "one")
        other = turn(f"{begun}\nNo.", 3, "three", "one", max_new_tokens=4)
        prompt = "Name a word: "
        texts = [turn(prompt, seed, f"sample-{seed}") for seed in (5, 6)]
        agent = AgentSession.make(served, session_id="agent", sampling_params={"max_tokens": 9})
        first = agent.must(system("You are brief."), user("Hello?"))
        for question in ("Go on.", "Stop."):
            agent.must(system("You are brief."), user("Hello?"), first.message, user(question))
        samples = [sample(text, f"sample-{seed}", f"sample-{seed}") for text, seed in zip(texts, (5, 6), strict=True)]
        yield Memory(served, sample(text, "two", "one"), sample(other, "three", "one"), samples, agent)


def number(text: str) -> float:
    return float(text.replace("−", "-").replace(",", ""))


def panel(page: Page) -> dict[str, str]:
    """Return the details of the token that is looked at, as the page writes them."""
    names = page.locator(".details .facts-list").first.locator("dt").all_inner_texts()
    return dict(zip(names, page.locator(".details .facts-list").first.locator("dd").all_inner_texts(), strict=True))


def facts(page: Page) -> dict[str, str]:
    return {one.get_attribute("data-fact") or "": one.inner_text() for one in page.locator("header [data-fact]").all()}


def walk(page: Page, total: int) -> list[dict[str, str]]:
    """Look at each token with the arrow key, and return what the page says of it."""
    found = []
    page.wait_for_selector(".t")
    for index in range(total):
        page.keyboard.press("ArrowRight")
        expect(page.locator(".details h2")).to_have_text(f"Token {index:,}")
        found.append(panel(page))
    return found


@pytest.mark.parametrize("which", ["chain", "fork"])
def test_a_branch_of_text_is_what_is_retrieved(which: str, memory: Memory, opened: Opened) -> None:
    one: Sample = getattr(memory, which)
    branch = "two" if which == "chain" else "three"
    page = opened(place(memory.served.url, "conversation", one.id, branch))
    tokens, mask, logprobs = (one.true[key] for key in ("tokens", "loss_mask", "rollout_logp"))
    said = walk(page, len(tokens))
    assert [int(of["id"]) for of in said] == tokens
    assert [int(of["loss mask"][0]) for of in said] == mask
    for index, of in enumerate(said):
        assert of["position"] == f"{index:,} of {len(tokens):,}"
        if mask[index]:
            assert number(of["logprob"]) == logprobs[index]
            assert number(of["probability"].rstrip("%")) == pytest.approx(100 * math.exp(logprobs[index]), rel=0.06)
            assert of["version"] == one.version(index)
        else:
            assert {of["logprob"], of["probability"], of["version"]} == {"–"}
    bytes_of = "".join(of["bytes"].replace(" ", "") for of in said if of["bytes"] != "none")
    assert one.text in bytes.fromhex(bytes_of).decode(errors="replace")
    shown = facts(page)
    assert shown["exact"] == "exact"
    assert one.true["exact"]
    assert shown["tokens"] == f"{len(tokens)}"
    assert shown["sampled"].startswith(f"{sum(mask)} ({round(100 * sum(mask) / len(mask))}%")
    assert shown["versions"] == "3 → 4"
    expect(page.locator(".middle select.branch option")).to_have_count(2)


def test_a_session_is_what_it_is_finalized_to(memory: Memory, opened: Opened) -> None:
    trajectories = {tuple(ids_of(one)): one for one in memory.session.trajectories("?shared_turns=every")}
    seen = set()
    for branch in memory.served.get("/inspect/api/conversations/session%3Aagent").json()["branches_list"]:
        page = opened(place(memory.served.url, "conversation", "session:agent", branch["id"]))
        said = walk(page, branch["tokens"])
        ids = tuple(int(of["id"]) for of in said)
        true = trajectories[ids]
        seen.add(ids)
        context = len(true["prompt_ids"])
        assert [int(of["loss mask"][0]) for of in said] == [0] * context + true["response_mask"]
        for of, sampled, logprob in zip(said[context:], true["response_mask"], true["response_logprobs"], strict=True):
            assert of["logprob"] == "–" if not sampled else number(of["logprob"]) == logprob
    assert seen == trajectories.keys()


def test_the_overview_counts_what_is_retrieved(memory: Memory, opened: Opened) -> None:
    page = opened(place(memory.served.url, "overview"))
    expect(page.locator("tbody tr")).to_have_count(4)
    for one in memory.samples:
        row = page.locator(f"tr[data-id='{one.id}']")
        cells = row.locator("td").all_inner_texts()
        total = len(one.true["tokens"])
        assert cells[:6] == ["exact", "1", f"{total}", f"{round(100 * one.sampled / total)}%", "1", "4"]
    assert page.locator(f"tr[data-id='{memory.chain.id}'] td").all_inner_texts()[4] == "2"
    assert page.locator("[data-sum=conversations]").inner_text() == "4"
    assert page.locator("[data-sum=sessions]").inner_text() == "1"
    for query, rows in (("Name a word", 2), ("id:sample-6", 1), (json.dumps(memory.chain.true["tokens"][3:9]), 1)):
        page.get_by_label("Search").fill(query)
        expect(page.locator("tbody tr")).to_have_count(rows)
    page.get_by_label("Search").fill("")
    page.get_by_label("Kind").select_option("session")
    expect(page.locator("tbody tr")).to_have_count(1)


def test_what_is_recorded_appears_by_itself(memory: Memory, opened: Opened) -> None:
    page = opened(place(memory.served.url, "overview", search="?namespace=later"))
    expect(page.get_by_role("heading", name="Nothing fits")).to_be_visible()
    body = {"text": "Later?", "rid": "later", "sampling_params": {"max_new_tokens": 4}}
    memory.served.generate(body, headers={"x-radix-namespace": "later"})
    expect(page.locator("tr[data-id='text:later']")).to_have_count(1)


def test_a_router_that_remembers_nothing_says_what_to_do(opened: Opened) -> None:
    with stack("qwen", styles=("cumulative",)) as served:
        page = opened(place(served.url, "overview"))
        expect(page.get_by_role("heading", name="Nothing is remembered yet")).to_be_visible()
        expect(page.locator("pre")).to_contain_text(f"curl {served.url}/generate")
        page.goto(place(served.url, "run"))
        expect(page.get_by_role("heading", name="Nothing to report yet")).to_be_visible()


def test_a_comparison_is_that_of_the_retrieved_tokens(memory: Memory, opened: Opened) -> None:
    one, other = memory.samples
    ids, others = one.true["tokens"], other.true["tokens"]
    first = next(at for at, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b)
    search = f"?a={quote(one.id)}&b={quote(other.id)}"
    page = opened(place(memory.served.url, "compare", search=search))
    expect(page.locator("[data-fact=difference] b")).to_have_text(f"They part at token {first}")
    expect(page.locator(".pair-line .t").first).to_be_visible()
    expect(page.locator(".pair-line span.dim").get_by_text("…", exact=True)).to_have_count(0)  # both sides have come
    lines = [line.locator("> *").all_inner_texts() for line in page.locator(".pair-line").all()]
    for side, sample in ((0, one), (4, other)):
        for position, _, token, logprob in (line[side : side + 4] for line in lines):
            if position:
                at = int(position)
                assert int(token) == sample.true["tokens"][at]
                assert (logprob == "context") is not bool(sample.true["loss_mask"][at])
                if logprob != "context":
                    assert number(logprob) == pytest.approx(sample.true["rollout_logp"][at], abs=0.0006)


def test_explain_says_what_the_router_says(memory: Memory, opened: Opened) -> None:
    text = memory.chain.text.replace("Observation: ", "Observation:")
    true = memory.served.post("/radix_tree/explain", {"text": text}).json()
    page = opened(place(memory.served.url, "explain"))
    page.get_by_label("The text").fill(text)
    page.get_by_role("button", name="Explain").click()
    expect(page.locator("[data-fact=message]")).to_have_text(true["message"])
    assert page.locator("[data-fact=matched]").inner_text() == str(true["matched_chars"])


def test_the_report_adds_up(memory: Memory, opened: Opened) -> None:
    answers = memory.served.get("/inspect/api/conversations").json()
    shared = memory.samples[0].true["loss_mask"].index(1)  # the prompt of both samples: the report counts it once
    tokens = sum(row["tokens"] for row in answers["conversations"]) - shared
    sampled = sum(row["sampled"] for row in answers["conversations"])
    page = opened(place(memory.served.url, "run"))
    true = {"conversations": str(len(answers["conversations"])), "tokens": f"{tokens:,}", "sampled": f"{sampled:,}"}
    for name, value in true.items():
        expect(page.locator(f"[data-tile='{name}']")).to_have_text(value)
    page.wait_for_selector("progress", state="detached")
    for summary in page.locator(".numbers summary").all():
        summary.click()
    counted = (
        page.get_by_role("region", name="Logprobs of sampled tokens: table").locator("td:last-child").all_inner_texts()
    )
    assert sum(map(number, counted)) == sampled


def test_what_is_saved_is_what_is_retrieved(memory: Memory, opened: Opened, tmp_path: Path) -> None:
    one = memory.chain
    page = opened(place(memory.served.url, "conversation", one.id, "two"))
    for button, name in (("JSON", "saved.json"), ("Page", "saved.html"), ("Parquet", "saved.parquet")):
        page.get_by_text("Save", exact=True).click()
        with page.expect_download() as download:
            page.get_by_role("button", name=button).click()
        download.value.save_as(tmp_path / name)
        expect(page.locator(".menu-list")).to_be_hidden()
    assert one.true["tokens"] == json.loads((tmp_path / "saved.json").read_text())["tokens"]["ids"]
    assert (tmp_path / "saved.parquet").read_bytes()[:4] == b"PAR1"
    page = opened((tmp_path / "saved.html").as_uri())
    assert [int(of["id"]) for of in walk(page, len(one.true["tokens"]))] == one.true["tokens"]


def test_a_branch_that_ends_before_the_last_message_has_a_line_of_its_own(memory: Memory, opened: Opened) -> None:
    """A reply whose ids do not spell its text ends its branch, and the next turn is rendered from its text."""
    agent = AgentSession.make(memory.served)
    first = agent.must(user("a"), says="One.")
    memory.served.workers[0].script(text="Two.", finish="eos", fault="wrong_text")
    bad = agent.must(user("a"), first.message, user("b"))
    last = agent.must(user("a"), first.message, user("b"), bad.message, user("c"), says="Three.")
    page = opened(place(memory.served.url, "conversation", f"session:{agent.name}"))
    lines, current = page.locator(".tree li"), page.locator(".tree [aria-current]")
    expect(lines).to_have_count(2)
    expect(lines.first).to_contain_text("engine_mismatch")
    for line, shown in (lines.first, bad), (lines.last, last):
        line.get_by_role("link").click()
        expect(page).to_have_url(re.compile(f"/{shown.generation}$"))
        expect(current).to_have_count(1)
        expect(line.locator("[aria-current]")).to_be_visible()
