"""A prompt of ids that begins with a recorded chain continues it, also at a router that has it only in its store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from router.config import StoreConfig
from tests.support.lives import Router, tokenizer_of
from tests.support.usual import usual
from tests.support.vocabularies import vocabulary
from worker.worker import EmbeddedWorker


class Fleet:
    """Two routers over one store, with a vocabulary that has a BOS."""

    def __init__(self, folder: Path, worker: EmbeddedWorker, store: StoreConfig) -> None:
        self.tokenizer = tokenizer_of(folder)
        self._worker = worker
        self.routers = [Router(worker, store, folder=folder) for _ in range(2)]

    def generate(self, number: int, rid: str, ids: list[int], **prompt: Any) -> list[int]:
        """Have these ids sampled, and return the whole chain."""
        script = {"script": {"ids": ids, "finish": "length"}}
        sampling = {"max_new_tokens": len(ids), "custom_params": script, "ignore_eos": True}
        body = {"rid": rid, "sampling_params": sampling, **prompt}
        answer = self.routers[number].stack.post("/generate", body)
        assert answer.status == 200, answer.content
        return [*self._worker.log[-1].input_ids, *ids]

    def turns(self, number: int, text: str) -> list[tuple[str, int, int]]:
        found = self.routers[number].stack.retrieve(text)
        return [(turn["request_id"], turn["start"], turn["end"]) for turn in found["turns"]]


@pytest.fixture(scope="module", params=usual(["tekken", "mistral-v1", "mistral-v1-legacy"], "mistral-v1"))
def started(request: pytest.FixtureRequest) -> Iterator[tuple[Path, EmbeddedWorker]]:
    folder = vocabulary(request.param)
    with EmbeddedWorker(folder, token_delay=0) as worker:
        yield folder, worker


@pytest.fixture
def fleet(started: tuple[Path, EmbeddedWorker], tmp_path: Path) -> Iterator[Fleet]:
    found = Fleet(*started, StoreConfig(url=f"sqlite:{tmp_path / 'store.sqlite3'}"))
    yield found
    for router in found.routers:
        router.stop()


@pytest.mark.parametrize(
    "text",
    ["<s>", "<s>[INST] Hi [/INST]", " Hi", "Hi", "<s> Hi", "<s>" + "Hello there. " * 30, "<s>" * 40, " " * 400],
    ids=["bos", "turn", "space", "word", "both", "long", "many", "spaces"],
)
@pytest.mark.parametrize("samples", usual([" Yes", "Yes"], " Yes"))
def test_a_text_that_spells_its_bos_or_first_space_is_continued_by_ids(fleet: Fleet, text: str, samples: str) -> None:
    """A prompt of ids is looked up by their spelling, which begins after the BOS and after the dummy space behind it."""
    sampled = fleet.tokenizer.encode_tail(samples)
    chain = fleet.generate(0, "r0", sampled, text=text)
    turns = [("r0", len(chain))]
    for number in (1, 0, 1):
        ids = [*chain, *fleet.tokenizer.encode_tail(" so?")]
        chain = fleet.generate(number, f"r{len(turns)}", sampled, input_ids=ids)
        turns.append((f"r{len(turns)}", len(chain)))
    asked, count = fleet.tokenizer.spell_prompt(chain), len(sampled)
    for number in (0, 1):
        assert fleet.turns(number, asked) == [(rid, end - count, end) for rid, end in turns]
