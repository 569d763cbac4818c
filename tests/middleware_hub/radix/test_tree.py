"""The tree by name: its size, namespaces, lookups and clearing, one sentence a test.

That it agrees with the rules on random histories is in `test_tree_oracle`; here are the cases a reader looks for.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from middleware_hub.radix.cut import Cut
from middleware_hub.radix.match import MOST_CANDIDATES, PrefixMatch, walk_down
from middleware_hub.radix.records import NO_PARENT, Context, Departure, Recall, SampledReply, TreeStats
from middleware_hub.radix.tree import RadixTree
from middleware_hub.spans.chain import pack_ids
from middleware_hub.tokenizer.alignment import align_reply
from middleware_hub.tokenizer.vocabulary import Vocabulary
from tests.conftest import examples
from tests.middleware_hub.radix.recount import recount
from tests.middleware_hub.radix.talk import NS, Talk, Turn, bushy, kept, long_chain, recalled
from tests.middleware_hub.toy import AB, BA, EOS, LT, SPACE, A, B, T, encode
from tests.support.usual import usual

# Depth and breadth -------------------------------------------------------------------------------------------------------

TURNS = 5_000


def test_a_conversation_of_thousands_of_turns_is_one_chain() -> None:
    """Nothing recurses: the interpreter's limit is a fraction of this depth."""
    assert sys.getrecursionlimit() < TURNS
    talk = Talk()
    text = long_chain(talk, TURNS)
    recount(talk.tree)
    assert talk.tree.stats.generations == TURNS
    match = talk.match(text + "ab")
    assert match.cut.tokens == 4 * TURNS
    assert kept(match) == [SPACE, A, B, EOS] * TURNS
    found = talk.tree.recall(NS, text)
    assert found is not None
    assert found.exact
    assert recalled(found) == [SPACE, A, B, EOS] * TURNS
    assert talk.tree.departure(NS, text + "?") == Departure(len(text), text[-10:], (), TURNS)
    ids = [SPACE, A, B, EOS] * TURNS + [A]
    assert talk.match_ids(ids).cut.tokens == 4 * TURNS


def test_a_deep_conversation_is_recorded_cut_and_collected_without_recursion() -> None:
    talk = Talk()
    text = long_chain(talk, TURNS)
    cut = text[: 3 * (TURNS // 2) - 1]  # one character short of the end of a reply
    match = talk.match(cut + " ")
    assert kept(match) == [SPACE, A, B, EOS] * (TURNS // 2 - 1) + [SPACE, A]
    turn = talk.say(cut + " ", [A, EOS])
    assert recalled(talk.tree.recall(NS, turn.text)) == turn.ids
    recount(talk.tree)
    talk.collect(4 * TURNS // 2)
    assert 0 < talk.tree.stats.tokens <= 4 * TURNS // 2
    talk.collect(0)
    assert talk.tree.stats.nodes == talk.tree.stats.generations == talk.tree.stats.spans == 0


@pytest.mark.slow
def test_a_deep_tree_is_cleared_link_by_link() -> None:
    """Freed by its end alone, a chain this long would overflow the stack of the interpreter."""
    talk = Talk()
    long_chain(talk, 20_000)
    talk.tree.clear()
    recount(talk.tree)
    assert talk.tree.stats == TreeStats()


@pytest.mark.parametrize("many", usual([10_000, 100_000], 10_000))
def test_many_siblings_under_one_prompt(many: int) -> None:
    """Each begins with a character of its own, so that one node has all of them as children."""
    vocabulary = Vocabulary({i: chr(0x10000 + i).encode() for i in range(many + 2)}, special=[])
    tree = RadixTree(vocabulary)
    prompt, other = chr(0x10000 + many), chr(0x10000 + many + 1)
    match = tree.match(NS, prompt)
    tree.pin(match)
    for i in range(many):
        reply = SampledReply(pack_ids([i, many]), chr(0x10000 + i) + prompt, "1", request_ids=(str(i),))
        tree.record(match, Context(pack_ids([many])), reply)
    tree.unpin(match)
    recount(tree)
    assert tree.stats.generations == many
    assert tree.stats.tokens == 2 * many + 1, "the prompt is there once"
    for i in (0, many // 2, many - 1):
        text = prompt + chr(0x10000 + i)
        assert kept(tree.match(NS, text + prompt + other)) == [many, i, many]
        assert kept(tree.match(NS, text + other)) == [many, i], "cut inside"
        assert recalled(tree.recall(NS, text + prompt, request_id=str(i))) == [many, i, many]
    assert kept(tree.match(NS, prompt)) == [many], "the prompt itself, as it was encoded"
    assert tree.match(NS, prompt + other).cut.span is None, "none of them shares a sampled token with this"
    assert len(tree.departure(NS, prompt + other).recorded_after) == 8
    tree.max_tokens = many
    while tree.collect(seconds=0.001):
        pass
    recount(tree)
    assert tree.stats.tokens <= many
    last = prompt + chr(0x10000 + many - 2) + prompt
    assert recalled(tree.recall(NS, last)) == [many, many - 2, many]


def test_of_many_siblings_only_some_are_looked_at_for_a_cut() -> None:
    talk = Talk()
    for i in range(4 * MOST_CANDIDATES):
        talk.say("b", [AB if i % 2 else A, *encode(format(i, "07b").replace("0", "a ").replace("1", "b "))], f"r{i}")
    walk = walk_down(talk.tree.roots[NS], "bab<")
    assert 0 < len(list(walk.candidates(None, 0))) <= 2 * MOST_CANDIDATES


# Reading writes nothing --------------------------------------------------------------------------------------------------


def everything(talk: Talk, turns: list[Turn]) -> object:
    tree = talk.tree
    hits = [(t.generation.tick, t.generation.stamp, t.generation.serial, t.generation.span.users) for t in turns]
    return copy.deepcopy(tree.stats), tree._ticks, tree.clock.now, tree.clock.known, hits


LOOKUP = st.text(alphabet="ab <et>", min_size=1, max_size=8)


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(LOOKUP, min_size=1, max_size=8))
def test_no_lookup_leaves_a_trace(lookups: list[str]) -> None:
    talk = Talk()
    turns = bushy(talk)
    texts = [turn.text for turn in turns] + [turn.text + "ab" for turn in turns] + lookups
    before = everything(talk, turns)
    answers = [(talk.match(text), talk.tree.departure(NS, text)) for text in texts]
    for text in texts:
        talk.tree.recall(NS, text)
        talk.tree.recall(NS, text, request_id="r2")
        talk.match(text, parent="r1")
        talk.match(text, parent=NO_PARENT)
        talk.match_ids(encode(text))
        talk.match(text, namespace=("nobody", "", ""))
    assert everything(talk, turns) == before
    assert [(talk.match(text), talk.tree.departure(NS, text)) for text in texts] == answers
    recount(talk.tree)


def test_a_namespace_that_was_only_asked_about_does_not_exist() -> None:
    talk = Talk()
    talk.match("a")
    talk.tree.recall(NS, "a")
    talk.tree.departure(NS, "a")
    talk.match_ids([A])
    assert talk.tree.stats == TreeStats()
    assert not talk.tree.roots


def test_where_nothing_is_recorded_a_text_is_not_compared_with_others() -> None:
    """Usually its namespace, or its key, is another one than that of the replies."""
    talk = Talk()
    talk.say("a", [B])
    spaces = NS, ("", "", "eval")
    here, elsewhere = (talk.tree.departure(one, "x").explained("x", stored=False)["message"] for one in spaces)
    assert here == "no recorded text begins like this one"
    assert elsewhere == "nothing is recorded for this key, x-radix-namespace and lora_path"


def test_a_retrieval_notes_that_the_whole_chain_was_retrieved_and_nothing_else() -> None:
    talk = Talk()
    first = talk.say("a", [B, EOS])
    second = talk.say(first.text + " ", [A, B])
    beside = talk.say(first.text + " ", [B])
    talk.retrieve(second)
    assert [turn.generation.retrieved for turn in (first, second, beside)] == [True, True, False]


def test_a_text_that_ends_inside_a_reply_has_not_retrieved_it() -> None:
    talk = Talk()
    turn = talk.say("a", [B, A, B])
    found = talk.tree.recall(NS, "aba")
    assert found is not None
    assert found.exact, "one chain covers it"
    assert recalled(found) == [A, B, A]
    assert not turn.generation.retrieved


def test_a_match_counts_as_a_hit_when_its_reply_is_recorded() -> None:
    talk = Talk()
    talk.say("a", [B])
    talk.match("ab ")
    assert (talk.tree.stats.hits, talk.tree.stats.misses) == (0, 1)
    talk.say("ab ", [B])
    assert (talk.tree.stats.hits, talk.tree.stats.misses) == (1, 1)


# Namespaces --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [("tenant", "", ""), ("", "lora", ""), ("", "", "evaluation")])
def test_namespaces_never_answer_for_each_other(other: tuple[str, ...]) -> None:
    talk = Talk()
    turn = talk.say("a", [B, EOS], "r1")
    assert talk.match("ab ", namespace=other) == PrefixMatch(other, "ab ")
    assert talk.tree.recall(other, "ab") == Recall(Cut(None, 0, 0), exact=False)
    assert talk.tree.recall(other, "ab", request_id="r1") is None
    assert talk.tree.departure(other, "ab") == Departure(0, "", (), 0)
    ids = pack_ids([*turn.ids, SPACE])
    assert talk.tree.match_ids(other, "ab<e> ", ids, lambda count: count).cut.span is None
    theirs = talk.say("a", [BA], "r2", namespace=other)
    assert theirs.sent == [A]
    assert talk.match("aba").continues is turn.generation
    assert talk.match("aba", namespace=other).continues is theirs.generation
    assert talk.match("aba", parent="r1", namespace=other).unknown_parent
    found = talk.tree.recall(other, "aba")
    assert found is not None
    assert found.request_ids == ("r2",)
    recount(talk.tree)


def test_namespaces_share_one_budget_and_an_empty_one_is_gone() -> None:
    talk = Talk()
    other = ("", "", "evaluation")
    theirs = talk.say("a", [B, EOS], "r1", namespace=other)
    mine = talk.say("a", [B, EOS], "r1")
    talk.collect(3)
    assert talk.alive(theirs, mine) == [False, True]
    assert list(talk.tree.roots) == [NS]
    talk.say("a", [B], "r2", namespace=other)
    assert talk.match("ab ", namespace=other).continues is not None


# Clearing, and where a text leaves ---------------------------------------------------------------------------------------


def test_a_cleared_tree_has_forgotten_everything_and_can_be_used_again() -> None:
    talk = Talk()
    turns = bushy(talk)
    talk.collect(talk.tree.stats.tokens - 1)
    evicted, tokens = dict(talk.tree.stats.evicted), talk.tree.stats.evicted_tokens
    talk.tree.clear()
    recount(talk.tree)
    assert talk.tree.stats == TreeStats(evicted=talk.tree.stats.evicted, evicted_tokens=tokens)
    assert talk.tree.stats.evicted == evicted, "what was counted stays counted"
    for turn in turns:
        assert talk.match(turn.text + "a").cut.span is None
        assert talk.match_ids([*turn.ids, A]).cut.span is None
    talk.collect(0)
    again = talk.say("a", [B], "r1")
    assert talk.match("ab ").continues is again.generation
    talk.collect(0)


def test_a_departure_tells_where_a_text_leaves_and_what_is_recorded_there() -> None:
    talk = Talk()
    talk.say("ab ab", [A, B, A], "r1")
    talk.say("ab ab", [A, B, B], "r2")
    assert talk.tree.departure(NS, "ab ababt") == Departure(7, "ab abab", ("a", "b"), 0)
    assert talk.tree.departure(NS, "ab abt") == Departure(5, "ab ab", ("abb",), 0), "of each way the newest"
    assert talk.tree.departure(NS, "ab t") == Departure(3, "ab ", ("ababb",), 0)
    assert talk.tree.departure(NS, "t") == Departure(0, "", ("ab ababb",), 0)
    assert talk.tree.departure(NS, "ab aba") == Departure(6, "ab aba", ("bb",), 0), "it need not leave"


def test_a_departure_counts_the_replies_on_its_way() -> None:
    talk = Talk()
    first = talk.say("a", [B])
    second = talk.say(first.text + " ", [A, B])
    assert talk.tree.departure(NS, second.text + "t").replies == 2
    assert talk.tree.departure(NS, second.text[:-1] + "t").replies == 1
    assert talk.tree.departure(NS, "at").replies == 0


def test_a_departure_shows_as_much_as_it_is_asked_for() -> None:
    talk = Talk()
    talk.say("ab ab", [A, A, A, A])
    found = talk.tree.departure(NS, "ab t", context=2)
    assert (found.recorded_before, found.recorded_after) == ("b ", ("ab",))


def test_a_tree_says_what_is_in_it() -> None:
    talk = Talk()
    assert repr(talk.tree) == "<RadixTree 0 generations, 0 tokens, 0 nodes>"
    talk.say("a", [B, EOS], "r1")
    assert repr(talk.tree) == "<RadixTree 1 generations, 3 tokens, 2 nodes>"
    assert talk.tree.estimated_bytes > talk.tree.stats.payload


def test_an_unknown_parent_is_known_to_be_unknown_where_nothing_is_remembered() -> None:
    """After a restart, or when all of it was collected."""
    talk = Talk()
    assert talk.match("a", parent="gone").unknown_parent
    assert talk.match_ids([A], parent="gone").unknown_parent
    assert not talk.match("a", parent=NO_PARENT).unknown_parent


def test_a_half_shown_special_token_is_kept_only_if_the_text_spells_all_of_it() -> None:
    """Specials were not skipped, and a stop string began inside one."""
    talk = Talk()
    over = align_reply(talk.vocabulary, [A, EOS], "a<", skips_special=False, matched="e>")
    reply = SampledReply(pack_ids([A, EOS]), "a<", "1", None, over.visible, over.flags, over.ends, over.tail, ("r",))
    talk.tree.record(talk.match("t"), Context(pack_ids([T])), reply)
    assert talk.sent("ta<e>b") == [T, A, EOS, B]
    assert talk.sent("ta<b") == [T, A, LT, B]
    assert talk.match("ta<b").reasons == ("cut_in_token",)


def texts_of(talk: Talk) -> Iterator[str]:
    stack = [(root, "") for root in talk.tree.roots.values()]
    while stack:
        node, text = stack.pop()
        yield text
        stack += [(child, text + child.edge) for child in node.each_child()]


def test_a_node_stands_for_a_text_at_which_something_ends_or_runs_apart() -> None:
    talk = Talk()
    talk.say("a", [B, A])
    talk.say("a", [B, B])
    assert sorted(texts_of(talk)) == ["", "a", "ab", "aba", "abb"]
