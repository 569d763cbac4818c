"""Arrays of the worker with a row for each token, exported over HTTP: each row must stand at its own token."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow.ipc
import pytest
import safetensors.numpy
from numpy.typing import NDArray

from middleware_hub.client import Client, Session
from tests.support.agents import AgentSession, Turn, ids_of, user
from tests.support.stack import Stack, stack

SAYS = {"first": "One.", "second": "And two, too.", "other": "Another two.", "third": "Three."}


@pytest.fixture(scope="module")
def served() -> Iterator[Stack]:
    with stack("qwen", styles=("incremental",)) as made:
        yield made
        assert made.idle()


def rows_of(chain: list[int], teller: int, start: int = 0) -> NDArray[np.int32]:
    """What turn number `teller` tells: of each token its id, its place, and who says so."""
    return np.array([[token, place, teller] for place, token in enumerate(chain[:-1])][start:], "<i4")


def told(rows: NDArray[Any]) -> str:
    return base64.b64encode(rows.tobytes()).decode()


def array_of(found: dict[str, Any]) -> NDArray[np.int32]:
    return np.frombuffer(base64.b64decode(found["base64"]), found["dtype"]).reshape(found["shape"])


def talk(served: Stack, *, stream: bool, extras: dict[str, dict[str, Any]]) -> tuple[AgentSession, dict[str, Turn]]:
    """Three turns, and another second one; the worker says of each what `extras` has for it."""
    agent = AgentSession.make(served)
    (worker,) = served.workers
    turns: dict[str, Turn] = {}

    def ask(name: str, *messages: dict[str, Any]) -> dict[str, Any]:
        worker.script(text=SAYS[name], finish="eos", extra_meta=extras.get(name, {}))
        turns[name] = agent.must(*messages, stream=stream)
        return {"role": "assistant", "content": SAYS[name]}

    first = ask("first", user("a"))
    second = ask("second", user("a"), first, user("b"))
    ask("other", user("a"), first, user("b"))
    ask("third", user("a"), first, user("b"), second, user("c"))
    return agent, turns


@pytest.fixture(scope="module")
def chains(served: Stack) -> dict[str, list[int]]:
    """The same conversation, without extras: what is sent and sampled is the same each time."""
    _, turns = talk(served, stream=False, extras={})
    return {name: turn.chain for name, turn in turns.items()}


@pytest.fixture(params=[False, True], ids=["whole", "stream"])
def agent(request: pytest.FixtureRequest, served: Stack, chains: dict[str, list[int]]) -> AgentSession:
    """Its second turn tells nothing; the other second event repeats all, and the third tells only the end."""
    begin = len(chains["second"]) + 1
    rows = {
        "first": rows_of(chains["first"], 1),
        "other": rows_of(chains["other"], 2),
        "third": rows_of(chains["third"], 3, begin),
    }
    extras: dict[str, dict[str, Any]] = {name: {"routed_experts": told(value)} for name, value in rows.items()}
    extras["first"]["hidden_states"] = [[0.5, 0.25]]
    extras["first"]["indexer_topk"] = "AAAA"
    agent, turns = talk(served, stream=request.param, extras=extras)
    assert {name: turn.chain for name, turn in turns.items()} == chains
    return agent


def test_each_row_is_its_tokens_own_and_of_the_turn_that_read_it_first(
    agent: AgentSession, chains: dict[str, list[int]]
) -> None:
    other, long = agent.finalize()
    known = len(chains["first"]) - 1
    assert (ids_of(other), ids_of(long)) == (chains["other"], chains["third"])

    rows = array_of(other["extra_fields"]["routed_experts"])
    assert rows[:, 0].tolist() == chains["other"][:-1]
    assert rows[:, 1].tolist() == list(range(len(rows)))
    assert rows[:, 2].tolist() == [1] * known + [2] * (len(rows) - known)

    described = long["extra_fields"]["routed_experts"]
    rows, gap = array_of(described), len(chains["second"]) + 1
    assert rows[:known].tolist() == rows_of(chains["first"], 1).tolist()
    assert rows[known:gap].tolist() == [[-1] * 3] * (gap - known)
    assert rows[gap:].tolist() == rows_of(chains["third"], 3, gap).tolist()
    first, _, third = long["extra_fields"]["turns"]
    assert described["told"] == [
        {"generation_id": first["generation_id"], "start": 0, "end": known},
        {"generation_id": third["generation_id"], "start": gap, "end": len(chains["third"]) - 1},
    ]


def test_of_every_checkpoint_it_ends_before_its_last_token(agent: AgentSession, chains: dict[str, list[int]]) -> None:
    found = agent.trajectories("?export_all_checkpoints=1")
    lengths = [one["extra_fields"]["routed_experts"]["shape"][0] for one in found]
    assert lengths == [len(chains[name]) - 1 for name in ("first", "second", "other", "third")]


def test_what_has_another_shape_stays_by_turn(agent: AgentSession) -> None:
    for one in agent.trajectories():
        generation = one["extra_fields"]["turns"][0]["generation_id"]
        assert one["extra_fields"]["hidden_states"] == [{"generation_id": generation, "value": [[0.5, 0.25]]}]
        assert one["extra_fields"]["indexer_topk"] == [{"generation_id": generation, "value": "AAAA"}]


def test_binary_exports_have_the_same_as_arrays(agent: AgentSession) -> None:
    expected = agent.trajectories()
    joined = [one["extra_fields"]["routed_experts"] for one in expected]
    arrays = [array_of(one) for one in joined]
    described = [{key: value for key, value in one.items() if key != "base64"} for one in joined]

    content = agent.stack.get(f"{agent.path}/trajectories?format=safetensors").content
    tensors = safetensors.numpy.load(content)
    metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    for number, array in enumerate(arrays):
        tensor = tensors[f"{number}.routed_experts"]
        assert (tensor.dtype, tensor.tolist()) == (np.int32, array.tolist())
        assert json.loads(metadata[str(number)])["extra_fields"]["routed_experts"] == described[number]

    content = agent.stack.get(f"{agent.path}/trajectories?format=arrow").content
    table = pyarrow.ipc.open_stream(content).read_all()
    assert "indexer_topk" not in table.column_names
    for number, row in enumerate(table.to_pylist()):
        extra = json.loads(row["json"])["extra_fields"]
        assert extra["routed_experts"] == described[number]
        assert row["routed_experts"] == arrays[number].ravel().tolist()


def test_arrow_has_null_where_nothing_was_told(served: Stack, chains: dict[str, list[int]]) -> None:
    extras = {"other": {"routed_experts": told(rows_of(chains["other"], 2))}}
    agent, _ = talk(served, stream=False, extras=extras)
    content = agent.stack.get(f"{agent.path}/trajectories?format=arrow").content
    column = pyarrow.ipc.open_stream(content).read_all()["routed_experts"].to_pylist()
    assert column == [rows_of(chains["other"], 2).ravel().tolist(), None]


@pytest.mark.parametrize("slimes", [False, True], ids=["lists", "slime"])
def test_the_sets_that_tokens_were_drawn_from_are_joined(
    served: Stack, chains: dict[str, list[int]], slimes: bool
) -> None:
    """Each set tells its own token, and those of a turn that reported none, or too few, are empty."""
    begins = {"first": 0, "second": 0, "other": 0, "third": 0}
    agent, turns = talk(served, stream=False, extras={})
    for name, turn in turns.items():
        begins[name] = len(turn.chain) - len(turn.sampled)

    def reported(name: str) -> list[list[int]]:
        return [[one, *range(one % 3)] for one in chains[name][begins[name] :]]

    def meta(sets: list[list[int]]) -> dict[str, Any]:
        if not slimes:
            return {"output_token_sampling_mask": sets}
        flat = np.array([one for row in sets for one in row], "<i4")
        return {
            "top_p_token_ids": told(flat),
            "top_p_token_offsets": told(np.cumsum([0, *map(len, sets)]).astype("<i4")),
        }

    extras = {"first": meta(reported("first")), "other": meta(reported("other")[1:]), "third": meta(reported("third"))}
    agent, _ = talk(served, stream=True, extras=extras)
    other, long = agent.finalize()
    for found, names in ((other, ["first"]), (long, ["first", "third"])):
        ids = ids_of(found)
        expected: list[list[int]] = [[] for _ in ids]
        for name in names:
            expected[begins[name] : begins[name] + len(reported(name))] = reported(name)
        joined = found["extra_fields"]["top_p"]
        flat, ends = (np.frombuffer(base64.b64decode(joined[key]), "<i4") for key in ("token_ids", "offsets"))
        assert [flat[low:high].tolist() for low, high in pairwise(ends)] == expected
        spans = [(begins[name], begins[name] + len(reported(name))) for name in names]
        assert [(one["start"], one["end"]) for one in joined["told"]] == spans
        told_by = [one["generation_id"] for one in joined["told"]]
        assert told_by == [found["turns"][number]["request_id"] for number in ([0] if len(names) == 1 else [0, 2])]
    with Client(served.url) as client, Session(client) as session:
        ids = chains["first"][begins["first"] :]
        served.workers[0].script(text=SAYS["first"], finish="eos", extra_meta=meta(reported("first")))
        session.chat([user("a")])
        (trajectory,) = session.finalize()
    assert trajectory.top_p is not None
    flat, ends = trajectory.top_p.arrays()
    assert flat[ends[-1 - len(ids)] :].tolist() == [one for row in reported("first") for one in row]
    assert not ends[: trajectory.prompt_length + 1].any()
