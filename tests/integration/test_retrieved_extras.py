"""What engines say of each token, retrieved with the tokens: the same with and without a store, and after a restart."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from middleware_hub.store.sqlite.file import connect
from router.config import StoreConfig
from tests.middleware_hub.store_cli.running import status
from tests.support.redis_server import empty_redis
from tests.support.stack import Stack, stack
from tests.support.usual import usual

WANTED = {"return_routed_experts": True, "return_indexer_topk": True, "return_top_p": True}
FIELDS = ("routed_experts", "indexer_topk", "top_p")


@pytest.fixture(params=usual([None, "sqlite", "redis"], None, "sqlite"), scope="module")
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> StoreConfig:
    addresses = {"sqlite": lambda: f"sqlite:{tmp_path_factory.mktemp('store')}", "redis": empty_redis}
    return StoreConfig(url=request.param and addresses[request.param]())


@pytest.fixture(scope="module")
def served(store: StoreConfig) -> Iterator[Stack]:
    with stack("qwen", styles=("cumulative",), store=store) as made:
        yield made
        assert made.idle()


def rows_of(chain: list[int], teller: int, start: int = 0) -> NDArray[np.int32]:
    """What reply number `teller` tells: of each token its id, its place, and who says so."""
    return np.array([[token, place, teller] for place, token in enumerate(chain[:-1])][start:], "<i4")


def told(numbers: NDArray[Any]) -> str:
    return base64.b64encode(numbers.astype("<i4").tobytes()).decode()


def array_of(found: dict[str, Any]) -> NDArray[np.int32]:
    return np.frombuffer(base64.b64decode(found["base64"]), found["dtype"]).reshape(found["shape"])


def sets_of(found: dict[str, Any]) -> list[list[int]]:
    ids, offsets = (np.frombuffer(base64.b64decode(found[name]), "<i4").tolist() for name in ("token_ids", "offsets"))
    return [ids[low:high] for low, high in itertools.pairwise(offsets)]


class Rollout:
    """A conversation in a namespace of its own; the same words make the same tokens in each."""

    def __init__(self, served: Stack, namespace: str) -> None:
        self.served = served
        self.headers = {"x-radix-namespace": namespace}
        self.names: list[str] = []

    def say(self, text: str, says: str, *, stream: bool = False, options: Any = None, **meta: Any) -> str:
        """Return the text with the reply to it."""
        (worker,) = self.served.workers
        worker.script(text=says, finish="eos", extra_meta=meta)
        reply = self.served.generate({"text": text, "stream": stream, **(options or {})}, headers=self.headers)
        body = reply.body[-1] if stream else reply.body
        self.names.append(body["meta_info"]["id"])
        for name, value in meta.items():
            assert body["meta_info"][name] == value
        return text + str(body["text"])

    def retrieve(self, text: str, served: Stack | None = None, **options: Any) -> Any:
        return (served or self.served).retrieve(
            text, namespace=self.headers["x-radix-namespace"], **{**WANTED, **options}
        )


def learned(served: Stack) -> dict[str, list[int]]:
    """The tokens of the conversation that all tests have."""
    talk = Rollout(served, "bare")
    texts = conversation(talk, {})
    found = {}
    for name, text in texts.items():
        answer = talk.retrieve(text)
        assert [answer[field] for field in FIELDS] == [None] * 3
        found[name] = answer["tokens"]
    return found


def conversation(talk: Rollout, meta: dict[str, dict[str, Any]], *, stream: bool = False) -> dict[str, str]:
    """Three turns, and another second one."""

    def say(name: str, text: str, says: str) -> str:
        return talk.say(text, says, stream=stream, **meta.get(name, {}))

    first = say("first", "Ask: a\n", "One is enough.")
    second = say("second", first + "\nAsk: b\n", "And two, too.")
    other = say("other", first + "\nAsk: b\n", "Another two.")
    third = say("third", second + "\nAsk: c\n", "Three of them.")
    return {"first": first, "second": second, "other": other, "third": third}


@pytest.fixture(scope="module")
def chains(served: Stack) -> dict[str, list[int]]:
    return learned(served)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_each_row_is_its_tokens_own_and_of_the_reply_that_read_it_first(
    served: Stack, chains: dict[str, list[int]], store: StoreConfig, stream: bool
) -> None:
    meta: dict[str, dict[str, Any]] = {
        name: {
            "routed_experts": told(rows_of(chains[name], number)),
            "indexer_topk": told(rows_of(chains[name], -number)),
        }
        for number, name in enumerate(("first", "other", "third"), 1)
    }
    talk = Rollout(served, f"rows {stream}")
    texts = conversation(talk, meta, stream=stream)
    known, long, other = len(chains["first"]) - 1, len(chains["third"]) - 1, len(chains["other"]) - 1
    first, _, branch, last = talk.names

    def check(asked: Stack) -> dict[str, Any]:
        answer = talk.retrieve(texts["third"], asked)
        assert answer["exact"]
        assert answer["tokens"] == chains["third"]
        rows = array_of(answer["routed_experts"])
        assert rows.tolist() == [*rows_of(chains["first"], 1).tolist(), *rows_of(chains["third"], 3, known).tolist()]
        assert array_of(answer["indexer_topk"])[:, 2].tolist() == [-1] * known + [-3] * (long - known)
        assert answer["routed_experts"]["told"] == [
            {"request_id": first, "start": 0, "end": known},
            {"request_id": last, "start": known, "end": long},
        ]
        second = talk.retrieve(texts["second"], asked)
        rows = array_of(second["routed_experts"])
        assert rows[:known].tolist() == rows_of(chains["first"], 1).tolist()
        assert rows[known:].tolist() == [[-1] * 3] * (len(chains["second"]) - 1 - known)
        assert second["top_p"] is None

        # What was asked on behind what is recorded has rows, too: nobody told them.
        further = talk.retrieve(texts["first"] + " and more", asked)
        assert array_of(further["routed_experts"]).shape == (len(further["tokens"]) - 1, 3)
        cut = talk.retrieve(texts["first"][:-4] + "!", asked)
        kept = cut["turns"][0]["end"]
        assert array_of(cut["routed_experts"])[:kept].tolist() == rows_of(chains["first"], 1)[:kept].tolist()
        assert set(array_of(cut["routed_experts"])[kept:].ravel().tolist()) <= {-1}

        covered = talk.retrieve(texts["third"], asked, cover=True, expect_request_ids=talk.names)
        assert [len(one["turns"]) for one in covered["trajectories"]] == [3, 2]
        told_by = [one["request_id"] for one in covered["trajectories"][1]["routed_experts"]["told"]]
        assert told_by == [first, branch]
        assert array_of(covered["trajectories"][1]["routed_experts"]).shape == (other, 3)
        several = asked.retrieve([texts["third"], texts["other"]], namespace=f"rows {stream}", **WANTED)
        assert [one["routed_experts"]["shape"] for one in several] == [[long, 3], [other, 3]]
        bare = asked.retrieve(texts["third"], namespace=f"rows {stream}")
        assert bare == {name: value for name, value in answer.items() if name not in FIELDS}
        return {"long": answer, "second": second, "further": further, "cut": cut, "cover": covered, "several": several}

    before = check(served)
    if store.url:
        with stack("qwen", styles=("cumulative",), store=store) as restarted:
            assert check(restarted) == before


@pytest.mark.parametrize("lists", [False, True], ids=["arrays", "lists"])
def test_the_sets_that_tokens_were_sampled_from_are_aligned_with_them(
    served: Stack, chains: dict[str, list[int]], store: StoreConfig, lists: bool
) -> None:
    talk = Rollout(served, f"top-p {lists}")
    count = served.retrieve("Ask: a\nOne is enough.", namespace="bare")["turns"][0]
    sampled = chains["first"][count["start"] :]
    sets = [[token, *range(number % 3)] for number, token in enumerate(sampled)]
    ends = np.cumsum([0, *map(len, sets)])
    meta: dict[str, Any] = (
        {"output_token_sampling_mask": sets}
        if lists
        else {
            "top_p_token_ids": told(np.array([one for row in sets for one in row])),
            "top_p_token_offsets": told(ends),
        }
    )
    text = conversation(talk, {"first": meta})["third"]

    def check(asked: Stack) -> None:
        answer = talk.retrieve(text, asked)
        assert answer["routed_experts"] is None
        blank: list[list[int]] = [[]]
        end = count["start"] + len(sets)
        assert sets_of(answer["top_p"]) == blank * count["start"] + sets + blank * (len(answer["tokens"]) - end)
        assert answer["top_p"]["told"] == [{"request_id": talk.names[0], "start": count["start"], "end": end}]

    check(served)
    if store.url:
        with stack("qwen", styles=("cumulative",), store=store) as restarted:
            check(restarted)


def test_rows_may_begin_behind_the_prompt(served: Stack, chains: dict[str, list[int]]) -> None:
    talk = Rollout(served, "later rows")
    begin = served.retrieve("Ask: a\nOne is enough.", namespace="bare")["turns"][0]["start"]
    rows = rows_of(chains["first"], 1, begin)
    text = talk.say(
        "Ask: a\n", "One is enough.", options={"routed_experts_start_len": begin}, routed_experts=told(rows)
    )
    found = array_of(talk.retrieve(text)["routed_experts"])
    assert found[:begin].tolist() == [[-1] * 3] * begin
    assert found[begin:].tolist() == rows.tolist()


def test_samples_and_batches_have_their_own(served: Stack, chains: dict[str, list[int]]) -> None:
    (worker,) = served.workers
    for number in range(4):
        rows = told(rows_of(chains["first"], number))
        worker.script(text="One is enough.", finish="eos", extra_meta={"routed_experts": rows})
    headers = {"x-radix-namespace": "samples"}
    body = {"text": ["Ask: a\n", "Ask: a\n"], "sampling_params": {"n": 2}}
    replies = served.generate(body, headers=headers).body
    tellers = set()
    for reply in replies:
        name = reply["meta_info"]["id"]
        found = served.retrieve("Ask: a\nOne is enough.", namespace="samples", request_id=name, **WANTED)
        sent = np.frombuffer(base64.b64decode(reply["meta_info"]["routed_experts"]), "<i4").reshape(-1, 3)
        assert array_of(found["routed_experts"]).tolist() == sent.tolist()
        tellers.add(int(sent[0, 2]))
    assert tellers == {0, 1, 2, 3}


def test_what_has_another_shape_is_dropped_with_a_count(served: Stack) -> None:
    talk = Rollout(served, "wrong")
    text = talk.say("Ask: a\n", "One is enough.", routed_experts="AAAA", output_token_sampling_mask=[[1]])
    answer = talk.retrieve(text)
    assert answer["exact"]
    assert [answer[field] for field in FIELDS] == [None] * 3
    metrics = served.get("/metrics").content.decode()
    assert 'tito_radix_extras_total{field="routed_experts",outcome="shape"}' in metrics
    assert 'tito_radix_extras_total{field="top_p",outcome="shape"}' in metrics


def test_a_start_that_is_no_number_is_refused(served: Stack) -> None:
    answer = served.post("/generate", {"text": "a", "routed_experts_start_len": "none"})
    assert answer.status == 400
    assert "routed_experts_start_len" in answer.content.decode()


def test_a_name_that_is_no_boolean_is_refused(served: Stack) -> None:
    assert served.post("/retrieve_from_text", {"text": "a", "return_top_p": 1}).status == 400


def test_a_damaged_store_is_told(tmp_path: Path) -> None:
    store = StoreConfig(url=f"sqlite:{tmp_path}")
    with stack("qwen", styles=("cumulative",), store=store) as made:
        talk = Rollout(made, "")
        count = len(learned(made)["first"]) - 1
        text = talk.say("Ask: a\n", "One is enough.", routed_experts=told(np.arange(count * 3)))

    with connect(tmp_path / "store.sqlite3") as file:
        file.execute("UPDATE blobs SET body = substr(body, 1, 20)")
        assert file.changes() == 1
    file.close()
    with stack("qwen", styles=("cumulative",), store=store) as made:
        answer = talk.retrieve(text, made)
        assert answer["reasons"] == ["store_unreachable"]
        assert not answer["exact"]
        assert answer["routed_experts"] is None


def test_what_the_tree_evicts_comes_back_from_the_store(tmp_path: Path) -> None:
    store = StoreConfig(url=f"sqlite:{tmp_path}")
    with stack("qwen", styles=("cumulative",), store=store, radix={"max_tokens": 8}) as made:
        chains = learned(made)
        talk = Rollout(made, "evicted")
        rows = {name: rows_of(chains[name], number) for number, name in enumerate(chains)}
        texts = conversation(talk, {name: {"routed_experts": told(one)} for name, one in rows.items()})
        assert made.get("/radix_tree/stats").json()["evicted_tokens"] > 0
        found = array_of(talk.retrieve(texts["third"])["routed_experts"])
        assert found[:, 0].tolist() == chains["third"][:-1]
        known = [len(chains[name]) - 1 for name in ("first", "second", "third")]
        assert found[:, 2].tolist() == [0] * known[0] + [1] * (known[1] - known[0]) + [3] * (known[2] - known[1])


def test_a_conversation_that_the_store_forgot_is_written_again_with_its_rows(tmp_path: Path) -> None:
    store = StoreConfig(url=f"sqlite:{tmp_path}")
    with stack("qwen", styles=("cumulative",), store=store) as made:
        chains = learned(made)
        talk = Rollout(made, "forgotten")
        first, second = (rows_of(chains[name], number) for number, name in enumerate(("first", "second"), 1))
        text = talk.say("Ask: a\n", "One is enough.", routed_experts=told(first))
        assert status("prune", "--store", f"sqlite:{tmp_path}", "--unused-for", "0h", "--unretrieved") == 0
        text = talk.say(text + "\nAsk: b\n", "And two, too.", routed_experts=told(second))
    with stack("qwen", styles=("cumulative",), store=store) as restarted:
        found = talk.retrieve(text, restarted)
    assert found["exact"]
    assert array_of(found["routed_experts"]).tolist() == [*first.tolist(), *second[len(first) :].tolist()]
