"""Fixtures of the benchmarks: a real vocabulary, a tree filled with turns, the machine's line."""

from __future__ import annotations

import random

import pytest

from benchmarks.pages import machine
from middleware_hub.radix.records import Context, SampledReply
from middleware_hub.radix.tree import RadixTree
from middleware_hub.spans.chain import pack_ids, pack_logprobs
from middleware_hub.tokenizer.tokenizer import Tokenizer
from tests.support.vocabularies import vocabulary

NAMESPACE = ("", "", "")
WORDS = (
    "the model reads a question and thinks about it before it calls another tool with arguments that are long enough "
    "to be interesting while an environment answers in sentences of its own which nobody has sampled from anything"
).split()


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict) -> None:
    machine_info.clear()
    machine_info["line"] = machine()


def pytest_benchmark_update_json(config: pytest.Config, benchmarks: list, output_json: dict) -> None:
    """Keep the figures, not the single rounds."""
    del output_json["commit_info"]
    output_json["command"] = "make bench"
    output_json["benchmarks"] = [
        {
            "name": one["name"],
            "median, us": round(1e6 * one["stats"]["median"], 3),
            "min, us": round(1e6 * one["stats"]["min"], 3),
            "rounds": one["stats"]["rounds"] * one["stats"]["iterations"],
            **one["extra_info"],
        }
        for one in output_json["benchmarks"]
    ]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(str(vocabulary("qwen-whole")))


class Talk:
    """Makes texts, and plays turns of them against a tree as the middleware does."""

    def __init__(self, tokenizer: Tokenizer, tree: RadixTree, seed: int = 0) -> None:
        self.tokenizer = tokenizer
        self.tree = tree
        self.random = random.Random(seed)
        self.encoded = 0

    def text(self, characters: int) -> str:
        words: list[str] = []
        size = 0
        while size < characters:
            words.append(self.random.choice(WORDS))
            size += len(words[-1]) + 1
        return " ".join(words)[:characters]

    def tokens(self, count: int) -> str:
        """Return a text that has this many tokens in any context."""
        whole = [word for word in WORDS if len(self.tokenizer.encode_tail(" " + word)) == 1]
        return "".join(" " + self.random.choice(whole) for _ in range(count))

    def turn(self, text: str, reply: str) -> str:
        """Record a request and its reply. The reply's ids are simply its encoding: for timing, any ids will do."""
        match = self.tree.match(NAMESPACE, text)
        self.tree.pin(match)
        context = None
        if match.cut.start < len(text):
            start = match.cut.span is None
            rest = text[match.cut.start :]
            ids = self.tokenizer.encode_start(rest) if start else self.tokenizer.encode_tail(rest)
            self.encoded += len(ids)
            alignment = self.tokenizer.align(ids, rest, start=start)
            context = Context(pack_ids(ids), alignment.flags, alignment.ends)
        ids = self.tokenizer.encode_tail(reply)
        logprobs = pack_logprobs([-self.random.randrange(1, 9999) / 4096 for _ in ids])
        request_id = f"{self.random.getrandbits(128):032x}"
        self.tree.record(match, context, SampledReply(pack_ids(ids), reply, "1", logprobs, request_ids=(request_id,)))
        self.tree.unpin(match)
        return text + reply


@pytest.fixture
def talk(tokenizer: Tokenizer) -> Talk:
    return Talk(tokenizer, RadixTree(tokenizer.vocabulary))
