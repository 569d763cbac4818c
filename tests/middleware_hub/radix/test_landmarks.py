"""Landmarks change no answer: not where their node went, not for another tenant, not behind an edit."""

from __future__ import annotations

import pytest

from middleware_hub.radix import indexes
from middleware_hub.radix import match as tree_match
from middleware_hub.radix.indexes import Landmarks
from middleware_hub.radix.match import walk_down
from middleware_hub.radix.node import RadixNode
from tests.middleware_hub.radix.recount import recount
from tests.middleware_hub.radix.talk import NS, Talk, kept, long_chain
from tests.middleware_hub.toy import AB, SPACE, A, B, encode

OTHER = ("other", "", "")


@pytest.fixture(autouse=True)
def close(monkeypatch: pytest.MonkeyPatch) -> None:
    """A landmark every few turns."""
    monkeypatch.setattr(tree_match, "FAR", 4)
    monkeypatch.setattr(indexes, "BLOCK", 8)


def marks_of(talk: Talk) -> Landmarks:
    return talk.tree.marks


def steps_of(talk: Talk, text: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many nodes a match goes down."""
    steps = 0
    child = RadixNode.child

    def counting(node: RadixNode, character: str) -> RadixNode | None:
        nonlocal steps
        steps += 1
        return child(node, character)

    with monkeypatch.context() as patched:
        patched.setattr(RadixNode, "child", counting)
        walk_down(talk.tree.roots[NS], text, marks_of(talk))
    return steps


def test_a_long_conversation_is_not_walked_from_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    talk = Talk()
    text = long_chain(talk, 300)
    expected = kept(talk.match(text + " "))
    assert len(marks_of(talk)) == 1
    assert steps_of(talk, text + " a", monkeypatch) < 20
    assert steps_of(talk, text[:-1] + "<", monkeypatch) < 20, "it leaves the tree behind the landmark"
    assert kept(talk.match(text + " ")) == expected
    assert talk.match(text + " ").continues is talk.match(text + " b").continues


def test_a_text_that_was_edited_before_the_landmark_does_not_go_there() -> None:
    talk = Talk()
    text = long_chain(talk, 100)
    talk.match(text + " ")
    edited = text[:33] + "b" + text[34:]
    assert edited != text
    path = walk_down(talk.tree.roots[NS], edited, marks_of(talk))
    assert path.limit == 33
    assert talk.match(edited).cut.start <= 33


def test_a_landmark_is_of_one_namespace() -> None:
    talk = Talk()
    text = long_chain(talk, 100)
    talk.match(text + " ")
    talk.say(text[:20], [A, B], namespace=OTHER)
    assert talk.match(text + " ", namespace=OTHER).cut.start <= 22
    assert talk.match(text + " ").cut.start == len(text)


def test_a_landmark_whose_node_was_collected_is_forgotten() -> None:
    talk = Talk()
    text = long_chain(talk, 100)
    talk.match(text + " ")
    assert len(marks_of(talk)) == 1
    talk.collect(40)
    match = talk.match(text + " ")
    assert 0 < match.cut.tokens <= 40
    assert not [node for node, _ in marks_of(talk)._nodes.values() if node.parent is None], "it came up"
    talk.collect(0)
    assert talk.match(text).cut.span is None


def test_a_split_and_a_merge_leave_a_landmark_where_it_is() -> None:
    talk = Talk()
    text = long_chain(talk, 100)
    talk.match(text + " ")
    ((node, depth),) = marks_of(talk)._nodes.values()
    assert text[:depth].endswith(node.edge)
    fork = text[: depth - 1]
    forked = talk.say(fork, [SPACE, SPACE])
    recount(talk.tree)
    assert talk.match(text + " ").cut.start == len(text)
    talk.retrieve(forked)
    talk.collect(talk.tree.stats.tokens - 1)
    assert talk.alive(forked) == [False]
    assert talk.match(text + " ").cut.start == len(text)


def test_there_are_only_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexes, "MOST_LANDMARKS", 3)
    talk = Talk()
    text = long_chain(talk, 200)
    for size in range(100, len(text), 50):
        talk.match(text[:size] + "a")
    assert len(marks_of(talk)) <= 3
    assert talk.match(text + " ").cut.start == len(text)


def test_clearing_the_tree_forgets_them() -> None:
    talk = Talk()
    text = long_chain(talk, 100)
    talk.match(text + " ")
    talk.tree.clear()
    assert not len(marks_of(talk))
    assert talk.match(text).cut.span is None


def test_a_reply_is_recorded_where_its_match_ended_though_the_tree_has_changed() -> None:
    """Between a match and its reply other replies come and go: nodes are split, merged and removed."""
    talk = Talk()
    talk.say("ab ab ", [A, B, A, B])
    talk.say("ab ab ", [A, B, B])
    gone = talk.say("bbbb", [A])
    pending = [talk.match(text) for text in ("ab ab abaa", "ab ab ab", "ab ab a", "ab a", "bbab", "b", "ab ab ababa")]
    for match in pending:
        talk.tree.pin(match)
    talk.say("ab ab ", [A, A])
    split = talk.answer(pending[0], encode(pending[0].text[pending[0].cut.start :]), [AB])
    talk.tree.unpin(pending[0])
    recount(talk.tree)
    talk.tree.max_tokens = 0
    talk.tree.collect()
    assert talk.alive(split, gone) == [False, False]
    for match in pending[1:]:
        turn = talk.answer(match, encode(match.text[match.cut.start :]), [A, SPACE])
        recount(talk.tree)
        talk.tree.unpin(match)
        assert talk.tree.text_of(turn.generation) == match.text + "a "
