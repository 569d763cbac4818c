"""The tree by name: what it promises of parents, variants, namespaces, collection and size, one sentence a test.

That it agrees with the rules on random histories is in `test_radix_tree_oracle`; here are the cases a reader looks for.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from middleware_hub.radix.cut import Cut
from middleware_hub.radix.match import MOST_CANDIDATES, PrefixMatch, walk_down
from middleware_hub.radix.node import Generation
from middleware_hub.radix.records import Context, Departure, Recall, SampledReply, TreeStats
from middleware_hub.radix.tree import NO_PARENT, RadixTree
from middleware_hub.spans.chain import SpanFlag, Versions, chain_ids, links, pack_ids, pack_logprobs, unpack_ids
from middleware_hub.spans.trajectory import flatten
from middleware_hub.tokenizer.alignment import align_context, align_reply
from middleware_hub.tokenizer.vocabulary import Vocabulary
from tests.middleware_hub.toy import AB, BA, EOS, EOT, LT, NOTHING, SPACE, SPACE_A, A, B, T, encode, toy_vocabulary

NS = ("", "", "")


@dataclass(frozen=True)
class Turn:
    """A request and its reply."""

    prompt: str
    generation: Generation
    reply: str

    @property
    def text(self) -> str:
        return self.prompt + self.reply

    @property
    def ids(self) -> list[int]:
        span = self.generation.span
        return unpack_ids(chain_ids(span, len(span)))

    @property
    def sent(self) -> list[int]:
        """What the worker got."""
        return self.ids[: self.generation.span.offset]


class Talk:
    """Plays requests against a tree as the middleware does, without any I/O."""

    def __init__(self, *, max_tokens: int | None = None, keep_versions: int = 5) -> None:
        self.vocabulary = toy_vocabulary()
        self.tree = RadixTree(self.vocabulary, max_tokens=max_tokens, keep_versions=keep_versions)

    def match(self, text: str, *, parent: str | None = None, namespace: tuple[str, ...] = NS) -> PrefixMatch:
        return self.tree.match(namespace, text, parent=parent)

    def match_ids(self, ids: list[int], *, parent: str | None = None) -> PrefixMatch:
        def width(count: int) -> int:
            return len(self.vocabulary.spell(ids[:count]))

        return self.tree.match_ids(NS, self.vocabulary.spell(ids), pack_ids(ids), width, parent=parent)

    def sent(self, text: str, **options: str) -> list[int]:
        """What a request with this text sends to the worker."""
        match = self.match(text, **options)
        return kept(match) + encode(text[match.cut.start :])

    def say(
        self,
        text: str,
        sampled: list[int],
        name: str = "",
        *,
        version: Versions = "1",
        parent: str | None = None,
        namespace: tuple[str, ...] = NS,
        reply: str | None = None,
        matched: int | str | None = None,
    ) -> Turn:
        match = self.match(text, parent=parent, namespace=namespace)
        rest = encode(text[match.cut.start :])
        return self.answer(match, rest, sampled, name, version=version, reply=reply, matched=matched)

    def say_ids(self, ids: list[int], sampled: list[int], name: str = "") -> Turn:
        match = self.match_ids(ids)
        return self.answer(match, ids[match.cut.tokens :], sampled, name, given=SpanFlag.GIVEN)

    def answer(
        self,
        match: PrefixMatch,
        rest: list[int],
        sampled: list[int],
        name: str = "",
        *,
        version: Versions = "1",
        reply: str | None = None,
        matched: int | str | None = None,
        given: SpanFlag = SpanFlag.NONE,
    ) -> Turn:
        text, start = match.text, match.cut.start
        context = None
        if rest or start < len(text):
            over = align_context(self.vocabulary, rest, text[start:], bos=(), offsets=lambda: None)
            context = Context(pack_ids(rest), over.flags | given, over.ends)
        if reply is None:
            reply = self.vocabulary.spell(sampled, skip_special=True)
        over = align_reply(self.vocabulary, sampled, reply, skips_special=True, matched=matched)
        assert not over.flags & SpanFlag.MISMATCH
        sampled_reply = SampledReply(
            pack_ids(sampled),
            reply,
            version,
            pack_logprobs([-(i + 1) / 64 for i in range(len(sampled))]),
            over.visible,
            over.flags,
            over.ends,
            over.tail,
            tuple(name.split()),
        )
        self.tree.pin(match)
        generation = self.tree.record(match, context, sampled_reply)
        self.tree.unpin(match)
        return Turn(text, generation, reply)

    def retrieve(self, *turns: Turn) -> None:
        for turn in turns:
            found = self.tree.recall(NS, turn.text)
            assert found is not None
            assert found.exact

    def alive(self, *turns: Turn) -> list[bool]:
        return [turn.generation.span.owner is turn.generation for turn in turns]

    def collect(self, max_tokens: int) -> None:
        """Down to so many tokens; what is left is in order."""
        self.tree.max_tokens = max_tokens
        assert self.tree.collect() is False
        self.tree.check()


def kept(match: PrefixMatch) -> list[int]:
    """The recorded tokens that a request reuses."""
    return unpack_ids(chain_ids(match.cut.span, match.cut.take))


def recalled(found: Recall | None) -> list[int]:
    assert found is not None
    return unpack_ids(chain_ids(found.cut.span, found.cut.take))


def long_chain(talk: Talk, turns: int) -> str:
    """A conversation of so many turns, each of them continuing the one before. Returns its text."""
    before: Generation | None = None
    text = ""
    for _ in range(turns):
        span = None if before is None else before.span
        match = PrefixMatch(NS, text + " ", Cut(span, len(span) if span else 0, len(text)), before)
        turn = talk.answer(match, [SPACE], [A, B, EOS])
        before, text = turn.generation, turn.text
    return text


# Depth and breadth -------------------------------------------------------------------------------------------------------

TURNS = 5_000


def test_a_conversation_of_thousands_of_turns_is_one_chain() -> None:
    """Nothing recurses: the interpreter's limit is a fraction of this depth."""
    assert sys.getrecursionlimit() < TURNS
    talk = Talk()
    text = long_chain(talk, TURNS)
    talk.tree.check()
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
    talk.tree.check()
    talk.collect(4 * TURNS // 2)
    assert 0 < talk.tree.stats.tokens <= 4 * TURNS // 2
    talk.collect(0)
    assert talk.tree.stats.nodes == talk.tree.stats.generations == talk.tree.stats.spans == 0


def test_a_deep_tree_is_cleared_link_by_link() -> None:
    """Freed by its end alone, a chain this long would overflow the stack of the interpreter."""
    talk = Talk()
    long_chain(talk, 20_000)
    talk.tree.clear()
    talk.tree.check()
    assert talk.tree.stats == TreeStats()


def test_a_hundred_thousand_siblings_under_one_prompt() -> None:
    """Each begins with a character of its own, so that one node has all of them as children."""
    many = 100_000
    vocabulary = Vocabulary({i: chr(0x10000 + i).encode() for i in range(many + 2)}, special=[])
    tree = RadixTree(vocabulary)
    prompt, other = chr(0x10000 + many), chr(0x10000 + many + 1)
    match = tree.match(NS, prompt)
    tree.pin(match)
    for i in range(many):
        reply = SampledReply(pack_ids([i, many]), chr(0x10000 + i) + prompt, "1", request_ids=(str(i),))
        tree.record(match, Context(pack_ids([many])), reply)
    tree.unpin(match)
    tree.check()
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
    tree.check()
    assert tree.stats.tokens <= many
    last = prompt + chr(0x10000 + many - 2) + prompt
    assert recalled(tree.recall(NS, last)) == [many, many - 2, many]


def test_of_many_siblings_only_some_are_looked_at_for_a_cut() -> None:
    talk = Talk()
    for i in range(4 * MOST_CANDIDATES):
        talk.say("b", [AB if i % 2 else A, *encode(format(i, "07b").replace("0", "a ").replace("1", "b "))], f"r{i}")
    walk = walk_down(talk.tree._forest.roots[NS], "bab<")
    assert 0 < len(list(walk.candidates(None, 0))) <= 2 * MOST_CANDIDATES


# Reading writes nothing --------------------------------------------------------------------------------------------------


def bushy(talk: Talk) -> list[Turn]:
    """Something of everything: siblings, variants, continued ones, a fork in mid-reply, an empty reply."""
    first = talk.say("a b", [AB, EOS], "r1", version="1")
    second = talk.say("a b", [A, B, EOS], "r2", version="2")
    third = talk.say("a b", [A, BA, SPACE, EOT], "r3", version="2")
    fourth = talk.say(second.text + "<e>b", [AB, A], "r4", version="3")
    fifth = talk.say(third.text[:-2] + " a", [B, B, EOS], "r5", version="3")
    sixth = talk.say("b", [EOS], "r6", version="4")
    return [first, second, third, fourth, fifth, sixth]


def everything(talk: Talk, turns: list[Turn]) -> object:
    tree = talk.tree
    hits = [(t.generation.tick, t.generation.stamp, t.generation.serial, t.generation.span.users) for t in turns]
    return copy.deepcopy(tree.stats), tree._ticks, tree.clock.now, tree.clock.known, hits


LOOKUP = st.text(alphabet="ab <et>", min_size=1, max_size=8)


@settings(max_examples=100, deadline=None)
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
    talk.tree.check()


def test_a_namespace_that_was_only_asked_about_does_not_exist() -> None:
    talk = Talk()
    talk.match("a")
    talk.tree.recall(NS, "a")
    talk.tree.departure(NS, "a")
    talk.match_ids([A])
    assert talk.tree.stats == TreeStats()
    assert not talk.tree._forest.roots


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


# What is continued -------------------------------------------------------------------------------------------------------


def test_two_tokenizations_of_one_text_never_mix() -> None:
    talk = Talk()
    halves = talk.say(" ", [A, B, A], "halves")
    whole = talk.say(" ", [AB, A], "whole")
    assert halves.text == whole.text
    for turn in (halves, whole):
        name = turn.generation.request_ids[0]
        assert recalled(talk.tree.recall(NS, turn.text, request_id=name)) == turn.ids
        assert talk.sent(turn.text + " ", parent=name) == [*turn.ids, SPACE]
        later = talk.say(turn.text + " ", [B, EOS], f"after-{name}", parent=name)
        assert later.ids == [*turn.ids, SPACE, B, EOS]
    for name, turn in (("halves", halves), ("whole", whole)):
        found = talk.tree.recall(NS, " aba b", request_id=f"after-{name}")
        assert recalled(found) == [*turn.ids, SPACE, B, EOS]
    talk.tree.check()


def test_equal_ids_with_other_logprobs_and_versions_are_two_chains() -> None:
    talk = Talk()
    first = talk.say("a", [B, EOS], "r1", version="1")
    second = talk.say("a", [B, EOS], "r2", version="2")
    assert first.ids == second.ids
    versions = []
    for name in ("r1", "r2"):
        found = talk.tree.recall(NS, "ab", request_id=name)
        assert found is not None
        versions.append(flatten(found.cut.span, found.cut.take).weight_versions)
    assert versions == [(("1", 1, 3),), (("2", 1, 3),)]
    assert talk.tree.stats.generations == 2


def test_of_equal_texts_the_newest_answers_and_the_others_by_their_name() -> None:
    talk = Talk()
    turns = [talk.say("a", ids, name) for name, ids in (("r1", [AB, A]), ("r2", [A, BA]), ("r3", [A, B, A, EOS]))]
    assert len({turn.text for turn in turns}) == 1
    text = turns[0].text
    found = talk.tree.recall(NS, text)
    assert found is not None
    assert found.exact
    assert found.request_ids == ("r3", "r2", "r1")
    assert recalled(found) == turns[2].ids
    assert talk.sent(text + "b") == [*turns[2].ids, B]
    for turn, name in zip(turns, ("r1", "r2", "r3"), strict=True):
        by_name = talk.tree.recall(NS, text, request_id=name)
        assert recalled(by_name) == turn.ids
        assert by_name is not None
        assert by_name.request_ids == ("r3", "r2", "r1")


def test_a_reply_is_known_by_the_clients_name_and_by_the_engines() -> None:
    talk = Talk()
    turn = talk.say("a", [B], "mine engines")
    talk.say("a", [B], "other")
    for name in ("mine", "engines"):
        found = talk.tree.recall(NS, "ab", request_id=name)
        assert recalled(found) == turn.ids
        assert found is not None
        assert found.request_ids == ("other", "mine"), "it is listed once, by the first of its names"
        assert talk.match("ab ", parent=name).continues is turn.generation


def test_a_name_that_is_none_of_the_replies_of_a_text_recalls_nothing() -> None:
    talk = Talk()
    talk.say("a", [B], "r1")
    talk.say("b", [B], "elsewhere")
    assert talk.tree.recall(NS, "ab", request_id="elsewhere") is None
    assert talk.tree.recall(NS, "ab ", request_id="elsewhere") is None
    assert talk.tree.recall(NS, "ab ", request_id="r1") is not None
    assert talk.tree.recall(("other", "", ""), "ab", request_id="r1") is None


def test_the_longest_complete_reply_is_continued() -> None:
    talk = Talk()
    short = talk.say("a", [B], "short")
    long = talk.say("a", [BA, B], "long")
    assert talk.match("ab ").continues is short.generation
    assert talk.match("abab").continues is long.generation
    assert talk.match("abab").cut.tokens == len(long.ids)
    assert talk.match("abab ").continues is long.generation


def test_a_named_parent_is_continued_where_a_longer_one_would_be() -> None:
    talk = Talk()
    short = talk.say("a", [B, EOS], "short")
    long = talk.say("a", [BA, B], "long")
    match = talk.match("abab ", parent="short")
    assert match.continues is short.generation
    assert not match.unknown_parent
    assert talk.sent("abab ", parent="short") == [*short.ids, *encode("ab ")]
    turn = talk.say("abab ", [B], "next", parent="short")
    assert turn.ids == [*short.ids, *encode("ab "), B]
    assert talk.match(turn.text + "a").continues is turn.generation
    assert talk.sent("abab ") == [*long.ids, SPACE]
    talk.tree.check()


def test_a_parent_of_none_makes_all_of_the_text_context() -> None:
    talk = Talk()
    talk.say("a", [BA, B, EOS], "r1")
    match = talk.match("abab ", parent=NO_PARENT)
    assert match == PrefixMatch(NS, "abab ")
    assert match.reasons == ()
    turn = talk.say("abab ", [B], "r2", parent=NO_PARENT)
    assert turn.ids == [*encode("abab "), B]
    assert flatten(turn.generation.span, 1).loss_mask.tolist() == [0] * len(encode("abab ")) + [1]
    assert talk.match("abab a").continues is not turn.generation
    assert talk.match("abab b").continues is turn.generation, "what was recorded so is as good a reply as any"
    assert talk.match_ids([A, BA, B, EOS, A], parent=NO_PARENT).cut.tokens == 0
    talk.tree.check()


def test_an_unknown_parent_is_counted_and_treated_as_if_it_were_not_there() -> None:
    """It may have been evicted."""
    talk = Talk()
    turn = talk.say("a", [B, EOS], "r1")
    talk.say("b", [A], "beside")
    for name in ("gone", "beside"):
        match = talk.match("ab ", parent=name)
        assert match.unknown_parent
        assert match.reasons == ("unknown_parent",)
        assert match.continues is turn.generation
        assert match.cut == talk.match("ab ").cut
    assert talk.match_ids([A, B, EOS, SPACE], parent="gone").reasons == ("unknown_parent",)


def test_a_chain_is_not_cut_inside_an_added_token_that_the_text_spells() -> None:
    """A sampled `<` and the text `<e>` have a character in common; with it kept, `e>` would be encoded as no end at all."""
    talk = Talk()
    talk.say("b", [A, LT, B], "r1")
    assert talk.sent("ba<t") == [B, A, LT, T]
    assert talk.sent("ba<e> ") == [B, A, EOS, SPACE]
    assert talk.sent("ba<e") == [B, A, LT, *encode("e")]


def test_a_reply_that_ends_inside_an_added_token_is_not_taken_for_the_shorter_one() -> None:
    """`a` and its end is what goes on with `<e>`; `a<` is another sample, whatever it has in common with that text."""
    talk = Talk()
    meant = talk.say("b", [A, EOS], "r1")
    talk.say("b", [A, LT], "r2")
    match = talk.match("ba<e> ")
    assert match.continues is meant.generation
    assert talk.sent("ba<e> ") == [B, A, EOS, SPACE]
    assert talk.sent("ba<t") == [B, A, LT, T]


@given(st.text("ab <e>t", max_size=12), st.integers(0, 12))
def test_an_added_token_around_a_place_is_found(text: str, position: int) -> None:
    starts = [
        at for at in range(position) for literal in ("<e>", "<t>") if text.startswith(literal, at) and at + 3 > position
    ]
    assert toy_vocabulary().straddled(text, position) == (starts[0] if starts else None)


def test_ids_that_spell_the_parent_in_another_way_lack_it() -> None:
    """The parent is remembered, and its text is in the prompt; its tokens are not."""
    talk = Talk()
    talk.say("a", [A, B], "r1")
    assert not talk.match_ids([A, A, B, SPACE], parent="r1").unknown_parent
    assert talk.match_ids([A, AB, SPACE], parent="r1").unknown_parent


def test_a_chain_that_matches_further_is_ambiguous_and_naming_the_parent_decides() -> None:
    """A reply that makes up the next user turn must not swallow the real one."""
    talk = Talk()
    brief = talk.say("b", [A, EOS], "brief")
    rambling = talk.say("b", [A, SPACE, B, SPACE, A, B], "rambling")
    match = talk.match("ba b ")
    assert match.ambiguous
    assert match.reasons == ("ambiguous_parent",)
    assert match.continues is brief.generation
    assert talk.sent("ba b ") == [*brief.ids, *encode(" b ")]
    assert not talk.match("baa").ambiguous
    assert not talk.match("ba b ab").ambiguous, "that is all of the other one"
    assert talk.match("ba b ab").continues is rambling.generation


def test_tokens_behind_a_reply_come_only_from_chains_that_continue_it() -> None:
    talk = Talk()
    first = talk.say("b", [A], "first")
    talk.say("b", [A, SPACE, B, A, B], "stranger")
    later = talk.say("ba", [SPACE, BA, B], "descendant", parent="first")
    assert later.generation.continues is first.generation
    assert talk.sent("ba ba ") == [*first.ids, SPACE, BA, SPACE]
    talk.tree.check()


def test_the_furthest_of_several_chains_is_cut_when_a_text_leaves_them_in_one_place() -> None:
    """Their texts agree and their tokens do not: the newest is not always the one with the most to give."""
    talk = Talk()
    talk.say(" ", [A, BA, B], "one")
    furthest = talk.say(" ", [AB, A, B], "two")
    talk.say(" ", [A, BA, A], "three")
    assert kept(talk.match(" ab<")) == [SPACE, AB]
    assert talk.match(" ab<").cut.span is furthest.generation.span
    newer = talk.say(" ", [A, B, A, B], "four")
    assert talk.match(" ab<").cut.span is newer.generation.span, "of those that go equally far the newest"
    talk.say(" ", [A, BA, SPACE], "five")
    assert kept(talk.match(" ab<")) == [SPACE, A, B]


def test_a_chain_that_agrees_further_is_cut_before_one_that_leaves_earlier() -> None:
    talk = Talk()
    further = talk.say(" ", [A, A, A, B], "further")
    talk.say(" ", [A, A, B, B], "earlier and newer")
    match = talk.match(" aaa<")
    assert match.cut.span is further.generation.span
    assert kept(match) == [SPACE, A, A, A]


def test_the_chains_beside_a_text_come_furthest_first_and_then_newest_first() -> None:
    talk = Talk()
    talk.say(" ", [A, B, A], "r1")
    talk.say(" ", [AB, A], "r2")
    talk.say(" ", [A, A, A], "r3")
    talk.say(" ", [AB, B], "r4")
    walk = walk_down(talk.tree._forest.roots[NS], " ab<")
    found = [(generation.request_ids[0], limit) for generation, limit in walk.candidates(None, 0)]
    assert found == [("r4", 3), ("r2", 3), ("r1", 3), ("r3", 2)]
    assert [g.request_ids[0] for g, _ in walk.candidates(None, 2)] == ["r4", "r2", "r1"], "none below the floor"
    assert walk.limit == 3


def test_the_same_prompt_gives_the_same_ids_whatever_is_remembered() -> None:
    talk = Talk()
    before = talk.sent("aba")
    talk.say("ab", [SPACE], "r1")
    talk.say("abab", [SPACE], "r2")
    assert before == talk.sent("aba") == encode("aba")


def test_a_prompt_that_was_sent_before_needs_no_encoding() -> None:
    talk = Talk()
    turn = talk.say("ab ", [B])
    match = talk.match("ab ")
    assert match.known is turn.generation.span.parent
    assert match.cut.start == 3
    again = talk.say("ab ", [A])
    assert again.generation.span.parent is turn.generation.span.parent, "both build on one span"


def test_context_that_a_client_gave_as_ids_is_reused_only_with_a_sampled_token_behind() -> None:
    talk = Talk()
    given_ids = [A, B, A]  # the tokenizer would say AB, A
    talk.say_ids(given_ids, [SPACE, B])
    assert talk.match("aba").cut.span is None
    assert talk.sent("aba") == encode("aba")
    assert talk.sent("aba b") == [*given_ids, SPACE, B]
    assert talk.sent("aba a") == [*given_ids, *encode(" ")[:1], A]


def test_context_is_reused_up_to_an_added_token_that_the_text_spells() -> None:
    talk = Talk()
    talk.say("ab<t>ab ab", [B])
    match = talk.match("ab<t>aa")
    assert kept(match) == [AB, EOT]
    assert match.continues is None
    assert talk.match("ab<a").cut.span is None


def test_a_hidden_tail_stays_when_there_is_text_behind_it() -> None:
    talk = Talk()
    turn = talk.say("a", [B, EOS])
    assert talk.sent("ab b") == [*turn.ids, *encode(" b")]
    assert talk.sent("ab<e>b") == [*turn.ids, B], "spelled: consumed, not doubled"
    match = talk.match("ab")
    assert kept(match) == [A, B]
    assert match.reasons == ("tail_left_out",)
    assert recalled(talk.tree.recall(NS, "ab")) == turn.ids, "a retrieval has it"


def test_a_trimmed_stop_string_stays_as_far_as_the_text_spells_it() -> None:
    """It is ordinary text, and the reader never saw it."""
    talk = Talk()
    talk.say("t", [A, SPACE, B, A], reply="a", matched=" b")
    assert talk.sent("ta ba") == [T, A, SPACE, B, A]
    assert talk.sent("ta b<") == [T, A, SPACE, B, LT]
    assert talk.sent("ta <") == [T, A, SPACE, LT]
    match = talk.match("ta<")
    assert kept(match) == [T, A]
    assert match.tail_left_out


def test_a_half_shown_token_is_kept_only_if_the_text_spells_all_of_it() -> None:
    talk = Talk()
    turn = talk.say("t", [SPACE, AB, A], reply=" a", matched="ba")
    assert talk.sent("t ab<") == [T, SPACE, AB, LT]
    match = talk.match("t a<")
    assert kept(match) == [T, SPACE]
    assert match.reasons == ("cut_in_token",)
    later = talk.say("t a<", [B])
    assert later.ids == [T, SPACE, A, LT, B]
    assert flatten(later.generation.span, 1).reasons == ("cut_in_token",)
    assert recalled(talk.tree.recall(NS, turn.text)) == turn.ids
    talk.tree.check()


def test_an_empty_reply_is_not_continued_without_its_hidden_tail() -> None:
    talk = Talk()
    turn = talk.say("a", [EOS], "empty")
    assert turn.reply == ""
    for text in ("a", "ab", "a "):
        assert talk.match(text).continues is None
        assert talk.sent(text) == encode(text)
    assert talk.match("a<e>b").continues is turn.generation
    assert talk.sent("a<e>b") == [A, EOS, B]
    assert recalled(talk.tree.recall(NS, "a")) == [A, EOS]


def test_a_text_that_ends_at_a_recorded_prompt_gives_that_prompt() -> None:
    talk = Talk()
    first = talk.say("a", [B, EOS], "r1")
    second = talk.say(first.text + "<e> b", [A], "r2")
    found = talk.tree.recall(NS, second.prompt)
    assert found is not None
    assert found.exact
    assert recalled(found) == second.sent
    assert not second.generation.retrieved
    assert first.generation.retrieved


def test_what_was_never_recorded_is_not_exact() -> None:
    talk = Talk()
    turn = talk.say("a", [B])
    found = talk.tree.recall(NS, "ab b")
    assert found is not None
    assert not found.exact
    assert found.cut == Cut(turn.generation.span, 1, 2)
    nothing = Talk().tree.recall(NS, "ab")
    assert nothing is not None
    assert not nothing.exact
    assert nothing.cut.span is None


# Ids ---------------------------------------------------------------------------------------------------------------------


def test_ids_continue_a_chain_whose_text_is_another() -> None:
    """A special token in the middle of a reply is silent in its text, and spelled in the text of a request's ids."""
    talk = Talk()
    turn = talk.say("a", [B, EOT, A, EOS], "r1")
    assert turn.text == "aba"
    ids = [*turn.ids, SPACE]
    match = talk.match_ids(ids)
    assert match.text == "ab<t>a<e> "
    assert match.foreign
    assert match.cut == Cut(turn.generation.span, 4, len("ab<t>a<e>"))
    later = talk.say_ids(ids, [B, A, EOS], "r2")
    assert later.ids == [*ids, B, A, EOS]
    assert flatten(later.generation.span, 3).loss_mask.tolist() == [0, 1, 1, 1, 1, 0, 1, 1, 1]
    assert recalled(talk.tree.recall(NS, later.text)) == later.ids
    talk.tree.check()
    last = talk.say_ids([*later.ids, SPACE], [A], "r3")
    assert last.ids == [*later.ids, SPACE, A]
    assert last.generation.span.parent is not None
    assert last.generation.span.parent.parent is later.generation.span
    talk.tree.check()
    talk.collect(0)


def test_ids_that_end_where_a_chain_does_need_no_context() -> None:
    talk = Talk()
    turn = talk.say("a", [B, EOT, A], "r1")
    match = talk.match_ids(turn.ids)
    assert kept(match) == turn.ids
    later = talk.say_ids(turn.ids, [SPACE], "r2")
    assert later.generation.span.parent is turn.generation.span
    assert later.ids == [*turn.ids, SPACE]
    talk.tree.check()


def test_ids_continue_a_chain_with_its_hidden_tail_and_without() -> None:
    talk = Talk()
    turn = talk.say("a", [B, EOS], "r1")
    with_tail, without = talk.match_ids([A, B, EOS, SPACE]), talk.match_ids([A, B, SPACE])
    assert with_tail.continues is without.continues is turn.generation
    assert (with_tail.cut.take, without.cut.take) == (2, 1)
    assert not with_tail.foreign
    assert not without.foreign


def test_ids_of_the_same_text_in_another_spelling_continue_nothing() -> None:
    talk = Talk()
    talk.say("b", [AB, A], "r1")
    match = talk.match_ids([B, A, B, A, SPACE])
    assert match.continues is None
    assert match.cut.span is None


def test_ids_that_leave_a_reply_in_the_middle_reuse_what_they_begin_with() -> None:
    talk = Talk()
    turn = talk.say("b", [A, B, A], "r1")
    match = talk.match_ids([B, A, B, SPACE])
    assert match.continues is None
    assert match.cut == Cut(turn.generation.span, 2, 3)


def test_ids_do_not_continue_an_empty_reply_without_its_hidden_tail() -> None:
    talk = Talk()
    turn = talk.say("a", [EOS], "empty")
    assert talk.match_ids([A]).continues is None
    assert talk.match_ids([A, B]).continues is None
    match = talk.match_ids([A, EOS, B])
    assert match.continues is turn.generation
    assert kept(match) == [A, EOS]


def test_ids_name_their_parent_among_equal_chains() -> None:
    talk = Talk()
    turns = [talk.say("a", [B, EOS], name) for name in ("r1", "r2")]
    ids = [A, B, EOS, SPACE]
    assert talk.match_ids(ids).continues is turns[1].generation
    assert talk.match_ids(ids, parent="r1").continues is turns[0].generation
    talk.tree.recall(NS, "ab", request_id="r1")  # so that it goes first
    talk.collect(talk.tree.stats.tokens - 1)
    assert talk.alive(*turns) == [False, True]
    assert talk.match_ids(ids).continues is turns[1].generation
    assert talk.match_ids(ids, parent="r1").unknown_parent


def test_ids_find_an_equal_chain_when_the_newest_is_collected() -> None:
    talk = Talk()
    turns = [talk.say("a", [B, EOS], name) for name in ("r1", "r2")]
    found = talk.tree.recall(NS, "ab", request_id="r2")
    assert recalled(found) == turns[1].ids  # only this one was retrieved, so it goes first
    talk.collect(talk.tree.stats.tokens - 1)
    assert talk.alive(*turns) == [True, False]
    assert talk.match_ids([A, B, EOS, SPACE]).continues is turns[0].generation
    assert talk.match_ids([A, B, SPACE]).continues is turns[0].generation


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
    talk.tree.check()


def test_namespaces_share_one_budget_and_an_empty_one_is_gone() -> None:
    talk = Talk()
    other = ("", "", "evaluation")
    theirs = talk.say("a", [B, EOS], "r1", namespace=other)
    mine = talk.say("a", [B, EOS], "r1")
    talk.collect(3)
    assert talk.alive(theirs, mine) == [False, True]
    assert list(talk.tree._forest.roots) == [NS]
    talk.say("a", [B], "r2", namespace=other)
    assert talk.match("ab ", namespace=other).continues is not None


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
    talk.tree.check()
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
    talk.tree.check()
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
    talk.tree.check()


def test_collection_works_in_steps_and_ends() -> None:
    talk = Talk()
    for number in range(40):
        talk.say(" ", encode(format(number, "06b").replace("0", "a").replace("1", "b")))
    talk.tree.max_tokens = 50
    steps, before = 1, talk.tree.stats.tokens
    while talk.tree.collect(seconds=0):
        talk.tree.check()
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


@settings(max_examples=150, deadline=None)
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
        talk.tree.check()
    for match in pinned:
        talk.tree.unpin(match)
    talk.collect(0)
    evicted = talk.tree.stats
    assert (evicted.nodes, evicted.generations, evicted.spans, evicted.tokens) == (0, 0, 0, 0)
    assert (evicted.characters, evicted.payload) == (0, 0)
    assert evicted.evicted["version"] + evicted.evicted["least_recently_hit"] == len(turns)
    assert not talk.tree._forest.roots


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


# Clearing, and where a text leaves ---------------------------------------------------------------------------------------


def test_a_cleared_tree_has_forgotten_everything_and_can_be_used_again() -> None:
    talk = Talk()
    turns = bushy(talk)
    talk.collect(talk.tree.stats.tokens - 1)
    evicted, tokens = dict(talk.tree.stats.evicted), talk.tree.stats.evicted_tokens
    talk.tree.clear()
    talk.tree.check()
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
    stack = [(root, "") for root in talk.tree._forest.roots.values()]
    while stack:
        node, text = stack.pop()
        yield text
        stack += [(child, text + child.edge) for child in node.each_child()]


def test_a_node_stands_for_a_text_at_which_something_ends_or_runs_apart() -> None:
    talk = Talk()
    talk.say("a", [B, A])
    talk.say("a", [B, B])
    assert sorted(texts_of(talk)) == ["", "a", "ab", "aba", "abb"]
