"""The fewest chains that hold listed replies whole, against a search through all choices of chains."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from middleware_hub.radix.node import Generation
from middleware_hub.retrieval.retrieval import replies_to_add, trajectory
from middleware_hub.spans.chain import TokenSpan, links
from middleware_hub.spans.trajectory import SharedMask, flatten
from tests.middleware_hub.radix.talk import NS, Talk
from tests.middleware_hub.toy import AB, BA, EOS, SPACE, A, B

DOCUMENT = Path(__file__).parents[3] / "docs" / "http-api" / "retrieve.md"
REPLIES = ([A, EOS], [B, EOS], [AB, SPACE, BA], [A, A, B], [BA, EOS])


@st.composite
def forests(draw: st.DrawFn) -> tuple[Talk, list[Generation]]:
    """Replies behind replies, whole or cut by what the next text keeps of them."""
    talk = Talk()
    texts, made = ["a ", "b "], []
    for number in range(draw(st.integers(2, 9))):
        text = draw(st.sampled_from(texts))
        turn = talk.say(text, draw(st.sampled_from(REPLIES)), f"r{number}")
        made.append(turn.generation)
        kept = len(turn.text) - draw(st.integers(0, len(turn.reply)))
        texts.append(turn.text[:kept] + draw(st.sampled_from(["", " ", " a", "b"])) or "a")
    return talk, made


def whole_in(generation: Generation) -> set[TokenSpan]:
    """The replies that a chain holds whole."""
    span = generation.span
    return {part for part, take in links(span, len(span)) if part.sampled and take == len(part)}


@given(forests(), st.data())
def test_the_chains_are_the_fewest(found: tuple[Talk, list[Generation]], data: st.DataObject) -> None:
    talk, made = found
    first = data.draw(st.sampled_from(made), label="first")
    listed = data.draw(st.lists(st.sampled_from(range(len(made))), unique=True), label="listed")
    flat = flatten(first.span, len(first.span))
    chosen = replies_to_add(talk.tree, NS, flat, [f"r{number}" for number in listed])
    wanted = {made[number].span for number in listed} - whole_in(first)
    assert wanted <= set().union(*map(whole_in, chosen))
    assert [one.serial for one in chosen] == sorted(one.serial for one in chosen)
    for size in range(len(chosen)):
        for fewer in combinations(made, size):
            assert not wanted <= set().union(*map(whole_in, fewer)), "fewer would do"


@given(forests(), st.data())
def test_no_token_is_trained_twice_and_each_listed_reply_whole(
    found: tuple[Talk, list[Generation]], data: st.DataObject
) -> None:
    talk, made = found
    first = data.draw(st.sampled_from(made), label="first")
    cut = data.draw(st.integers(1, len(first.span)), label="cut")
    listed = data.draw(st.lists(st.sampled_from(range(len(made))), unique=True), label="listed")
    sequences = [flatten(first.span, cut)]
    others = replies_to_add(talk.tree, NS, sequences[0], [f"r{number}" for number in listed])
    masks = SharedMask(sequences[0], [one.span for one in others])
    sequences += [flatten(one.span, len(one.span)) for one in others]
    trained: list[tuple[int, int]] = []
    for number, flat in enumerate(sequences):
        masks.apply(number, flat)
        for turn in flat.turns:
            ones = [at for at in range(turn.start, turn.end) if flat.loss_mask[at]]
            assert ones in ([], [*range(turn.start, turn.end)]), "a reply is trained as a whole, or not at all"
            trained += [(id(turn.span), at) for at in ones]
    assert len(trained) == len(set(trained))
    for number in listed:
        span = made[number].span
        assert {(id(span), span.offset + at) for at in range(len(span))} <= set(trained)


def test_every_field_of_an_answer_is_in_the_document() -> None:
    talk = Talk()
    turn = talk.say("ab", [A, EOS], "r1")
    table = DOCUMENT.read_text().partition("| field | meaning |")[2].partition("\n\n")[0]
    documented = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split(" | ")[0])}
    asked = {"stale_tokens", "missing_tokens", "missed_request_ids", "routed_experts", "indexer_topk", "top_p"}
    asked.add("multi_modal_data")  # with images
    answered = trajectory(talk.tree, turn.generation, turn.text).keys() | asked
    assert answered == documented, "the table of the answer in docs/http-api/retrieve.md"
