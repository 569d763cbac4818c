"""Matching, flattening and recording: independent of siblings, linear in text. Aim for a match: 10 us + 1 ns a character."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.conftest import NAMESPACE, Talk
from middleware_hub.radix.records import Context, SampledReply
from middleware_hub.radix.tree import RadixTree
from middleware_hub.spans.chain import chain_ids, pack_ids, pack_logprobs
from middleware_hub.spans.trajectory import flatten
from middleware_hub.tokenizer.tokenizer import Tokenizer


def conversation(talk: Talk, characters: int, turn: int = 1_000) -> str:
    """Play a conversation of this length in turns of `turn` characters, half context and half reply."""
    text = ""
    half = min(turn, characters) // 2
    while len(text) < characters:
        text = talk.turn(text + talk.text(half), talk.text(half))
    return text


def add_siblings(talk: Talk, prompt: str, count: int) -> None:
    """Record different replies to one prompt."""
    tree = talk.tree
    ids = pack_ids(talk.tokenizer.encode_start(prompt))
    for number in range(count):
        match = tree.match(NAMESPACE, prompt)
        tree.pin(match)
        context = Context(ids) if match.cut.start < len(prompt) else None
        reply = f"{number:x} is my answer"
        sampled = talk.tokenizer.encode_tail(reply) if number < 1_000 else list(range(len(reply)))
        tree.record(match, context, SampledReply(pack_ids(sampled), reply, "1", pack_logprobs([-1.0] * len(sampled))))
        tree.unpin(match)


@pytest.mark.parametrize("characters", [1_000, 10_000, 100_000])
def test_match_and_ids(benchmark: BenchmarkFixture, talk: Talk, characters: int) -> None:
    """The cost of a request: find the chain and flatten its ids."""
    text = conversation(talk, characters) + " And then?"

    def match() -> bytes:
        cut = talk.tree.match(NAMESPACE, text).cut
        return chain_ids(cut.span, cut.take)

    assert len(benchmark(match)) > characters // 8


@pytest.mark.parametrize("characters", [1_000, 10_000, 100_000])
def test_recall_and_flatten(benchmark: BenchmarkFixture, talk: Talk, characters: int) -> None:
    """The cost of a retrieval: ids, logprobs, mask and versions."""
    text = conversation(talk, characters)

    def recall() -> int:
        found = talk.tree.recall(NAMESPACE, text)
        assert found is not None
        return len(flatten(found.cut.span, found.cut.take).token_ids)

    assert benchmark(recall) > characters // 10


@pytest.mark.parametrize("siblings", [10, 1_000, 100_000])
def test_match_among_siblings(benchmark: BenchmarkFixture, talk: Talk, siblings: int) -> None:
    prompt = talk.text(1_000)
    add_siblings(talk, prompt, siblings)
    text = prompt + "5 is my answer" + talk.text(50)

    def match() -> bytes:
        cut = talk.tree.match(NAMESPACE, text).cut
        return chain_ids(cut.span, cut.take)

    benchmark(match)


def add_group(talk: Talk, prompt: str, count: int) -> tuple[str, list[str]]:
    """Record samples of one prompt that begin alike and go apart word by word, as those of a group do.

    Return how all of them begin, and all of them.
    """
    tree, random = talk.tree, talk.random
    ids = pack_ids(talk.tokenizer.encode_start(prompt))
    opening = talk.tokens(20)
    replies: dict[str, None] = {}
    while len(replies) < count:
        words = (random.choice((" one", " two", " three", " four", " then", " the", " thesis", " a")) for _ in range(8))
        replies[opening + "".join(words) + talk.tokens(100)] = None
    for reply in replies:
        match = tree.match(NAMESPACE, prompt)
        tree.pin(match)
        sampled = talk.tokenizer.encode_tail(reply)
        context = Context(ids) if match.cut.start < len(prompt) else None
        tree.record(match, context, SampledReply(pack_ids(sampled), reply, "1", pack_logprobs([-1.0] * len(sampled))))
        tree.unpin(match)
    return opening, list(replies)


@pytest.mark.parametrize("asked", ["again", "sample", "alike", "apart"])
@pytest.mark.parametrize("samples", [16, 64, 512])
def test_match_in_a_group(benchmark: BenchmarkFixture, talk: Talk, samples: int, asked: str) -> None:
    """Aim: 10 us, however many samples there are.

    again: the prompt itself; sample: with one whole reply after it, and new text; alike: the text leaves all replies in
    their common opening; apart: it leaves several of them within a word, whose tokens differ.
    """
    prompt = talk.text(1_000)
    opening, replies = add_group(talk, prompt, samples)
    text = {
        "again": prompt,
        "sample": prompt + replies[samples // 2] + talk.text(100),
        "alike": prompt + opening[:60] + "#" + talk.text(50),
        "apart": prompt + opening + " th",
    }[asked]
    match = benchmark(talk.tree.match, NAMESPACE, text)
    assert match.cut.start >= {"again": len(prompt), "sample": len(prompt) + 200, "alike": 1_050}.get(asked, 1_060)


def _recorder(talk: Talk, text: str) -> tuple[Callable[[], tuple[tuple, dict]], Callable[..., None]]:
    tree = talk.tree
    reply = talk.text(500)
    sampled = talk.tokenizer.encode_tail(reply)
    packed, logprobs = pack_ids(sampled), pack_logprobs([-1.5] * len(sampled))
    numbers = iter(range(10**9))

    def setup() -> tuple[tuple, dict]:
        asked = f"{text} question {next(numbers)}"
        match = tree.match(NAMESPACE, asked)
        tree.pin(match)
        rest = asked[match.cut.start :]
        return (match, Context(pack_ids(talk.tokenizer.encode_tail(rest)))), {}

    def record(match, context) -> None:
        tree.record(match, context, SampledReply(packed, reply, "1", logprobs))
        tree.unpin(match)

    return setup, record


@pytest.mark.parametrize("characters", [1_000, 10_000, 100_000])
def test_record(benchmark: BenchmarkFixture, talk: Talk, characters: int) -> None:
    setup, record = _recorder(talk, conversation(talk, characters))
    benchmark.pedantic(record, setup=setup, rounds=300)


@pytest.mark.parametrize("siblings", [10, 1_000, 100_000])
def test_record_among_siblings(benchmark: BenchmarkFixture, talk: Talk, siblings: int) -> None:
    prompt = talk.text(1_000)
    add_siblings(talk, prompt, siblings)
    setup, record = _recorder(talk, prompt)
    benchmark.pedantic(record, setup=setup, rounds=300)


@pytest.mark.parametrize("turns", [50, 500, 5_000])
def test_match_deep(benchmark: BenchmarkFixture, talk: Talk, turns: int) -> None:
    """Conversations of many short turns (100 characters each)."""
    text = conversation(talk, turns * 100, turn=100) + " go on"

    def match() -> bytes:
        cut = talk.tree.match(NAMESPACE, text).cut
        return chain_ids(cut.span, cut.take)

    benchmark.pedantic(match, rounds=30)


@pytest.mark.parametrize("turns", [50, 500, 5_000])
def test_find_deep(benchmark: BenchmarkFixture, talk: Talk, turns: int) -> None:
    """The same without laying the chain flat: it begins at a landmark, and costs little more than the hash of the text."""
    text = conversation(talk, turns * 100, turn=100) + " go on"
    match = benchmark.pedantic(talk.tree.match, (NAMESPACE, text), rounds=30)
    assert match.cut.start == len(text) - len(" go on")


@pytest.mark.parametrize("remembered", [False, True])
def test_tokens_encoded_over_ten_turns(benchmark: BenchmarkFixture, tokenizer: Tokenizer, remembered: bool) -> None:
    """Ten turns of 100 + 50 tokens: 7,750 tokens are encoded if every prompt is encoded whole, 1,000 if only what is new."""

    def ten_turns() -> int:
        talk = Talk(tokenizer, RadixTree(tokenizer.vocabulary))
        text = ""
        for _ in range(10):
            if not remembered:
                talk.tree = RadixTree(tokenizer.vocabulary)
            text = talk.turn(text + talk.tokens(100), talk.tokens(50))
        return talk.encoded

    encoded = benchmark.pedantic(ten_turns, rounds=5)
    assert encoded == (1_000 if remembered else 7_750)
    benchmark.extra_info["tokens encoded"] = encoded
