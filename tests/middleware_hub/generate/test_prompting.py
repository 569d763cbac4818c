"""Prompts in segments are put together by the rules of starts and continuations, and hold nobody up."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import normalizers

from middleware_hub.generate.prompting import Assembled, assemble
from middleware_hub.tokenizer.tokenizer import LONG_TEXT, Tokenizer
from router.engines.form.segments import Segment
from router.errors import BadRequestError
from router.http.headers import HeaderList
from router.observability.tracing import Attribute, Span
from tests.conftest import examples
from tests.middleware_hub.real import ALL, reference, texts, tokenizer
from tests.support.oracle import speller
from tests.support.usual import usual
from tests.support.vocabularies import Name, load


def put_together(name: Name, *segments: Segment, **options: Any) -> Assembled:
    (only,) = asyncio.run(assemble(tokenizer(name), [list(segments)], batch=False, **options))
    return only


@pytest.mark.parametrize("name", usual(ALL, "qwen", "mistral-v1"))
def test_a_prompt_is_the_sum_of_its_segments(name: Name) -> None:
    """The first by the worker's own tokenizer, those behind it without what a start gains, ids as they are."""
    worker, made, oracle = reference(name), tokenizer(name), speller(name)
    some_ids = st.lists(st.integers(0, made.vocabulary.size - 1), min_size=1, max_size=5)

    @settings(max_examples=examples(60))
    @given(st.lists(st.one_of(texts(name).filter(bool), some_ids), min_size=1, max_size=6))
    def check(segments: list[Segment]) -> None:
        ids: list[int] = []
        runs: list[range] = []
        for number, segment in enumerate(segments):
            if isinstance(segment, list):
                ids += segment
                continue
            found = oracle.encode_tail(segment) if number else list(worker(segment)["input_ids"])
            if not number and made.bos and found[:2] == made.bos * 2:
                found = found[1:]
            runs.append(range(len(ids), len(ids) + len(found)))
            ids += found
        if ids:
            assert put_together(name, *segments) == Assembled(ids, runs)

    check()


def test_a_batch_is_put_together_prompt_by_prompt() -> None:
    made = tokenizer("mistral-v1")
    found = asyncio.run(assemble(made, [["Hello", [7]], [[7], "Hello"]], batch=True))
    assert [one.ids for one in found] == [[*made.encode_start("Hello"), 7], [7, *made.encode_tail("Hello")]]


def certain(name: Name) -> Tokenizer:
    """One whose folder says how many ids the model has."""
    made = copy.copy(tokenizer(name))
    made.vocabulary = copy.copy(made.vocabulary)
    made.vocabulary.certain = True
    return made


@pytest.mark.parametrize(
    ("prompts", "batch", "says"),
    [
        ([["a", [5], [6, -1]]], False, "`prompt_segments[2].ids` has -1 in it, and the vocabulary is 0 to 31999"),
        ([[[32000]]], False, "`prompt_segments[0].ids` has 32000"),
        ([["a"], ["b", [10**12]]], True, "`prompt_segments[1][1].ids` has 1000000000000"),
        (
            [["a" * 10, [5] * 18]],
            False,
            "maximum context length is 22 tokens. However, your messages resulted in 22 tokens",
        ),
        ([["a"], [[5] * 99]], True, "your messages resulted in 99 tokens"),
    ],
)
def test_what_cannot_be_sent_is_refused(prompts: list[list[Segment]], batch: bool, says: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        asyncio.run(assemble(certain("mistral-v1"), prompts, batch=batch, max_context=22))
    assert says in caught.value.message


def test_a_prompt_that_leaves_room_for_one_token_is_sent() -> None:
    assert len(put_together("qwen", [5] * 21, max_context=22).ids) == 21


def test_a_prompt_of_no_tokens_is_refused() -> None:
    """There are normalizers that leave nothing of a text."""
    backend = Backend.from_str(load("qwen").to_str())
    backend.normalizer = normalizers.Strip()
    made = Tokenizer(backend)
    with pytest.raises(BadRequestError, match="encodes to no token at all"):
        asyncio.run(assemble(made, [["  ", " "]], batch=False))
    (found,) = asyncio.run(assemble(made, [["  ", "a", " "]], batch=False))
    assert found == Assembled(made.encode_tail("a"), [range(0), range(1), range(1, 1)])


class Notes(Span):
    """A tracer that notes what is said to it, and its spans in one."""

    def __init__(self) -> None:
        self.said: list[dict[str, Attribute]] = []

    def __enter__(self) -> Notes:
        return self

    def __exit__(self, *_: object) -> None: ...

    def receive(self, headers: HeaderList, **attributes: Attribute) -> Notes:
        return self.span("receive", **attributes)

    def span(self, name: str, **attributes: Attribute) -> Notes:
        self.said.append({"name": name, **attributes})
        return self

    def set(self, **attributes: Attribute) -> None:
        self.said[-1] |= attributes

    def fail(self, reason: str) -> None: ...

    def inject(self, headers: HeaderList) -> HeaderList:
        return headers

    def close(self) -> None: ...


def test_a_span_tells_what_was_encoded() -> None:
    """Ids are not: a prompt of nothing else has no such span."""
    notes = Notes()
    assert put_together("qwen", [5, 6], tracer=notes).ids == [5, 6]
    assert notes.said == []
    assert len(put_together("qwen", "Hello", [5, 6], " there", tracer=notes).ids) == 4
    assert notes.said == [{"name": "encode", "characters": 11, "tokens": 2}]


@pytest.mark.parametrize("segments", [["a"] * 4000, [[5]] * 4000, ["a b " * 200] * 40, ["a" * LONG_TEXT * 20] * 3])
def test_others_have_their_turns_meanwhile(segments: list[Segment]) -> None:
    """Thousands of small segments cost what a large one does."""
    made = tokenizer("qwen")

    async def main() -> int:
        assembling = asyncio.create_task(assemble(made, [segments], batch=False))
        turns = 0
        while not assembling.done():
            turns += 1
            await asyncio.sleep(0)
        await assembling
        return turns

    assert asyncio.run(main()) > 3
