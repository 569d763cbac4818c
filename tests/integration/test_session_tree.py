"""`finalize` with `"format": "tree"`: the branches of a session, each shared token once; and a model that is trained on it."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import sglang_server
from tests.support.stack import Stack, stack

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def served() -> Iterator[Stack]:
    with stack("qwen", styles=("cumulative",)) as made:
        yield made
        assert made.idle()


class Task:
    """A session of which any turn can be gone on from."""

    def __init__(self, served: Stack, name: str) -> None:
        self.served = served
        self.path = f"/sessions/{name}"
        assert served.post("/sessions", {"session_id": name, "sampling_params": {"max_tokens": 9}}).status == 201

    def ask(self, messages: list[dict[str, Any]], **fields: Any) -> list[dict[str, Any]]:
        """Return the messages with the first reply."""
        answer = self.served.post(f"{self.path}/v1/chat/completions", {"messages": messages, **fields})
        assert answer.status == 200, answer.content
        return [*messages, answer.json()["choices"][0]["message"]]

    def finalize(self, **fields: Any) -> Any:
        answer = self.served.post(f"{self.path}/finalize", fields)
        assert answer.status == 200, answer.content
        return answer.json()


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def team(served: Stack, name: str) -> Task:
    """A planner with a rejected and a chosen second turn, best of three at its end, and a critic with another system prompt."""
    task = Task(served, name)
    plan = task.ask([{"role": "system", "content": "You plan. " * 9}, user("Build a boat.")])
    task.ask([*plan, user("Once more, shorter.")])
    chosen = task.ask([*plan, user("Good. Now build it.")])
    task.ask([*chosen, user("Paint it.")], n=3)
    task.ask([{"role": "system", "content": "You plan. " * 9}, user("Judge the boat.")])
    return task


def paths(tree: Any) -> list[dict[str, list[Any]]]:
    """The tokens, mask, logprobs and versions of each leaf."""
    found = []
    for leaf in tree["leaves"]:
        nodes, at = [], leaf["node"]
        while at is not None:
            nodes.insert(0, tree["nodes"][at])
            at = tree["nodes"][at]["parent"]
        row: dict[str, list[Any]] = {"tokens": [], "mask": [], "logprobs": [], "versions": []}
        for node in nodes:
            assert node["start"] == len(row["tokens"])
            count = len(node["token_ids"])
            row["tokens"] += node["token_ids"]
            row["mask"] += [node["mask"]] * count
            row["logprobs"] += node["logprobs"] or [0.0] * count
            versions = [None] * count
            for run in node["weight_versions"]:
                versions[run["start"] : run["end"]] = [run["version"]] * (run["end"] - run["start"])
            row["versions"] += versions
        found.append(row)
    return found


def assert_is_the_session(task: Task) -> Any:
    """Every leaf is a trajectory, token by token, and nothing that is shared stands in the tree twice."""
    tree = task.finalize(format="tree")
    flat = task.finalize(shared_turns="every")["trajectories"]
    assert [leaf["branch"] for leaf in tree["leaves"]] == [one["branch"] for one in flat]
    for row, one in zip(paths(tree), flat, strict=True):
        begin = len(one["prompt_ids"])
        assert row["tokens"] == one["prompt_ids"] + one["response_ids"]
        assert row["mask"] == [0] * begin + one["response_mask"]
        assert row["logprobs"] == [0.0] * begin + one["response_logprobs"]
        versions = [None] * len(row["tokens"])
        for run in one["weight_versions"]:
            versions[begin + run["start"] : begin + run["end"]] = [run["version"]] * (run["end"] - run["start"])
        assert row["versions"] == versions
    nodes = tree["nodes"]
    assert tree["tokens"] == sum(len(node["token_ids"]) for node in nodes)
    assert tree["flat_tokens"] == sum(len(row["tokens"]) for row in paths(tree))
    for node in nodes:
        siblings = [one for one in nodes if one["parent"] == node["parent"] and one is not node]
        for other in siblings:
            same = other["token_ids"][0] == node["token_ids"][0]
            assert not same or (node["mask"] or other["mask"]), "context that is shared stands there twice"
        above = {node["node"]}
        while (parent := nodes[min(above)]["parent"]) is not None:
            above.add(parent)
        inside = {one["node"] for one in nodes if one["tin"] <= node["tin"] < one["tout"]}
        assert inside == above
    generations = [turn["request_id"] for one in flat for turn in one["turns"]]
    sampled = {node["generation_id"] for node in nodes if node["mask"]}
    assert sampled == set(generations)
    return tree


def test_a_tree_holds_every_branch_once(served: Stack) -> None:
    tree = assert_is_the_session(team(served, "team"))
    assert len(tree["leaves"]) == 5
    assert tree["tokens"] < tree["flat_tokens"]
    assert [len(tree["nodes"])] == [max(node["tout"] for node in tree["nodes"])]


def test_equal_replies_are_two_samples(served: Stack) -> None:
    task = Task(served, "equal")
    for _ in range(2):
        served.workers[0].script(text="Yes.")
        task.ask([user("Is it?")])
    tree = assert_is_the_session(task)
    twins = [node for node in tree["nodes"] if node["mask"]]
    assert [node["token_ids"] for node in twins] == [twins[0]["token_ids"]] * 2
    assert len({node["parent"] for node in twins}) == 1


def test_a_session_without_a_turn_is_an_empty_tree(served: Stack) -> None:
    tree = Task(served, "empty").finalize(format="tree")
    assert (tree["nodes"], tree["leaves"], tree["tokens"]) == ([], [], 0)


@pytest.mark.parametrize("seed", range(6))
def test_any_session_is_a_tree(served: Stack, seed: int) -> None:
    chance = random.Random(seed)
    task = Task(served, f"random-{seed}")
    known = [[{"role": "system", "content": chance.choice(["Plan.", "Plan it.", "Code."])}] for _ in range(2)]
    for number in range(14):
        base = chance.choice(known)
        said = chance.choice(["Go on.", "Go on. And on.", f"Number {number}."])
        known.append(task.ask([*base, user(said)], n=chance.choice([1, 1, 2])))
    assert_is_the_session(task)


# -- a model -----------------------------------------------------------------------------------------------------------


@pytest.mark.sglang
def test_a_model_learns_the_same_from_the_tree(served: Stack) -> None:
    """torch is where SGLang is, so this runs with its tests."""
    python = sglang_server.python_with("torch")
    if python is None:
        pytest.skip("no torch: tests/sglang_cpu/setup.sh brings it")
    trees = [team(served, f"train-{number}").finalize(format="tree") for number in range(2)]
    lines = "\n".join(json.dumps(tree) for tree in trees)
    done = subprocess.run(
        [python, "-m", "tests.support.tree_training"],
        cwd=ROOT,
        input=lines,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    kinds = ("once", "every", "some_once", "some_every")
    for name in (*(f"{what}_{kind}" for what in ("loss", "gradient") for kind in kinds), "flex"):
        assert found[name] < 1e-5, found
    assert found["without_mask"] > 1e-3
    assert found["tokens"] == sum(tree["tokens"] for tree in trees)
    print(f"\n{found['tokens']} of {found['flat']} tokens computed, {found['saved']:.0%} saved; differences {found}")
