"""Stores that routers of earlier commits wrote are read by this one: see `tests.support.earlier.make`."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from middleware_hub.hub import Hub
from router.app import create_app
from router.cli import main
from router.config import RadixConfig, RouterConfig, SessionsConfig, StoreConfig, WorkersConfig
from tests.support.earlier.make import FOLDER, NEW_VERSION, restore
from tests.support.lives import tokenizer_of
from tests.support.redis_server import empty_redis
from tests.support.serving import serve
from worker.demo.proof import prove, prove_together
from worker.demo.rollout import call
from worker.engine.records import GenerationRecord
from worker.models.ngram import shipped_tokenizer
from worker.options import WorkerOptions
from worker.worker import EmbeddedWorker

STORES = sorted(path.name.removesuffix(".store.gz") for path in FOLDER.glob("*.store.gz"))
LONG = 1e9
"""Seconds for which a session is kept: since the store was written, years may have passed."""


class Earlier:
    """A router over a copy of an earlier store.

    Attributes:
        address: the store's.
        played: what is known of its conversations.
        worker: of this router; it did not sample what is in the store.
    """

    def __init__(self, name: str, folder: Path) -> None:
        kept = _unpacked(f"{name}.store")
        self.played = json.loads(_unpacked(f"{name}.truth.json"))
        if name.endswith(".sqlite"):
            file = folder / "store.sqlite3"
            file.write_bytes(kept)
            self.address = f"sqlite:{file}"
        else:
            self.address = empty_redis()
            restore(kept, self.address)
        self.worker = EmbeddedWorker(None, WorkerOptions(weight_version=NEW_VERSION, token_delay=0))
        self._entered = ExitStack()

    def start(self) -> None:
        self._entered.enter_context(self.worker)
        config = RouterConfig(
            workers=WorkersConfig(urls=(self.worker.url,)),
            radix=RadixConfig(tokenizer_path=str(shipped_tokenizer())),
            store=StoreConfig(url=self.address),
            sessions=SessionsConfig(ttl=LONG),
        )
        hub = Hub(tokenizer_of(shipped_tokenizer()), config.store)
        self.url = self._entered.enter_context(serve(create_app(config, shared={Hub: hub})))

    def stop(self) -> None:
        self._entered.close()

    @property
    def sampled(self) -> dict[str, GenerationRecord]:
        """All generations, by id: those of the store, and those since."""
        earlier = {
            name: GenerationRecord(name, {}, b"", {}, 0, from_text=False, **fields)
            for name, fields in self.played["sampled"].items()
        }
        return {**earlier, **{one.rid: one for one in self.worker.log}}

    def call(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
        return call(self.url, path, body, headers)[1]


def _unpacked(name: str) -> bytes:
    return gzip.decompress((FOLDER / f"{name}.gz").read_bytes())


@pytest.fixture(params=STORES)
def unopened(request: pytest.FixtureRequest, tmp_path: Path) -> Earlier:
    return Earlier(request.param, tmp_path)


@pytest.fixture
def earlier(unopened: Earlier) -> Iterator[Earlier]:
    unopened.start()
    try:
        yield unopened
    finally:
        unopened.stop()


def expected(earlier: Earlier, replies: list[str]) -> tuple[list[int], list[float | None], list[str | None]]:
    """Return the tokens of a chain of replies, with the logprob and the version of each token that was sampled.

    A reply that a stop string cut goes on in the next prompt with fewer tokens than were sampled.
    """
    tokens: list[int] = []
    logprobs: list[float | None] = []
    versions: list[str | None] = []
    prompts = [earlier.sampled[name].input_ids for name in replies]
    for name, following in zip(replies, [*prompts[1:], None], strict=True):
        one = earlier.sampled[name]
        assert one.input_ids[: len(tokens)] == tokens
        context = len(one.input_ids) - len(tokens)
        kept = len(one.output_ids)
        while following is not None and following[len(one.input_ids) :][:kept] != one.output_ids[:kept]:
            kept -= 1
        tokens = [*one.input_ids, *one.output_ids[:kept]]
        logprobs += [*[None] * context, *one.logprobs[:kept]]
        versions += [*[None] * context, *one.versions[:kept]]
    return tokens, logprobs, versions


def test_a_spool_file_is_handed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With what it continues in the store, by the command."""
    file, spool = tmp_path / "store.sqlite3", tmp_path / "17-5f0c.spool"
    file.write_bytes(_unpacked("2026-11-29.spool.sqlite"))
    spool.write_bytes(_unpacked("2026-11-29.spool"))
    played = json.loads(_unpacked("2026-11-29.spool.truth.json"))
    with pytest.raises(SystemExit, match="0"):
        main(["store", "handover", "--store", f"sqlite:{file}", "--any-store", str(spool)])
    assert "4 handed over, 0 refused, 0 left" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.spool*"))
    config = RouterConfig(
        radix=RadixConfig(tokenizer_path=str(shipped_tokenizer())), store=StoreConfig(url=f"sqlite:{file}")
    )
    with serve(create_app(config)) as url:
        for text, one in zip(played["texts"], played["sampled"], strict=True):
            found = call(url, "/retrieve_from_text", {"text": text})[1]
            assert found["exact"], found["reasons"]
            assert found["tokens"] == [*one["input_ids"], *one["output_ids"]]


def test_there_are_stores_of_both_kinds() -> None:
    assert {name.rpartition(".")[2] for name in STORES} == {"sqlite", "redis"}


def test_every_text_gives_its_tokens(earlier: Earlier) -> None:
    for one in earlier.played["texts"]:
        found = earlier.call("/retrieve_from_text", {"text": one["text"]}, one["tenant"])
        tokens, logprobs, versions = expected(earlier, one["replies"])
        assert found["exact"], found["reasons"]
        assert found["tokens"] == tokens
        assert found["loss_mask"] == [int(value is not None) for value in logprobs]
        assert [value for value in logprobs if value is not None] == pytest.approx(
            [value for value, mask in zip(found["rollout_logp"], found["loss_mask"], strict=True) if mask], abs=1e-6
        )
        known: list[str | None] = [None] * len(tokens)
        for run in found["weight_versions"]:
            known[run["start"] : run["end"]] = [run["version"]] * (run["end"] - run["start"])
        assert known == versions


def test_a_text_goes_on_with_its_tokens(earlier: Earlier) -> None:
    for one in earlier.played["texts"]:
        body = {"text": one["text"] + " More.", "sampling_params": {"max_new_tokens": 4}}
        reply = earlier.call("/generate", body, one["tenant"])
        last = earlier.sampled[one["replies"][-1]]
        sent = earlier.sampled[reply["meta_info"]["id"]].input_ids
        assert sent[: len(last.input_ids)] == last.input_ids
        assert sent[len(last.input_ids) :][: len(last.output_ids)] == last.output_ids


def test_sessions_go_on(earlier: Earlier) -> None:
    live, finalized = earlier.played["sessions"]
    messages = [*live["messages"], {"role": "user", "content": "Once more?"}]
    path = f"/sessions/{live['id']}"
    reply = earlier.call(f"{path}/v1/chat/completions", {"model": "m", "messages": messages, "max_tokens": 6})
    generations = {
        live["id"]: [*live["generations"], reply["id"].removeprefix("chatcmpl-")],
        finalized["id"]: finalized["generations"],
    }
    for session, names in generations.items():
        (trajectory,) = found = earlier.call(f"/sessions/{session}/finalize", {})["trajectories"]
        proof = prove(trajectory, earlier.sampled)
        assert proof.holds, proof.faults
        assert [turn["generation_id"] for turn in trajectory["extra_fields"]["turns"]] == names
        assert not prove_together(found, {name: earlier.sampled[name] for name in names})
    assert trajectory["reward_info"] == {"score": 0.5}


def test_a_chat_without_a_session_goes_on(earlier: Earlier) -> None:
    chat = earlier.played["chat"]
    messages = [*chat["messages"], {"role": "user", "content": "Once more?"}]
    body = {"model": "m", "messages": messages, "max_tokens": 6, "return_trajectory": True, "return_meta_info": True}
    reply = earlier.call("/v1/chat/completions", body)
    found = reply["choices"][0]["meta_info"]["trajectory"]
    names = [*chat["generations"], reply["id"].removeprefix("chatcmpl-")]
    tokens, logprobs, _ = expected(earlier, names)
    assert found["tokens"] == tokens
    assert found["loss_mask"] == [int(value is not None) for value in logprobs]


def test_a_group_is_claimed(earlier: Earlier) -> None:
    claim = earlier.call("/trajectories/claim", {"groups": 1})
    assert len(claim["groups"]) == 1
    assert [one["exact"] for one in claim["samples"]] == [True, True]
    sampled = earlier.sampled.values()
    for sample in claim["samples"]:
        (trajectory,) = sample["trajectories"]
        assert trajectory["tokens"] in [[*one.input_ids, *one.output_ids] for one in sampled]


@pytest.mark.parametrize("command", ["verify", "stats"])
def test_the_commands_read_it(unopened: Earlier, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["store", command, "--store", unopened.address])
    assert not ended.value.code, capsys.readouterr()
