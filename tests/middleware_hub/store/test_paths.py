"""Hashes of prefixes: what they depend on, that they grow, and where replies are entered."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from middleware_hub.spans.chain import SpanFlag
from middleware_hub.store.paths import BLOCK, END, END_ALONE, GROUP, NAME, PASS, START, STEP, WAY, TextPath, name_place
from middleware_hub.store.records import places_of
from tests.middleware_hub.store.world import NS, World

texts = st.builds(
    lambda part, times, end: part * times + end,
    st.text(min_size=1, max_size=5),
    st.integers(0, GROUP * BLOCK // 2),
    st.text(max_size=9),
)


def keys(path: TextPath) -> list[bytes]:
    return [path.key(block) for block in range(path.first, path.last + 1)]


@given(texts, texts)
def test_a_text_that_grows_is_not_hashed_again(text: str, more: str) -> None:
    path, whole = TextPath(NS, text), TextPath(NS, text + more)
    grown = path.longer(text + more)
    assert keys(grown) == keys(whole)
    assert keys(whole)[: path.last + 1] == keys(path)
    assert grown.hash(len(text + more)) == whole.hash(len(text + more))
    late = TextPath(NS, text + more, path.state(len(text)))
    assert late.first == len(text) // BLOCK // STEP * STEP
    assert keys(late) == keys(whole)[late.first :]
    assert late.hash(len(text + more)) == whole.hash(len(text + more))
    assert late.state(len(text + more)) == whole.state(len(text + more))
    again = TextPath(NS, text, path.state(0)).longer(text + more)
    assert keys(again) == keys(whole)


@given(texts, texts, texts)
def test_the_end_of_a_text_goes_on_without_it(text: str, more: str, last: str) -> None:
    whole = TextPath(NS, text + more + last)
    end = TextPath(NS, text).end().longer(more).longer(last)
    assert end == whole.end()
    assert end.place() == whole.place(len(whole.text), END)[:3]
    assert end.place() == (whole.key(whole.last), len(whole.text), whole.hash(len(whole.text)))


@given(texts, st.data())
def test_a_hash_is_that_of_the_prefix(text: str, data: st.DataObject) -> None:
    length = data.draw(st.integers(0, len(text)))
    path = TextPath(NS, text)
    assert path.hash(length) == TextPath(NS, text[:length]).hash(length)


@pytest.mark.parametrize("length", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, GROUP * BLOCK, GROUP * BLOCK + 1])
def test_one_character_changes_all_behind_it(length: int) -> None:
    one, other = TextPath(NS, "x" * length + "a" + "y" * BLOCK), TextPath(NS, "x" * length + "b" + "y" * BLOCK)
    same = length // BLOCK
    assert keys(one)[: same + 1] == keys(other)[: same + 1]
    assert not set(keys(one)[same + 1 :]) & set(keys(other)[same + 1 :])
    assert one.hash(length + 1) != other.hash(length + 1)


def test_namespaces_share_nothing() -> None:
    """Also not where the parts of one, joined, are those of another."""
    spaces = [("", "", ""), ("a", "", ""), ("", "a", ""), ("a", "b", ""), ("ab", "", ""), ("a",), ("", "", "a")]
    paths = [TextPath(space, "x" * 5_000) for space in spaces]
    every = [key for path in paths for key in keys(path)] + [path.hash(10) for path in paths]
    assert len(set(every)) == len(every)
    assert len({name_place(space, "name") for space in spaces}) == len(spaces)


def test_half_a_surrogate_pair_has_a_hash() -> None:
    """It cannot be stored, but asking for it is no fault."""
    assert TextPath(NS, "\ud800" * 600).hash(599) != TextPath(NS, "\ud801" * 600).hash(599)


def test_where_records_are_entered() -> None:
    turn = World().turn(None, "u" * 2_500, "r" * 3_000, names=("rid",))
    assert turn.context is not None
    path = turn.path
    assert (BLOCK, STEP) == (256, 4)
    assert places_of(turn.reply, path) == [
        (path.key(9), 2_500, path.hash(2_500), START),
        (path.key(21), 5_500, path.hash(5_500), END),
        (path.key(12), 0, b"", PASS),
        (path.key(16), 0, b"", PASS),
        (path.key(20), 0, b"", PASS),
        name_place(NS, "rid"),
    ]
    assert name_place(NS, "rid").kind == NAME
    assert places_of(turn.context, path) == [(path.key(4), 0, b"", WAY), (path.key(8), 0, b"", WAY)]
    late = TextPath(NS, turn.text, path.state(2_500))
    assert places_of(turn.reply, late) == places_of(turn.reply, path)
    with pytest.raises(ValueError, match="from block 8 on"):
        places_of(turn.context, late)


def test_a_reply_behind_a_text_of_nobody_is_entered_there_too() -> None:
    """A prompt that goes on inside a reply has text of its own before the reply, but no context."""
    world = World()
    first = world.turn(None, "u", "r" * 3_000)
    second = world.turn(first, "", "other" * 400, inside=2_000, own_context=False)
    kinds = {(place.key, place.kind) for place in places_of(second.reply, second.path) if not place.length}
    path = second.path
    assert kinds == {(path.key(4), WAY), (path.key(8), PASS), (path.key(12), PASS)}


@pytest.mark.parametrize(("reply", "flags"), [("", SpanFlag.NONE), ("r", SpanFlag.MISMATCH)])
def test_what_is_not_continued_ends_alone(reply: str, flags: int) -> None:
    turn = World().turn(None, "u", reply, flags=flags)
    assert [place.kind for place in places_of(turn.reply, turn.path)] == [START, END_ALONE]
