"""What is collected, in which order, and what a collection leaves behind."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from middleware_hub.radix.match import PrefixMatch
from middleware_hub.radix.node import Generation, StoredSpan
from middleware_hub.spans.chain import links
from middleware_hub.spans.trajectory import flatten
from tests.conftest import examples
from tests.middleware_hub.radix.recount import recount
from tests.middleware_hub.radix.talk import NS, Talk, Turn, bushy, kept, recalled
from tests.middleware_hub.toy import AB, BA, EOS, NOTHING, SPACE, SPACE_A, A, B, encode

# Collection --------------------------------------------------------------------------------------------------------------


def test_nothing_is_collected_below_the_budget() -> None:
    talk = Talk(max_tokens=3)
    turn = talk.say("a", [B, EOS])
    assert talk.tree.stats.tokens == 3
    assert not talk.tree.over_budget
    assert talk.tree.collect() is False
    assert talk.alive(turn) == [True]
    talk.say("b", [EOS])
    assert talk.tree.over_budget


def test_without_a_budget_nothing_is_ever_collected() -> None:
    talk = Talk()
    bushy(talk)
    assert not talk.tree.over_budget
    assert talk.tree.collect() is False
    assert not talk.tree.stats.evicted


def test_the_least_recently_hit_leaf_goes_first() -> None:
    talk = Talk()
    first, second, third = (talk.say(text, [B, EOS]) for text in ("a", "b", " "))
    later = talk.say(first.text + "a", [B])
    talk.retrieve(first, second, third, later)
    talk.collect(talk.tree.stats.tokens - 1)
    assert talk.alive(first, second, third, later) == [True, False, True, True]
    talk.collect(talk.tree.stats.tokens - 1)
    assert talk.alive(first, second, third, later) == [True, False, False, True]
    assert talk.tree.stats.evicted == {"least_recently_hit": 2}


def test_a_lookup_is_no_hit() -> None:
    talk = Talk()
    first, second = (talk.say(text, [B, EOS]) for text in ("a", "b"))
    talk.retrieve(second, first, first)
    talk.match(first.text + " ")
    talk.collect(talk.tree.stats.tokens - 1)
    assert talk.alive(first, second) == [False, True]


def test_a_fresh_leaf_keeps_its_whole_context() -> None:
    """However old the turns above it are."""
    talk = Talk(keep_versions=2)
    first = talk.say("a", [B, EOS], version="1")
    between = talk.say("b", [A, EOS], version="5")
    last = talk.say(first.text + " ", [A, B], version="9")
    talk.retrieve(first, between, last)
    whole = last.ids
    talk.collect(len(whole))
    assert talk.alive(first, between, last) == [True, False, True]
    assert recalled(talk.tree.recall(NS, last.text)) == whole
    assert talk.tree.stats.evicted == {"version": 1}


@pytest.mark.parametrize("retrieved", [False, True])
def test_what_was_collected_is_not_kept_in_memory(retrieved: bool) -> None:
    """Also where every reply is retrieved before it goes, so that none is ever taken from among the others."""
    talk = Talk()
    talk.tree.max_tokens = 200
    turns = []
    for number in range(2000):
        turns.append(talk.say(f"{number:011b} ".translate({48: "a", 49: "b"}), [B, A, EOS]))
        if retrieved:
            talk.retrieve(turns[-1])
        talk.tree.collect()
    gone = [turn for turn in turns if talk.alive(turn) == [False]]
    assert len(gone) > 1900
    held = [turn for turn in gone if sys.getrefcount(turn.generation) > 2]  # its turn's, and the one that asks
    assert len(held) < 100


def test_leaves_go_before_what_they_build_on() -> None:
    talk = Talk()
    turns = [talk.say("a", [B, EOS])]
    for _ in range(4):
        turns.append(talk.say(turns[-1].text + " ", [A, EOS]))
    talk.retrieve(turns[-1])
    for left in range(4, -1, -1):
        talk.collect(talk.tree.stats.tokens - 1)
        assert talk.alive(*turns) == [number < left for number in range(5)]
    assert talk.tree.stats.nodes == 0


def test_a_reply_that_is_cut_inside_stays_as_long_as_a_fork_builds_on_it() -> None:
    talk = Talk()
    turn = talk.say("a", [B, A, B, EOS])
    fork = talk.say("ab ", [B])
    assert fork.sent == [A, B, SPACE]
    talk.retrieve(turn)
    talk.collect(talk.tree.stats.tokens - 1)
    assert talk.alive(turn, fork) == [True, False], "the reply was retrieved and the fork was not, yet leaves go first"
    talk.collect(0)
    assert talk.tree.stats.spans == 0


def test_replies_that_nobody_retrieved_go_last_and_are_counted() -> None:
    talk = Talk()
    lost, first, second = (talk.say(text, [B, EOS]) for text in ("a", "b", " "))
    talk.retrieve(first, second)
    talk.collect(3)
    assert talk.alive(lost, first, second) == [True, False, False]
    assert talk.tree.stats.evicted["never_retrieved"] == 0
    talk.collect(0)
    assert talk.alive(lost) == [False]
    assert talk.tree.stats.evicted == {"least_recently_hit": 3, "never_retrieved": 1}
    assert talk.tree.stats.evicted_tokens == 9


def test_what_nobody_retrieved_for_long_goes_first_if_so_it_shall() -> None:
    talk = Talk()
    talk.tree.unretrieved_versions = 2
    left = talk.say("a", [B, EOS], version="1")
    fresh = talk.say("b", [B, EOS], version="2")
    retrieved = talk.say(" ", [B, EOS], version="3")
    talk.retrieve(retrieved)
    talk.collect(6)
    assert talk.alive(left, fresh, retrieved) == [False, True, True]
    talk.collect(3)
    assert talk.alive(left, fresh, retrieved) == [False, True, False], "of last version's it may still be asked for"
    assert talk.tree.stats.evicted["abandoned"] == 1
    talk.collect(0)
    assert (talk.tree.stats.evicted["abandoned"], talk.tree.stats.evicted["never_retrieved"]) == (1, 1)


def test_what_was_left_behind_goes_first_also_while_one_worker_has_older_weights() -> None:
    """Its replies in a row make the version fall, and the next reply of another worker makes it rise again."""
    talk = Talk()
    talk.tree.unretrieved_versions = 3
    left = talk.say("a", [B, EOS], version="1")
    live = [talk.say("b", [B, EOS], version=version) for version in "54445444"]
    talk.retrieve(*live)
    talk.collect(talk.tree.stats.tokens - 1)
    assert talk.alive(left, *live) == [False, *[True] * len(live)]


def test_a_reply_goes_with_the_others_once_it_is_retrieved() -> None:
    talk = Talk()
    first, second, third = (talk.say(text, [B, EOS]) for text in ("a", "b", " "))
    talk.retrieve(second)
    talk.retrieve(first)
    talk.collect(3)
    assert talk.alive(first, second, third) == [False, False, True]


def test_versions_say_whether_a_leaf_was_stale() -> None:
    """`default` is older than any integer, and integers compare as integers."""
    talk = Talk(keep_versions=3)
    versions = ["default", "0", "2", "9", "10"]
    turns = [talk.say(text, [B, EOS], version=v) for text, v in zip("ab <e", versions, strict=True)]
    talk.retrieve(*turns)
    seen = []
    for _ in turns:
        talk.collect(talk.tree.stats.tokens - 1)
        seen.append((talk.tree.stats.evicted["version"], talk.tree.stats.evicted["least_recently_hit"]))
    assert seen == [(1, 0), (2, 0), (3, 0), (3, 1), (3, 2)]


@pytest.mark.parametrize(("newest", "reason"), [("0", "least_recently_hit"), ("1", "version")])
def test_default_is_one_version_before_the_first_integer(newest: str, reason: str) -> None:
    talk = Talk(keep_versions=2)
    old = talk.say("a", [B], version="default")
    talk.say("b", [B], version=newest)
    talk.retrieve(old)
    talk.collect(2)
    assert talk.alive(old) == [False]
    assert talk.tree.stats.evicted == {reason: 1}


def test_strings_are_versions_in_the_order_of_their_appearance() -> None:
    talk = Talk(keep_versions=2)
    turns = [
        talk.say(text, [B], version=v) for text, v in zip("ab <", ["zebra", "ant", "step-b", "step-a"], strict=True)
    ]
    talk.retrieve(*turns)
    talk.collect(0)
    assert talk.tree.stats.evicted == {"version": 2, "least_recently_hit": 2}


def test_a_reply_of_two_versions_counts_as_hit_under_the_last() -> None:
    talk = Talk(keep_versions=2)
    mixed = talk.say("a", [B, A, B], version=(("1", 2), ("3", 3)))
    assert talk.tree.clock.current == "3"
    talk.say("b", [B], version="4")
    talk.retrieve(mixed)
    talk.collect(2)
    assert talk.alive(mixed) == [False]
    assert talk.tree.stats.evicted == {"least_recently_hit": 1}


def test_what_was_hit_below_was_hit_above() -> None:
    """A reply inherits the last hit of what built on it: it is not stale for having been sampled long ago."""
    talk = Talk(keep_versions=5)
    first = talk.say("a", [B, EOS], version="1")
    later = talk.say(first.text + " ", [A], version="9")
    talk.retrieve(later)
    talk.collect(3)
    assert talk.alive(first, later) == [True, False]
    assert first.generation.stamp == later.generation.stamp
    assert first.generation.tick == later.generation.tick
    assert flatten(first.generation.span, 2).weight_versions == (("1", 1, 3),), "the tokens' own version stays"
    talk.collect(0)
    assert talk.tree.stats.evicted == {"least_recently_hit": 2}


def test_a_version_that_falls_back_makes_all_before_it_as_new_as_itself() -> None:
    """Else what a run left behind that was resumed from an older checkpoint would outlive everything."""
    talk = Talk(keep_versions=5)
    before = [talk.say(text, [B, EOS], version="100") for text in ("a", "b")]
    for text in ("<", "e", "t"):
        talk.say(text, [B], version="7")
    assert talk.tree.clock.current == "7"
    talk.retrieve(*before)
    talk.collect(talk.tree.stats.tokens - 1)
    assert talk.tree.stats.evicted == {"least_recently_hit": 1}, "hit at the fall, so not stale yet"
    talk.say(" ", [B], version="12")
    talk.collect(talk.tree.stats.tokens - 1)
    assert talk.alive(*before) == [False, False]
    assert talk.tree.stats.evicted == {"least_recently_hit": 1, "version": 1}


def test_the_chain_of_a_request_in_flight_is_never_collected() -> None:
    talk = Talk()
    first = talk.say("a", [B, EOS], "r1")
    beside = talk.say("b", [B, EOS], "r2")
    match = talk.match(first.text + " ")
    talk.tree.pin(match)
    talk.collect(0)
    assert talk.alive(first, beside) == [True, False]
    assert talk.tree.over_budget, "nothing that may go is left"
    later = talk.answer(match, [SPACE], [A])
    assert later.ids == [*first.ids, SPACE, A]
    talk.tree.unpin(match)
    recount(talk.tree)
    talk.collect(0)
    assert talk.tree.stats.tokens == 0


def test_a_pinned_prompt_outlives_the_replies_to_it() -> None:
    talk = Talk()
    turn = talk.say("ab ", [B])
    match = talk.match("ab ")
    assert match.known is not None
    talk.tree.pin(match)
    talk.collect(0)
    assert talk.alive(turn) == [False]
    assert kept(match) == encode("ab ")
    again = talk.answer(match, [], [A], "r2")
    recount(talk.tree)
    assert again.ids == [*encode("ab "), A]
    talk.tree.unpin(match)
    talk.collect(0)
    assert talk.tree.stats.spans == talk.tree.stats.nodes == talk.tree.stats.tokens == 0


def test_a_leaf_is_offered_again_when_it_is_unpinned() -> None:
    talk = Talk()
    turn = talk.say("a", [B])
    match = talk.match("ab ")
    talk.tree.pin(match)
    talk.tree.pin(match)
    talk.collect(0)
    talk.tree.unpin(match)
    talk.collect(0)
    assert talk.alive(turn) == [True], "pinned twice"
    talk.tree.unpin(match)
    talk.collect(0)
    assert talk.alive(turn) == [False]


def test_a_lone_child_is_merged_again() -> None:
    talk = Talk()
    first = talk.say(" ", [A, B, A])
    assert talk.tree.stats.nodes == 2
    second = talk.say(" ", [A, B, B])
    assert talk.tree.stats.nodes == 4, "the prompt, what both have, and what each of them has"
    talk.retrieve(first)
    talk.collect(4)
    assert talk.alive(first, second) == [False, True]
    assert talk.tree.stats.nodes == 2
    assert second.generation.node.edge == "abb"
    assert recalled(talk.tree.recall(NS, second.text)) == second.ids


def test_a_split_touches_no_span_and_no_node_that_was_there() -> None:
    talk = Talk()
    first = talk.say(" ", [A, BA, B, EOS])
    before = [(span, take, span.ids) for span, take in links(first.generation.span, 4)]
    node = first.generation.node
    talk.say(" ", [AB, SPACE])  # runs apart in the middle of a token
    assert first.generation.node is node
    assert node.edge == "ab"
    assert [(span, take, span.ids) for span, take in links(first.generation.span, 4)] == before
    recount(talk.tree)


def test_collection_works_in_steps_and_ends() -> None:
    talk = Talk()
    for number in range(40):
        talk.say(" ", encode(format(number, "06b").replace("0", "a").replace("1", "b")))
    talk.tree.max_tokens = 50
    steps, before = 1, talk.tree.stats.tokens
    while talk.tree.collect(seconds=0):
        recount(talk.tree)
        assert talk.tree.stats.tokens < before, "every step gets on, however little time it has"
        before, steps = talk.tree.stats.tokens, steps + 1
    assert steps > 10
    assert talk.tree.stats.tokens <= 50
    assert talk.tree.collect(seconds=0) is False


def test_collection_ends_when_all_that_is_left_is_pinned() -> None:
    talk = Talk(max_tokens=0)
    matches = []
    for text in ("a", "b", " "):
        turn = talk.say(text, [B, EOS])
        matches.append(talk.match(turn.text + " "))
        talk.tree.pin(matches[-1])
    assert talk.tree.collect(seconds=0) is False
    assert talk.tree.over_budget
    for match in matches:
        talk.tree.unpin(match)
    assert talk.tree.collect(seconds=0) is True
    assert talk.tree.collect() is False
    assert not talk.tree.over_budget


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["new", "next", "cut", "ids", "retrieve", "pin", "unpin", "collect"]),
        st.integers(0, 30),
        st.lists(st.sampled_from([A, B, AB, BA, SPACE_A, EOS, NOTHING]), min_size=1, max_size=4),
    ),
    min_size=5,
    max_size=40,
)


@settings(max_examples=examples(150), deadline=None)
@given(STEPS)
def test_everything_is_in_order_after_every_collection(steps: list[tuple[str, int, list[int]]]) -> None:
    """With requests in flight, retrievals and versions in between; and when all is given back nothing is left."""
    talk, turns, pinned = Talk(keep_versions=2), list[Turn](), list[PrefixMatch]()
    for kind, number, sampled in steps:
        turn = turns[number % len(turns)] if turns else None
        if kind == "new" or turn is None:
            turns.append(talk.say("ab a"[number % 4 :], sampled, version=str(len(turns) // 3)))
        elif kind in ("next", "cut"):
            text = turn.text + "b" if kind == "next" else turn.text[:-1] + " "
            turns.append(talk.say(text, sampled, version=str(len(turns) // 3)))
        elif kind == "ids":
            turns.append(talk.say_ids([*turn.ids[: len(turn.ids) - number % 3], A], sampled))
        elif kind == "retrieve":
            talk.tree.recall(NS, turn.text)
        elif kind == "pin":
            pinned.append(talk.match(turn.text + "a"))
            talk.tree.pin(pinned[-1])
        elif kind == "unpin" and pinned:
            talk.tree.unpin(pinned.pop(number % len(pinned)))
        elif kind == "collect":
            ids = [kept(match) for match in pinned]
            talk.collect(talk.tree.stats.tokens * (number % 3) // 3)
            assert [kept(match) for match in pinned] == ids
            for match in pinned:
                for span, _ in links(match.cut.span, match.cut.take):
                    assert not isinstance(span.owner, Generation) or span.owner.span is span
        recount(talk.tree)
    for match in pinned:
        talk.tree.unpin(match)
    talk.collect(0)
    evicted = talk.tree.stats
    assert (evicted.nodes, evicted.generations, evicted.spans, evicted.tokens) == (0, 0, 0, 0)
    assert (evicted.characters, evicted.payload) == (0, 0)
    assert evicted.evicted["version"] + evicted.evicted["least_recently_hit"] == len(turns)
    assert not talk.tree.roots


def test_what_was_collected_is_encoded_again() -> None:
    talk = Talk()
    turn = talk.say("a", [BA, EOS])
    talk.collect(0)
    assert talk.match("aba ") == PrefixMatch(NS, "aba ")
    assert talk.sent("aba ") == encode("aba ")
    assert talk.match_ids([*turn.ids, A]).cut.span is None
    found = talk.tree.recall(NS, turn.text)
    assert found is not None
    assert not found.exact


# What a store has --------------------------------------------------------------------------------------------------------


def restored(*turns: Turn, retrieved: bool = False) -> Talk:
    """Return another talk that has these turns from a store. Their spans belong to it from now on."""
    other = Talk()
    for number, turn in enumerate(turns):
        one = turn.generation
        line = None if one.continues is None else one.continues.span
        prompt = one.span.parent
        if prompt is not None and not prompt.sampled:
            other.tree.restore(
                StoredSpan(prompt, b"p%d" % number, NS, turn.prompt, None, line, (), one.serial, "1", False)
            )
        other.tree.restore(
            StoredSpan(one.span, b"r%d" % number, NS, turn.text, None, line, one.tail, one.serial, "1", retrieved)
        )
    return other


def test_what_comes_from_a_store_goes_on_as_if_it_had_been_recorded_here() -> None:
    talk = Talk()
    first = talk.say("a", [B, EOS], "r1")
    second = talk.say(first.text + " ", [B, A, EOS], "r2")
    later = [second.text + more for more in ("b", "<e>b", "<e>")] + [first.text + "<e>a", second.text[:-1] + "b"]
    expected = [talk.sent(text) for text in later]
    other = restored(first, second)
    recount(other.tree)
    found = [other.tree.reply(NS, name) for name in ("r1", "r2")]
    assert found[0] is not None
    assert found[1] is not None
    assert found[1].continues is found[0]
    assert [other.sent(text) for text in later] == expected


@pytest.mark.parametrize("retrieved", [False, True])
def test_what_comes_from_a_store_counts_as_retrieved_if_it_was(retrieved: bool) -> None:
    talk = Talk()
    other = restored(talk.say("a", [B, EOS], "r1"), retrieved=retrieved)
    other.collect(0)
    assert other.tree.stats.evicted["never_retrieved"] == (not retrieved)
