"""Routers over one store answer as one that never died: prompts of ids and of segments, odd tokens, real vocabularies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from router.config import StoreConfig
from tests.integration.test_store_lives import HEADERS, Client, Said
from tests.support.lives import Router, tokenizer_of
from tests.support.usual import usual
from tests.support.vocabularies import vocabulary
from worker.worker import EmbeddedWorker

PIECES = [
    *("Hello", " Hello", "What is 2+2?", " Go on.", "\nObservation: nothing. ", "\r\n", "\0", " ", "  ", "summ", "ary"),
    *("🙂", " 👩\u200d👩\u200d👧", "é", "e\u0301", " \u0301x", "日本語", "한국어", "\ufffd", "<", "<s>", "</s>"),
    "<|im_end|>\n",
]
STOPS = ["Observation", "hing", " no", "🙂", "語", "\n", "e", " "]


class OddClient(Client):
    """Its prompts are texts, ids or both, cut anywhere; its replies have special tokens, and characters cut in half."""

    headers = tuple(
        name for name in HEADERS if name != "x-radix-reused-tokens"
    )  # context that is encoded again is not counted

    def __init__(self, seed: int, worker: EmbeddedWorker, one: Router, others: list[Router], folder: Path) -> None:
        super().__init__(seed, worker, one, others)
        self.tokenizer = tokenizer_of(folder)
        self._special = sorted(number for number in self.tokenizer.vocabulary.special_ids if number >= 0)[:4]
        self.chains: list[list[int]] = []  # one for each of `said`

    def step(self) -> None:
        kind = self.random.choice(["text"] * 3 + ["ids"] * 3 + ["segments", "retrieve", "retrieve", "cover", "restart"])
        if kind == "restart":
            self.random.choice(self.others).restart()
        elif kind in ("retrieve", "cover"):
            self.retrieve(cover=kind == "cover")
        else:
            self.generate(kind)

    def piece(self) -> list[int]:
        """Some ids: a text, or only a part of it, or a special token."""
        ids = list(self.tokenizer.encode_tail(self.random.choice(PIECES)))
        cut = self.random.choice([len(ids), len(ids), len(ids), self.random.randint(1, len(ids))])
        return self.random.choice([ids[:cut], ids[:cut], ids[:cut], [self.random.choice(self._special)]])

    def prompt(self, kind: str) -> tuple[dict[str, Any], str]:
        """The prompt of a request, and its namespace."""
        rng, number = self.random, self.random.randrange(len(self.said)) if self.said else -1
        if number < 0 or (kind == "text" and rng.random() < 0.3):
            begin = rng.choice(["", "<s>", " ", "You are an agent. " * 30])
            return {"text": begin + rng.choice(PIECES)}, rng.choice(["", "", "eval"])
        said, chain = self.said[number], self.chains[number]
        if kind == "text":
            text = said.text + said.reply
            text = text[: len(text) - rng.choice([0, 0, 0, 1, 3])] + rng.choice(["", *PIECES])
            return {"text": text or "a"}, said.namespace
        ids = chain[: max(1, len(chain) - rng.choice([0, 0, 0, 1, 2, 5]))] + rng.choice(
            [[], self.piece(), self.piece()]
        )
        if kind == "ids":
            return {"input_ids": ids}, said.namespace
        segments: list[Any] = [{"ids": ids}, {"text": rng.choice(PIECES)}, {"ids": self.piece()}]
        return {"prompt_segments": rng.choice([segments, segments[:2], segments[1:]])}, said.namespace

    def generate(self, kind: str) -> None:
        rng, self.count = self.random, self.count + 1
        rid, ids = f"r{self.count}", [number for _ in range(rng.randrange(4)) for number in self.piece()]
        logprobs = [-rng.randrange(1, 2000) / 64 for _ in range(40)]
        script = {"ids": ids, "finish": rng.choice(["eos", "length"]) if ids else "eos", "logprobs": logprobs}
        sampling = {
            "max_new_tokens": 30,
            "custom_params": {"script": script},
            "skip_special_tokens": rng.random() < 0.8,
        }
        sampling |= rng.choice([{}, {}, {"stop": rng.sample(STOPS, 2)}, {"stop_token_ids": self._special[:1]}])
        prompt, namespace = self.prompt(kind)
        headers = {"x-radix-namespace": namespace} if namespace else {}
        if self.said and rng.random() < 0.2:
            headers["x-radix-parent"] = rng.choice([one.rid for one in self.said[-6:]] + ["none", "nobody"])
        stream = rng.random() < 0.3
        body = {**prompt, "rid": rid, "sampling_params": sampling, "stream": stream}
        found = self.both("/generate", body, headers, stream=stream)
        record = self.worker.log[-1]
        text = prompt.get("text") or self.tokenizer.spell_prompt(record.input_ids)
        if text:
            self.said.append(Said(text, rid, namespace, (found[-1] if stream else found)["text"]))
            self.chains.append([*record.input_ids, *record.output_ids])

    def check(self, said: Said, chain: list[int]) -> None:
        """A reply is retrieved whole, by its name."""
        headers = {"x-radix-namespace": said.namespace} if said.namespace else {}
        body = {"text": said.text + said.reply, "request_id": said.rid, "expect_request_ids": [said.rid]}
        found = self.both("/retrieve_from_text", body, headers)
        assert found["tokens"] == chain
        assert found["turns"][-1]["request_id"] == said.rid
        sampled = {place for turn in found["turns"] for place in range(turn["start"], turn["end"])}
        assert found["loss_mask"] == [int(place in sampled) for place in range(len(chain))]


MATRIX = [(name, seed) for name in ("qwen", "mistral-v1", "mistral-v1-legacy", "tekken") for seed in range(8)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seed"), usual(MATRIX, ("mistral-v1", 0), ("tekken", 1)))
def test_routers_over_a_store_answer_as_one_that_never_died(name: Any, seed: int, tmp_path: Path) -> None:
    folder, store = vocabulary(name), StoreConfig(url=f"sqlite:{tmp_path / 'store.sqlite3'}")
    with EmbeddedWorker(folder, token_delay=0) as worker:
        one = Router(worker, None, folder=folder)
        others = [Router(worker, store, [1, None, 40][seed % 3], folder=folder) for _ in range(2)]
        try:
            client = OddClient(seed, worker, one, others, folder)
            for _ in range(50):
                client.step()
            for said, chain in zip(client.said, client.chains, strict=True):
                client.check(said, chain)
        finally:
            for router in [one, *others]:
                router.stop()
