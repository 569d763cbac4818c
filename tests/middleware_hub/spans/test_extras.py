"""What engines say of each token: kept once, read from the process or from a store, and compared with a dictionary of rows."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw
from numpy.typing import NDArray

from middleware_hub.persistence.memory import Memory
from middleware_hub.persistence.spelling import Spelling
from middleware_hub.persistence.weight_versions import VersionLog
from middleware_hub.radix.node import Generation
from middleware_hub.radix.records import Context, SampledReply
from middleware_hub.radix.tree import RadixTree
from middleware_hub.retrieval.retrieval import UNLIKE_ROWS, per_token_fields
from middleware_hub.spans.chain import STORE_UNREACHABLE, TokenSpan, links, pack_ids
from middleware_hub.spans.extras import TOP_P_IDS, TOP_P_OFFSETS, Extra, Extras
from middleware_hub.spans.per_token import MISSING, TOP_P
from middleware_hub.spans.trajectory import flatten
from middleware_hub.spans.versions import VersionClock, WorkerVersions
from middleware_hub.store.records import Serials
from middleware_hub.tokenizer.alignment import align_context
from tests.middleware_hub.radix.talk import NS
from tests.middleware_hub.toy import A, encode, toy_vocabulary
from tests.support.dictionary_store import DictionaryStore

WIDTH = 3
EXPERTS = "routed_experts"


def encoded(numbers: NDArray[Any]) -> Raw:
    """As SGLang writes it."""
    return Raw(json.dumps(base64.b64encode(numbers.astype("<i4").tobytes()).decode()).encode())


def reply(parent: TokenSpan | None, take: int, tokens: int, name: str = "") -> TokenSpan:
    return TokenSpan(parent, take, 0, pack_ids(range(tokens)), 1, versions="1", request_ids=(name,))


def context(parent: TokenSpan | None, take: int, tokens: int) -> TokenSpan:
    return TokenSpan(parent, take, 0, pack_ids(range(tokens)), 1)


@dataclass
class World:
    """Replies behind replies, and what each of them told.

    Attributes:
        blobs: what a store was given beside each reply.
        rows: the first row that a reply told, and all it told from there on.
        sets: of each sampled token of a reply.
    """

    extras: Extras
    replies: list[TokenSpan] = field(default_factory=list)
    blobs: dict[TokenSpan, Mapping[str, Extra]] = field(default_factory=dict)
    rows: dict[TokenSpan, tuple[int, NDArray[np.int32]]] = field(default_factory=dict)
    sets: dict[TokenSpan, list[list[int]]] = field(default_factory=dict)

    def add(self, data: st.DataObject) -> None:
        number = len(self.replies)
        parent, take = None, 0
        if self.replies and data.draw(st.integers(0, 4), label="behind"):
            parent = data.draw(st.sampled_from(self.replies), label="parent")
            take = data.draw(st.integers(1, parent.count), label="take")
        if parent is None or data.draw(st.booleans(), label="context"):
            parent = context(parent, take, data.draw(st.integers(1, 3), label="context tokens"))
            take = parent.count
        span = reply(parent, take, data.draw(st.integers(1, 4), label="tokens"), str(number))
        fields: dict[str, Raw] = {}
        first, last = 0, span.offset + span.count - 1
        if last and data.draw(st.integers(0, 3), label="tells"):
            first = data.draw(st.sampled_from([0, 0, 0, min(span.offset, last - 1)]), label="first")
            places = np.arange(first, last)[:, None] * 100 + np.arange(WIDTH) + number * 10_000
            self.rows[span] = first, places.astype(np.int32)
            fields[EXPERTS] = encoded(places)
        if data.draw(st.booleans(), label="top_p"):
            sets = data.draw(
                st.lists(st.lists(st.integers(0, 99), max_size=3), min_size=span.count, max_size=span.count)
            )
            self.sets[span] = sets
            ends = np.cumsum([0, *map(len, sets)])
            fields |= (
                {"output_token_sampling_mask": Raw(json.dumps(sets).encode())}
                if data.draw(st.booleans(), label="as lists")
                else {
                    "top_p_token_ids": encoded(np.array([one for row in sets for one in row])),
                    "top_p_token_offsets": encoded(ends),
                }
            )
        before = self.extras.bytes
        self.extras.keep(span, fields, first)
        self.blobs[span] = dict(self.extras.of(span))
        assert self.extras.bytes <= self.extras.most_bytes or self.extras.bytes <= before
        self.replies.append(span)

    def oracle(self, span: TokenSpan, take: int, tokens: int) -> tuple[list[list[int]], list[str | None]]:
        """Each row, and who told it."""
        found: dict[int, tuple[list[int], str]] = {}
        for part, count in reversed(list(links(span, take))):
            if part in self.rows:
                first, rows = self.rows[part]
                for place, row in enumerate(rows.tolist(), first):
                    if place < part.offset + count:
                        found.setdefault(place, (row, part.request_ids[0]))
        blank = ([MISSING] * WIDTH, None)
        return [found.get(p, blank)[0] for p in range(tokens - 1)], [found.get(p, blank)[1] for p in range(tokens - 1)]

    def left(self, span: TokenSpan, take: int, tokens: int) -> list[list[int]]:
        """The set of each token that was sampled, if it was told."""
        found: list[list[int]] = [[] for _ in range(tokens)]
        for part, count in links(span, take):
            for number, one in enumerate(self.sets.get(part, [])[:count]):
                found[part.offset + number] = one
        return found

    def fields(self, span: TokenSpan, take: int, tail: int, *wanted: str) -> tuple[dict[str, Any], list[str]]:
        async def fetch(one: TokenSpan, names: Sequence[str]) -> Mapping[str, Extra]:
            return {name: extra for name, extra in self.blobs[one].items() if name in names}

        flat = flatten(span, take, pack_ids([7] * tail))
        fields, reasons = asyncio.run(per_token_fields(self.extras, fetch, flat, wanted))
        return msgspec.json.decode(msgspec.json.encode(fields)), reasons


def numbers(value: str) -> NDArray[np.int32]:
    return np.frombuffer(base64.b64decode(value), "<i4")


def rows_of(found: dict[str, Any]) -> list[list[int]]:
    rows: list[list[int]] = numbers(found["base64"]).reshape(found["shape"]).tolist()
    return rows


@pytest.mark.parametrize("most_bytes", [1 << 20, 0])
@given(st.data())
def test_every_row_is_of_the_first_reply_that_told_it(most_bytes: int, data: st.DataObject) -> None:
    world = World(Extras(stored=True))
    for _ in range(data.draw(st.integers(1, 8), label="replies")):
        world.add(data)
    if not most_bytes:  # all of it is in the store alone, as after a restart
        world.extras = Extras(stored=True)
    span = data.draw(st.sampled_from(world.replies), label="span")
    take = data.draw(st.integers(1, span.count), label="take")
    tail = data.draw(st.integers(0, 2), label="tail")
    tokens = span.offset + take + tail
    found, reasons = world.fields(span, take, tail, EXPERTS, TOP_P)
    assert not reasons

    rows, tellers = world.oracle(span, take, tokens)
    if any(part in world.rows for part, _ in links(span, take)):
        assert rows_of(found[EXPERTS]) == rows
        names = [None] * (tokens - 1)
        for one in found[EXPERTS]["told"]:
            names[one["start"] : one["end"]] = [one["request_id"]] * (one["end"] - one["start"])
        assert names == tellers
    else:
        assert found[EXPERTS] is None

    if any(part in world.sets for part, _ in links(span, take)):
        ids, offsets = numbers(found[TOP_P]["token_ids"]).tolist(), numbers(found[TOP_P]["offsets"]).tolist()
        assert len(offsets) == tokens + 1
        sets = [ids[low:high] for low, high in itertools.pairwise(offsets)]
        assert sets == world.left(span, take, tokens)
    else:
        assert found[TOP_P] is None


def test_a_row_is_kept_once_however_many_turns_tell_it() -> None:
    extras, parent = Extras(), context(None, 0, 10)
    for turn in range(50):
        span = reply(parent, parent.count, 10)
        rows = np.arange((span.offset + span.count - 1) * WIDTH)
        extras.keep(span, {EXPERTS: encoded(rows)})
        assert extras.bytes == 4 * WIDTH * (span.offset + span.count - 1), turn
        parent = span


def test_over_the_limit_the_oldest_go_and_later_replies_keep_their_rows_again() -> None:
    extras = Extras()
    extras.most_bytes = 4 * WIDTH * 30
    parent, last = context(None, 0, 10), reply(None, 0, 1)
    for _ in range(4):
        last = reply(parent, parent.count, 10)
        extras.keep(last, {EXPERTS: encoded(np.arange((last.offset + last.count - 1) * WIDTH))})
        parent = last
        assert extras.bytes <= extras.most_bytes
    assert extras.counts[EXPERTS, "evicted"] > 0
    extras.forget(last)
    extras.clear()
    assert not extras.bytes


WRONG: list[dict[str, Raw]] = [
    {EXPERTS: encoded(np.arange(4 * WIDTH + 1))},
    {EXPERTS: Raw(b'"AAAAA"')},
    {EXPERTS: Raw(b'"AAA="')},
    {EXPERTS: Raw(b'"****************"')},
    {EXPERTS: Raw(b'""')},
    {EXPERTS: Raw(b"[[1,2],[3,4]]")},
    {"indexer_topk": Raw(b"7")},
    {"output_token_sampling_mask": Raw(b"[[1],[2]]")},
    {"output_token_sampling_mask": Raw(b"[[1],[2],[9999999999]]")},
    {"output_token_sampling_mask": Raw(b'[[1],[2],["a"]]')},
    {"top_p_token_ids": encoded(np.arange(3))},
    {"top_p_token_ids": encoded(np.arange(3)), "top_p_token_offsets": encoded(np.array([0, 1, 3]))},
    {"top_p_token_ids": encoded(np.arange(3)), "top_p_token_offsets": encoded(np.array([0, 2, 1, 3]))},
    {"top_p_token_ids": encoded(np.arange(3)), "top_p_token_offsets": encoded(np.array([1, 1, 2, 3]))},
    {"top_p_token_ids": encoded(np.arange(3)), "top_p_token_offsets": encoded(np.array([0, 1, 2, 4]))},
]


@pytest.mark.parametrize("fields", WRONG)
def test_what_has_another_shape_is_dropped_and_counted(fields: dict[str, Raw]) -> None:
    extras, span = Extras(), reply(context(None, 0, 2), 2, 3)
    extras.keep(span, fields)
    assert not extras.of(span)
    assert [outcome for _, outcome in extras.counts] == ["shape"]


def test_rows_of_another_width_than_the_conversation_has_are_dropped() -> None:
    extras, first = Extras(), reply(context(None, 0, 2), 2, 3)
    extras.keep(first, {EXPERTS: encoded(np.arange(4 * WIDTH))})
    second = reply(first, 3, 3)
    extras.keep(second, {EXPERTS: encoded(np.arange(7 * (WIDTH + 1)))})
    assert (extras.of(first)[EXPERTS].shape, dict(extras.of(second))) == ((4, WIDTH), {})


def test_rows_of_different_widths_that_a_store_has_are_not_joined() -> None:
    first = reply(context(None, 0, 2), 2, 3, "a")
    second = reply(first, 3, 2, "b")
    blobs = {first: Extra((4, 1), b"\0" * 16), second: Extra((2, 2), b"\0" * 16)}

    async def fetch(span: TokenSpan, _: Sequence[str]) -> Mapping[str, Extra]:
        return {EXPERTS: blobs[span]}

    assert asyncio.run(per_token_fields(Extras(), fetch, flatten(second, 2), [EXPERTS])) == (
        {EXPERTS: None},
        [UNLIKE_ROWS],
    )


def test_a_conversation_that_the_store_forgot_is_written_again_with_its_arrays() -> None:
    async def talk() -> None:
        vocabulary, store, clock = toy_vocabulary(), DictionaryStore(), VersionClock()
        memory = Memory(
            RadixTree(vocabulary, clock=clock, stored=True),
            store,
            Serials(),
            VersionLog(store, clock, WorkerVersions()),
            Spelling(vocabulary.spell, vocabulary.spell, vocabulary.special_ids),
        )

        async def say(text: str) -> Generation:
            match = memory.tree.match(NS, text)
            rest = encode(text[match.cut.start :])
            over = align_context(vocabulary, rest, text[match.cut.start :], bos=(), offsets=lambda: None)
            rows = encoded(np.arange((match.cut.tokens + len(rest)) * WIDTH))
            sampled = SampledReply(pack_ids([A]), "a", "1", told={EXPERTS: rows})
            memory.tree.pin(match)
            made, saving = memory.record(match, Context(pack_ids(rest), over.flags, over.ends), sampled)
            memory.tree.unpin(match)
            assert await saving
            return made

        first = await say("b ")
        await store.forget(0)
        last = await say("b a b ")
        assert not [one async for one in store.verify()]
        chain = [span for span, _ in links(last.span, 1) if span.sampled]
        blobs = [await store.blobs(span.stored.id) for span in chain]
        assert [[(one.name, one.shape) for one in beside] for beside in blobs] == [
            [(EXPERTS, (last.span.offset - first.span.offset, WIDTH))],
            [(EXPERTS, (first.span.offset, WIDTH))],
        ]
        records = {one.id: one async for one in store.scan()}
        assert [records[span.stored.id].extras for span in chain] == [(EXPERTS,)] * 2

    asyncio.run(talk())


def test_a_store_that_cannot_be_read_is_a_reason() -> None:
    span = reply(context(None, 0, 2), 2, 3, "a")

    async def fetch(_: TokenSpan, names: Sequence[str]) -> None:
        assert list(names) == [TOP_P_IDS, TOP_P_OFFSETS]

    assert asyncio.run(per_token_fields(Extras(), fetch, flatten(span, 3), [TOP_P])) == (
        {TOP_P: None},
        [STORE_UNREACHABLE],
    )
