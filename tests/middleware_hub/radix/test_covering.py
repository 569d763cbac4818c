"""An answer with many sequences takes the memory of its JSON, and says what an eviction would have taken meanwhile."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from typing import Any, cast

import msgspec
import pytest

from middleware_hub.retrieval.retrieval import Answered, retrieve
from middleware_hub.retrieval.retrieval_request import RetrievalRequest
from middleware_hub.spans.answer_json import Lists
from middleware_hub.tokenizer.tokenizer import Tokenizer
from router.errors import NotExactError
from tests.middleware_hub.radix.talk import NS, Talk
from tests.middleware_hub.toy import EOS, A, B

NO_TOKENIZER = cast(Tokenizer, None)  # every text is recorded


def covering(talk: Talk, text: str, names: list[str]) -> Any:
    return retrieve(talk.tree, NO_TOKENIZER, NS, text, RetrievalRequest(text, cover=True), names)


def told(answer: Answered) -> Any:
    return msgspec.json.decode(b"".join(answer.pieces))


def test_the_sequences_are_written_one_after_the_other() -> None:
    talk = Talk()
    prompt = "a b " * 1000
    turns = [talk.say(prompt, [A] * number + [B, EOS], f"r{number}") for number in range(1, 41)]
    names = [f"r{number}" for number in range(1, 41)]
    asyncio.run(covering(talk, turns[0].text, names[:2]))  # what is made at the first use

    async def scenario() -> tuple[Answered, int]:
        gc.collect()
        tracemalloc.start()
        try:
            answer = await covering(talk, turns[0].text, names)
            return answer, tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    answer, peak = asyncio.run(scenario())
    assert len(told(answer)["trajectories"]) == len(answer.sequences) == 40
    assert peak < 2 * sum(map(len, answer.pieces)), "the numbers of all sequences were there at the same time"


def test_equal_texts_have_the_list_of_their_replies_in_common() -> None:
    """A list for each of thousands of samples, in the answers for each of their texts, is gigabytes."""
    talk = Talk()
    turns = [talk.say("a", [B, EOS], f"r{number}") for number in range(200)]
    names = [f"r{number}" for number in reversed(range(200))]

    async def scenario() -> list[Answered]:
        lists, text = Lists(), turns[0].text
        return [
            await retrieve(talk.tree, NO_TOKENIZER, NS, text, RetrievalRequest(text), [], None, lists) for _ in range(3)
        ]

    answers = asyncio.run(scenario())
    assert len({id(answer.pieces[-1]) for answer in answers}) == 1
    alone = asyncio.run(retrieve(talk.tree, NO_TOKENIZER, NS, turns[0].text, RetrievalRequest(turns[0].text)))
    assert told(alone)["request_ids"] == names
    assert all(told(answer) == told(alone) for answer in answers)


def test_what_is_evicted_meanwhile_is_in_the_answer() -> None:
    talk = Talk(max_tokens=10_000)
    turns = [talk.say("a b ", [A] * number + [B, EOS], f"r{number}") for number in range(1, 9)]

    async def scenario() -> Any:
        asked = asyncio.create_task(covering(talk, turns[0].text, [f"r{number}" for number in range(1, 9)]))
        while not asked.done():
            await asyncio.sleep(0)
            talk.tree.max_tokens = 0
            talk.tree.collect()
        return told(await asked)

    found = asyncio.run(scenario())
    assert [one["tokens"] for one in found["trajectories"]] == [turn.ids for turn in turns]
    assert [sum(one["loss_mask"]) for one in found["trajectories"]] == [number + 2 for number in range(1, 9)]
    assert found["missing"] == []
    talk.collect(0)
    assert talk.tree.stats.tokens == 0, "nothing is kept when the answer is written"


class Away:
    """A memory whose store knows one text, and cannot be asked for others."""

    def __init__(self, known: str) -> None:
        self.known = known
        self.asked: list[str] = []

    async def cover(self, _: Any, text: str, *__: Any, **___: Any) -> bool:
        self.asked.append(text)
        return text == self.known

    async def asked_late(self, *_: Any) -> tuple[str, ...]:
        return ()

    def retrieved(self, _: Any) -> None: ...


def test_sequences_that_the_store_could_not_be_asked_for_say_so() -> None:
    talk = Talk()
    turns = [talk.say("a b ", [A] * number + [B, EOS], f"r{number}") for number in range(1, 81)]
    memory = Away(turns[0].text)
    request = RetrievalRequest(turns[0].text, cover=True)
    names = [f"r{number}" for number in range(1, 81)]
    first, *others = told(
        asyncio.run(retrieve(talk.tree, NO_TOKENIZER, NS, turns[0].text, request, names, cast(Any, memory)))
    )["trajectories"]
    assert (first["exact"], first["reasons"]) == (True, [])
    assert {(one["exact"], *one["reasons"]) for one in others} == {(False, "store_unreachable")}
    assert [one["tokens"] for one in others] == [turn.ids for turn in turns[1:]]
    assert len(memory.asked) < len(turns) / 2, "a store that is away is not asked again"


def test_a_text_that_the_store_could_not_be_asked_for_says_so() -> None:
    """The store may have more of it, and the reply of any name."""
    talk = Talk()
    turn = talk.say("a b ", [A, B, EOS], "r")

    async def asked(text: str, **how: Any) -> Any:
        request, memory = RetrievalRequest(text, **how), cast(Any, Away(""))
        return told(await retrieve(talk.tree, NO_TOKENIZER, NS, text, request, (), memory))

    async def scenario() -> None:
        found = await asked(turn.text)
        assert (found["exact"], found["reasons"], found["tokens"]) == (False, ["store_unreachable"], turn.ids)
        found = await asked(turn.text, request_id="unknown")
        assert (found["exact"], found["reasons"]) == (False, ["store_unreachable", "unknown_reply"])
        with pytest.raises(NotExactError) as refused:
            await asked(f"{turn.text} a", strict=True)
        assert refused.value.details["reasons"] == ["retokenized", "store_unreachable"]

    asyncio.run(scenario())
