"""An export beside a running router: every row is what `/retrieve_from_text` answers, after random conversations."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from middleware_hub.store.opening import open_store
from middleware_hub.store_cli.cli import parser
from router.config import StoreConfig
from tests.support import templates
from tests.support.agents import AgentSession, ids_of, user
from tests.support.stack import Stack, stack
from tests.support.usual import usual

SAME = (
    "response",
    "tokens",
    "loss_mask",
    "rollout_logp",
    "token_length",
    "loss_mask_length",
    "response_length",
    "exact",
    "exact_chars",
    "reasons",
    "weight_versions",
    "variants",
    "request_ids",
    "turns",
)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Stack]:
    with stack("qwen", store=StoreConfig(url=f"sqlite:{tmp_path / 'store'}")) as started:
        yield started


def command(folder: Path, name: str, *flags: str) -> int:
    """Run a command beside the router, in this process; return its status."""
    args = parser().parse_args([name, "--store", f"sqlite:{folder / 'store'}", *flags])

    async def run() -> int:
        store = open_store(args.store)
        await store.open(None)
        try:
            status: int = await args.run(store, args)
            return status
        finally:
            await store.close()

    return asyncio.run(run())


def exported(folder: Path, rows: str) -> list[dict[str, Any]]:
    path = folder / "rows.parquet"
    assert command(folder, "export", "--out", str(path), "--rows", rows) == 0
    return pq.read_table(path).to_pylist()


def converse(served: Stack, draw: random.Random) -> list[tuple[str, str, str]]:
    """Send random requests; return (namespace, whole text, name) of each reply."""
    known: list[tuple[str, str, str]] = []
    for number in range(40):
        namespace, before, parent = draw.choice([("", "", ""), ("eval", "", ""), *known])
        if before and draw.random() < 0.15:
            before, parent = before[: draw.randrange(len(before))], ""
        text = before + draw.choice(
            ["", "\nuser: why? ", "\n🙂 und weiter? ", " <|im_end|>\n", "x" * draw.randrange(1, 400)]
        )
        text = text or "A start."
        body: dict[str, Any] = {"text": text, "sampling_params": {"max_new_tokens": draw.randrange(1, 30)}}
        if draw.random() < 0.2:
            body["sampling_params"]["n"] = 2
        if draw.random() < 0.3:
            body["stream"] = True
        if draw.random() < 0.1:
            served.set_weight_version(str(number))
        headers = {"x-radix-namespace": namespace} if namespace else {}
        if parent and draw.random() < 0.5:
            headers["x-radix-parent"] = parent
        for worker in served.workers:
            worker.wire.stream_style = "cumulative"
        answer = served.generate(body, headers=headers).body
        replies: dict[int, dict[str, Any]] = {}
        for one in answer if isinstance(answer, list) else [answer]:
            replies[one.get("index", len(replies) if not body.get("stream") else 0)] = one
        known += [(namespace, text + one["text"], one["meta_info"]["id"]) for one in replies.values()]
    return known


def test_rows_of_a_session_are_its_trajectories(tmp_path: Path) -> None:
    """Every branch, as `finalize` returns them; and what is sent beside a session has rows of its own."""
    template = str(templates.folder() / "qwen2_5.jinja")
    store = StoreConfig(url=f"sqlite:{tmp_path / 'store'}")
    with stack("qwen", styles=("cumulative",), sessions={"chat_template": template}, store=store) as served:
        agent = AgentSession.make(served)
        first = agent.must(user("a"), says="one")
        second = agent.must(user("a"), first.message, user("b"), says="two")
        agent.must(user("a"), first.message, user("c"), says="three")
        agent.must(user("a"), first.message, user("b"), second.message, user("d"), says="four")
        agent.must(user("elsewhere"), says="five")
        served.generate({"text": "beside it", "sampling_params": {"max_new_tokens": 4}})
        replies = exported(tmp_path, "replies")
        rows = exported(tmp_path, "leaves")
        found = agent.finalize(shared_turns="every")
        assert served.exchange("DELETE", agent.path).status < 300
        assert [row["text"] is None for row in exported(tmp_path, "leaves")] == [False]
    assert [row["session"] is None for row in replies].count(False) == 5
    of_session = [row for row in rows if row["session"] is not None]
    assert {row["session"] for row in of_session} == {agent.name}
    assert len(rows) == len(of_session) + 1
    assert {row["text"] for row in of_session} == {None}
    assert sorted(row["tokens"] for row in of_session) == sorted(ids_of(one) for one in found)
    for row in of_session:
        (one,) = (one for one in found if ids_of(one) == row["tokens"])
        cut = len(one["prompt_ids"])
        assert row["loss_mask"] == [0] * cut + one["response_mask"]
        assert row["rollout_logp"][cut:] == one["response_logprobs"]
        assert (row["exact"], row["variants"], len(row["turns"])) == (True, 1, one["num_turns"])


@pytest.mark.parametrize("seed", usual(range(4), 0))
def test_rows_are_what_is_retrieved(served: Stack, tmp_path: Path, seed: int) -> None:
    known = converse(served, random.Random(seed))
    rows = exported(tmp_path, "replies")
    assert sorted((row["namespace"], row["text"]) for row in rows) == sorted(one[:2] for one in known)
    for row in rows:
        found = served.retrieve(row["text"], namespace=row["namespace"], request_id=row["request_id"])
        assert found["response"] == row["text"]
        assert found.keys() == set(SAME)
        for name in SAME:
            assert row[name] == found[name], (name, row["text"])
    leaves = exported(tmp_path, "leaves")
    whole = {row["request_id"]: row for row in rows}
    assert all(leaf == whole[leaf["request_id"]] for leaf in leaves)
    # Nothing is lost by leaving the others out: every reply of which a text shows something is in a row.
    inside = {turn["request_id"] for leaf in leaves for turn in leaf["turns"]}
    assert {row["request_id"] for row in rows if row["turns"]} == inside


def test_what_is_pruned_beside_a_router_that_has_it_is_written_again(
    served: Stack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The router goes on with what is in its memory, and the conversation is whole in the store again."""
    text, names = "A start.", list[str]()
    for turn in range(4):
        served.retrieve(text)
        assert command(tmp_path, "prune", "--tenant", "", "--unretrieved") == 0
        assert exported(tmp_path, "replies") == []
        reply = served.generate({"text": text, "sampling_params": {"max_new_tokens": 9}}).body
        reply = reply[-1] if isinstance(reply, list) else reply
        names.append(reply["meta_info"]["id"])
        text += f"{reply['text']}\nuser: {turn}? "
        whole = served.retrieve(text, expect_request_ids=names)
        assert "unknown_reply" not in whole["reasons"]
        (row,) = exported(tmp_path, "leaves")
        assert [turn["request_id"] for turn in row["turns"]] == names
        assert row["tokens"] == whole["tokens"][: len(row["tokens"])]
        assert command(tmp_path, "verify") == 0, capsys.readouterr().out


def test_the_sizes_of_a_store_count_turns_and_sessions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def sizes() -> dict[str, Any]:
        capsys.readouterr()
        assert command(tmp_path, "stats", "--json") == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    sessions = {"chat_template": str(templates.folder() / "qwen2_5.jinja")}
    store = StoreConfig(url=f"sqlite:{tmp_path / 'store'}")
    with stack("qwen", styles=("cumulative",), sessions=sessions, store=store) as served:
        served.generate({"text": "A question. ", "sampling_params": {"max_new_tokens": 4}})
        agents = [AgentSession.make(served) for _ in range(2)]
        for agent in agents:
            agent.must(user("Hello"), says="Hi.")
        found = sizes()
        assert (found["turns"], found["sessions"]) == (3, 2)
        assert found["sampled_tokens"] == sum(len(one.output_ids) for one in served.workers[0].log)
        assert found["oldest"] <= found["newest"]
        served.exchange("DELETE", agents[0].path)
        assert sizes()["sessions"] == 1
