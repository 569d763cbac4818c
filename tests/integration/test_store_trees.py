"""A store's export as trees: each branch, read off its tree, is the row that the flat export has for it."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from router.config import StoreConfig
from router.errors import BadRequestError
from tests.integration.test_retrieved_extras import Rollout, array_of, conversation, rows_of, told
from tests.integration.test_store_export import command, converse, exported
from tests.support import templates
from tests.support.agents import AgentSession, user
from tests.support.stack import stack
from tests.support.usual import usual

Json = dict[str, Any]
FLAT = ("tokens", "loss_mask", "rollout_logp", "weight_versions")


def trees(folder: Path, *flags: str) -> list[Json]:
    path = folder / "trees.jsonl"
    assert command(folder, "export", "--out", str(path), *flags) == 0
    return [json.loads(line) for line in path.read_text().splitlines()]


def branch(tree: Json, leaf: Json) -> list[Json]:
    """The nodes of a branch, the first one first. `tin` and `tout` name the same ones."""
    nodes, at, found = tree["nodes"], leaf["node"], list[Json]()
    while at is not None:
        found.append(nodes[at])
        at = nodes[at]["parent"]
    last = nodes[leaf["node"]]
    assert found[::-1] == [one for one in nodes if one["tin"] <= last["tin"] < one["tout"]]
    return found[::-1]


def flat(nodes: list[Json]) -> Json:
    """What a branch is as one sequence."""
    tokens = [token for node in nodes for token in node["token_ids"]]
    runs: list[list[Any]] = []
    for node in nodes:
        for run in node["weight_versions"]:
            low, high = node["start"] + run["start"], node["start"] + run["end"]
            if runs and runs[-1][0] == run["version"] and runs[-1][2] == low:
                runs[-1][2] = high
            else:
                runs.append([run["version"], low, high])
    assert [node["start"] for node in nodes] == [sum(len(n["token_ids"]) for n in nodes[:k]) for k in range(len(nodes))]
    return {
        "tokens": tokens,
        "loss_mask": [node["mask"] for node in nodes for _ in node["token_ids"]],
        "rollout_logp": [p for node in nodes for p in (node["logprobs"] or [0.0] * len(node["token_ids"]))],
        "weight_versions": [{"version": version, "start": low, "end": high} for version, low, high in runs],
    }


@pytest.mark.parametrize("seed", usual(range(3), 0))
def test_a_branch_is_its_flat_row(tmp_path: Path, seed: int) -> None:
    with stack("qwen", store=StoreConfig(url=f"sqlite:{tmp_path / 'store'}")) as served:
        converse(served, random.Random(seed))
        rows = {row["request_id"]: row for row in exported(tmp_path, "leaves")}
        found = trees(tmp_path)
    leaves = [(tree, leaf) for tree in found for leaf in tree["leaves"]]
    assert sorted(leaf["branch"] for _, leaf in leaves) == sorted(rows)
    for tree, leaf in leaves:
        row = rows[leaf["branch"]]
        assert flat(branch(tree, leaf)) == {name: row[name] for name in FLAT}
        assert (leaf["exact"], leaf["reasons"]) == (row["exact"], row["reasons"])
        assert (tree["namespace"], tree["conversation"]) == (row["namespace"], row["conversation"])
    assert sum(tree["flat_tokens"] for tree in found) == sum(row["token_length"] for row in rows.values())
    assert all(tree["tokens"] <= tree["flat_tokens"] for tree in found)


def test_a_session_is_the_tree_that_it_is_finalized_as(tmp_path: Path) -> None:
    template = str(templates.folder() / "qwen2_5.jinja")
    store = StoreConfig(url=f"sqlite:{tmp_path / 'store'}")
    with stack("qwen", styles=("cumulative",), sessions={"chat_template": template}, store=store) as served:
        agent = AgentSession.make(served)
        first = agent.must(user("a"), says="one")
        second = agent.must(user("a"), first.message, user("b"), says="two")
        agent.must(user("a"), first.message, user("c"), says="three")
        agent.must(user("a"), first.message, user("b"), second.message, user("d"), says="four")
        served.post(f"{agent.path}/reward_info", {"reward_info": {"score": 1.0, "why": "all"}})
        name = served.exchange("GET", f"{agent.path}").json()["current_head"]
        served.post(f"{agent.path}/reward_info", {"reward_info": {"score": 2.0}, "branch": name})
        found = trees(tmp_path)
        expected = served.post(f"{agent.path}/finalize", {"format": "tree"}).json()
    (tree,) = found
    for field in ("nodes", "tokens", "flat_tokens"):
        assert tree[field] == expected[field]
    rewards = {leaf["node"]: leaf["reward_info"] for leaf in expected["leaves"]}
    assert {leaf["node"]: leaf["reward_info"] for leaf in tree["leaves"]} == rewards
    assert {"score": 2.0, "why": "all"} in rewards.values()


def test_rewards_of_groups_are_at_their_leaves(tmp_path: Path) -> None:
    with stack("qwen", store=StoreConfig(url=f"sqlite:{tmp_path / 'store'}")) as served:
        body = {"text": "Question: ", "sampling_params": {"max_new_tokens": 6, "n": 2}}
        replies = served.generate(body, headers={"x-group-id": "g"}).body
        for number, reply in enumerate(replies):
            given = {"request_id": reply["meta_info"]["id"], "reward": number, "reward_info": {"why": "so"}}
            assert served.post("/trajectories/reward", given).status == 200
        (tree,) = trees(tmp_path)
    rewards = {leaf["branch"]: leaf["reward_info"] for leaf in tree["leaves"]}
    assert rewards == {one["meta_info"]["id"]: {"reward": at, "why": "so"} for at, one in enumerate(replies)}


def test_experts_are_rows_of_nodes(tmp_path: Path) -> None:
    with stack("qwen", styles=("cumulative",), store=StoreConfig(url=f"sqlite:{tmp_path / 'store'}")) as served:
        bare = Rollout(served, "bare")
        chains = {name: bare.retrieve(text)["tokens"] for name, text in conversation(bare, {}).items()}
        talk = Rollout(served, "told")
        meta = {name: {"routed_experts": told(rows_of(chains[name], number))} for number, name in enumerate(chains, 1)}
        texts = conversation(talk, meta)
        (tree,) = trees(tmp_path, "--namespace", "told", "--per-token")
        flats = {name: array_of(talk.retrieve(texts[name])["routed_experts"]) for name in ("third", "other")}
        (without,) = trees(tmp_path, "--namespace", "told")
    assert not any("routed_experts" in node for node in without["nodes"])
    seen = 0
    for leaf in tree["leaves"]:
        nodes = branch(tree, leaf)
        tokens = [token for node in nodes for token in node["token_ids"]]
        name = next(name for name, chain in chains.items() if chain == tokens)
        rows = []
        for node in nodes:
            field = node["routed_experts"]
            assert (field["dtype"], field["shape"][0]) == ("int32", len(node["token_ids"]))
            rows.append(np.frombuffer(base64.b64decode(field["base64"]), "<i4").reshape(field["shape"]))
        found = np.concatenate(rows)
        assert (found[-1] == -1).all()
        assert (found[:-1, :2] == flats[name][:, :2]).all()
        # Who told the row of a token that two branches share is decided by the first of them.
        assert (found[:-1, 2] == flats[name][:, 2]).all() or leaf is not tree["leaves"][0]
        seen += 1
    assert seen == 2


def test_rows_of_experts_need_a_tree(tmp_path: Path) -> None:
    started = stack("qwen", store=StoreConfig(url=f"sqlite:{tmp_path / 'store'}"))
    with started, pytest.raises(BadRequestError, match="per-token"):
        command(tmp_path, "export", "--out", str(tmp_path / "rows.parquet"), "--per-token")
