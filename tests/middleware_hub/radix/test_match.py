"""Which chain a text or a list of ids continues, one sentence a test."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from middleware_hub.radix import cut as tree_cut
from middleware_hub.radix import match as tree_match
from middleware_hub.radix.cut import Cut
from middleware_hub.radix.match import PrefixMatch, walk_down
from middleware_hub.radix.node import Generation, common_length
from middleware_hub.radix.records import NO_PARENT, Context, SampledReply
from middleware_hub.spans.chain import pack_ids
from middleware_hub.spans.trajectory import flatten
from middleware_hub.tokenizer.alignment import align_reply
from middleware_hub.tokenizer.vocabulary import Vocabulary
from tests.middleware_hub.radix.recount import recount
from tests.middleware_hub.radix.talk import NS, Talk, kept, recalled
from tests.middleware_hub.toy import AB, BA, EOS, EOT, LT, SPACE, A, B, T, encode

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
    recount(talk.tree)


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
    recount(talk.tree)


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
    recount(talk.tree)


def test_a_text_that_leaves_a_reply_behind_an_id_that_the_tokenizer_does_not_know_keeps_it() -> None:
    """SGLang shows token 0, here `a`, for it. An id that shows nothing is not kept at the end."""
    talk = Talk()
    turn = talk.say(" ", [B, 999, B, 999, EOS], "shown", reply="baba")
    assert talk.sent(turn.text + " ") == [SPACE, B, 999, B, 999, EOS, SPACE]
    assert talk.sent(" ba ") == [SPACE, B, 999, SPACE]
    hidden = talk.say("<t>", [B, 999, B, 999, EOS], "hidden", reply="bb")
    assert talk.sent(hidden.text + " ") == [EOT, B, 999, B, 999, EOS, SPACE]
    assert talk.sent("<t>b ") == [EOT, B, SPACE]
    recount(talk.tree)


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


@pytest.mark.parametrize("other", [[A, SPACE, EOS], [A, SPACE, A], [A, EOS]], ids=["equal", "longer", "complete"])
def test_a_part_of_the_named_parent_is_kept_where_another_reply_begins_alike(other: list[int]) -> None:
    """A loop that strips a reply names it: the newer sample of the prompt is not the one that it means."""
    talk = Talk()
    meant = talk.say("b", [A, SPACE, EOS], "meant")
    talk.say("b", other, "other")
    match = talk.match("bab", parent="meant")
    assert (match.cut.span, match.cut.take) == (meant.generation.span, 1)
    assert match.reasons == ("edited_turn",)
    first = talk.say("bab", [A, EOS], "first", parent="meant")
    again = talk.say("bab", [B, EOS], "again", parent="meant")
    assert again.sent == first.sent == [B, A, B]
    assert again.generation.span.parent is first.generation.span.parent, "both build on one prompt"
    assert talk.match("baba ", parent="first").cut.span is first.generation.span
    recount(talk.tree)


def test_a_part_of_the_named_parent_is_kept_after_the_reply_that_it_continues() -> None:
    talk = Talk()
    before = talk.say("b", [A, EOS], "before")
    meant = talk.say("ba ", [A, SPACE, EOS], "meant", parent="before")
    talk.say("ba ", [A, SPACE, EOS], "other", parent="before")
    match = talk.match("ba ab", parent="meant")
    assert (match.cut.span, match.cut.take) == (meant.generation.span, 1)
    assert match.continues is before.generation
    assert talk.match("b<t>", parent="meant").unknown_parent, "nothing of it is left"


@pytest.mark.parametrize("line", [False, True], ids=["first", "later"])
def test_no_other_reply_takes_the_place_of_a_named_parent_without_text(line: bool) -> None:
    """What is said after it is no reply, although a sample of the same prompt begins like that."""
    talk = Talk()
    prompt, parent = "b", None
    if line:
        prompt, parent = talk.say("b", [A, EOS], "before").text + " ", "before"
    empty = talk.say(prompt, [EOS], "empty", parent=parent)
    talk.say(prompt, [BA, B], "other", parent=parent)
    assert talk.match(prompt + "bab").cut.span is not None
    match = talk.match(prompt + "bab", parent="empty")
    assert match.reasons == ("tail_left_out",)
    turn = talk.say(prompt + "bab", [A], "next", parent="empty")
    assert turn.sent == [*empty.sent, *encode("bab")]
    assert flatten(turn.generation.span, 1).loss_mask.tolist()[len(empty.sent) :] == [0] * len(encode("bab")) + [1]
    assert talk.match(prompt + "bab", parent="other").continues is not None, "elsewhere it is as it was"
    recount(talk.tree)


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


@pytest.mark.parametrize(
    ("edge", "text", "pos", "common"),
    [
        ("abc", "abc", 0, 3),
        ("ab", "abab", 0, 2),
        ("ab", "xabx", 1, 2),
        ("abab", "ab", 0, 2),
        ("abc", "abd", 0, 2),
        ("", "a", 0, 0),
    ],
)
def test_what_two_texts_have_in_common_ends_with_the_shorter_one(edge: str, text: str, pos: int, common: int) -> None:
    assert common_length(edge, text, pos) == common


@given(st.lists(st.sampled_from(["<e>", "<ttt>", *"a<et>"]), max_size=5).map("".join), st.integers(0, 12))
@example("<ttt><e>", 5)
@example("<ttt>", 4)
def test_an_added_token_around_a_place_is_found(text: str, position: int) -> None:
    """Not one that ends or begins there, however long others are."""
    added = {0: b"<e>", 1: b"<ttt>"}
    starts = [
        at
        for at in range(position)
        for literal in ("<e>", "<ttt>")
        if text.startswith(literal, at) and at + len(literal) > position
    ]
    vocabulary = Vocabulary(added, special=added, added=added)
    assert vocabulary.straddled(text, position) == (starts[0] if starts else None)


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
    talk.say("ba b ", [EOS], "again")
    assert talk.match("ba b ").ambiguous, "however much of the context is known already"


def test_a_chain_that_matches_further_is_ambiguous_behind_newer_ones_that_have_the_text_as_context() -> None:
    talk = Talk()
    talk.say("t", [A, B, A], "long")
    talk.say("t", [A], "short")
    assert talk.match("tab<").ambiguous
    talk.say("taba<", [B], "context", parent=NO_PARENT)
    assert talk.match("tab<").ambiguous


def test_of_many_chains_that_match_further_those_that_match_furthest_are_looked_at() -> None:
    talk = Talk()
    for number in range(40):
        talk.say("t", [A, B], f"r{number}")
    for number in range(40):
        talk.say("tab b a", [EOS, A, B, A, B] if number % 2 else [B], f"s{number}", parent=f"r{number}")
    talk.say("t", [A, B], "last")
    assert talk.match("tab b aab").ambiguous


def test_tokens_behind_a_reply_come_only_from_chains_that_continue_it() -> None:
    talk = Talk()
    first = talk.say("b", [A], "first")
    talk.say("b", [A, SPACE, B, A, B], "stranger")
    later = talk.say("ba", [SPACE, BA, B], "descendant", parent="first")
    assert later.generation.continues is first.generation
    assert talk.sent("ba ba ") == [*first.ids, SPACE, BA, SPACE]
    assert kept(talk.match("ba b<")) == [*first.ids, SPACE], "the stranger's `b` lies wholly in the text"
    recount(talk.tree)


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
    walk = walk_down(talk.tree.roots[NS], " ab<")
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


def test_context_that_a_client_gave_as_ids_is_not_reused_up_to_an_added_token() -> None:
    """Encoding is compositional there, but these ids need not be what the tokenizer makes of their text."""
    talk = Talk()
    talk.say_ids([A, B, EOT, A], [SPACE, B])
    assert encode("ab<t>") == [AB, EOT]
    assert talk.match("ab<t>b").cut.span is None
    assert talk.sent("ab<t>b") == encode("ab<t>b")
    assert talk.sent("ab<t>a b") == [A, B, EOT, A, SPACE, B], "with sampled tokens behind it, it is"


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
    assert match.reasons == ("tail_left_out",)


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
    again = talk.match("t a<")
    assert again.known is later.generation.span.parent, "it is kept once, however many samples it has"
    assert again.reasons == ("cut_in_token",)
    assert recalled(talk.tree.recall(NS, turn.text)) == turn.ids
    recount(talk.tree)


def test_the_visible_part_of_the_only_token_is_context_of_which_each_request_is_told() -> None:
    talk = Talk()
    turn = talk.say("t", [AB], "r", reply="a", matched="b")
    assert talk.sent("tab<") == [T, AB, LT], "the text spells all of it"
    for name in ("first", "again"):
        assert talk.match("ta<").reasons == ("cut_in_token",)
        later = talk.say("ta<", [B], name)
        assert later.ids == [T, A, LT, B]
        assert flatten(later.generation.span, 1).reasons == ("cut_in_token",)
    named = talk.match("ta<", parent="r")
    assert (named.reasons, named.unknown_parent) == (("cut_in_token",), False)
    assert talk.match("t<").reasons == ()
    talk.say("t", [A, LT], "whole")
    assert talk.match("ta<b").reasons == (), "another sample of the prompt has these characters in tokens of its own"
    assert talk.match("ta<<", parent="r").reasons == ("cut_in_token",)
    assert recalled(talk.tree.recall(NS, turn.text)) == turn.ids
    recount(talk.tree)


def test_the_visible_part_of_the_only_token_right_behind_another_reply_is_told_too() -> None:
    talk = Talk()
    talk.say("t", [A])
    talk.say("ta", [AB], reply="a", matched="b")
    match = talk.match("taa<")
    assert (kept(match), match.reasons) == ([T, A], ("cut_in_token",))


def test_a_visible_part_that_begins_in_a_token_of_another_sample_is_not_told() -> None:
    """The first character is that sample's, and the rest is as little a part of a token as any other text."""
    talk = Talk()
    over = align_reply(talk.vocabulary, [EOS], "<e", skips_special=False, matched=">")
    reply = SampledReply(pack_ids([EOS]), "<e", "1", None, over.visible, over.flags, over.ends, over.tail, ("r",))
    talk.tree.record(talk.match("t"), Context(pack_ids([T])), reply)
    assert talk.match("t<eb").reasons == ("cut_in_token",)
    talk.say("t", [LT, A])
    match = talk.match("t<eb")
    assert (kept(match), match.reasons) == ([T, LT], ())


def test_a_part_of_a_context_that_has_the_visible_part_of_a_token_is_not_reused() -> None:
    """Its `<e>` could be: but what is known of that context is not true of its `<e>` alone."""
    talk = Talk()
    talk.say("t", [A])
    talk.say("ta<e>b", [AB], reply="a", matched="b", parent="gone")
    talk.say("ta<e>ba<", [B])
    match = talk.match("ta<e>b b")
    assert (kept(match), match.reasons) == ([T, A], ())
    assert flatten(talk.say("ta<e>b b", [B]).generation.span, 1).reasons == ()
    assert kept(talk.match("ta<e>b a")) == [T, A, EOS]


def test_a_prompt_that_was_sent_before_is_told_of_the_token_that_a_reply_showed_only_in_part() -> None:
    talk = Talk()
    before = talk.say("ta<", [B], "before")
    assert flatten(before.generation.span, 1).reasons == ()
    talk.say("t", [AB], reply="a", matched="b")
    match = talk.match("ta<")
    assert (kept(match) + encode("ta<"[match.cut.start :]), match.reasons) == ([T, A, LT], ("cut_in_token",))
    assert flatten(talk.say("ta<", [B]).generation.span, 1).reasons == ("cut_in_token",)
    assert flatten(before.generation.span, 1).reasons == ()
    recount(talk.tree)


def test_a_tail_that_was_left_out_is_told_at_each_request() -> None:
    talk = Talk()
    talk.say("t", [A, SPACE, B, A], reply="a", matched=" b")
    for _ in range(2):
        assert talk.match("ta<").reasons == ("tail_left_out",)
        talk.say("ta<", [B])


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
    recount(talk.tree)
    last = talk.say_ids([*later.ids, SPACE], [A], "r3")
    assert last.ids == [*later.ids, SPACE, A]
    assert last.generation.span.parent is not None
    assert last.generation.span.parent.parent is later.generation.span
    recount(talk.tree)
    talk.collect(0)


def test_a_chain_under_another_text_is_not_cut_where_that_text_is() -> None:
    """Its tokens lie over the text of the reply, which lacks the special token; ours spells it."""
    talk = Talk()
    talk.say("a", [EOT, B, SPACE, B], "r1")
    later = talk.say_ids([A, EOT, B, SPACE, B, SPACE], [B], "r2")
    assert later.text == "a<t>b b b"
    assert talk.sent("a<t>b<") == encode("a<t>b<")
    assert talk.sent("a<t>b b<") == [A, EOT, B, SPACE, B, LT], "all of the reply is in this text"


@pytest.mark.parametrize("prompt", ["a<t>b b", "a<t>b b "])
def test_a_text_that_goes_on_from_a_chain_under_another_text_is_no_place_to_cut_it_either(prompt: str) -> None:
    """The prompt keeps a reply because ids continued it, and only there is it noted that its text was another."""
    talk = Talk()
    talk.say("a", [EOT, B, SPACE, B], "r1")
    talk.say_ids([A, EOT, B, SPACE, B], [B], "r2")
    assert talk.say(prompt, [A], "r3").ids[:5] == [A, EOT, B, SPACE, B]
    assert talk.sent("a<t>b<") == encode("a<t>b<")
    recount(talk.tree)


def test_ids_that_end_where_a_chain_does_need_no_context() -> None:
    talk = Talk()
    turn = talk.say("a", [B, EOT, A], "r1")
    match = talk.match_ids(turn.ids)
    assert kept(match) == turn.ids
    later = talk.say_ids(turn.ids, [SPACE], "r2")
    assert later.generation.span.parent is turn.generation.span
    assert later.ids == [*turn.ids, SPACE]
    recount(talk.tree)


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


def test_ids_that_go_on_in_another_spelling_reuse_what_they_begin_with() -> None:
    talk = Talk()
    turn = talk.say("b", [A, B, A], "r1")
    match = talk.match_ids([B, A, BA, SPACE])
    assert match.text == "baba "
    assert match.cut == Cut(turn.generation.span, 1, 2)
    later = talk.say_ids([B, A, BA, SPACE], [A], "r2")
    assert flatten(later.generation.span, 1).loss_mask.tolist() == [0, 1, 0, 0, 1]
    recount(talk.tree)


def test_ids_reuse_what_they_begin_with_where_another_reply_agrees_further_in_its_text() -> None:
    talk = Talk()
    turn = talk.say("b", [A, B, A], "mine")
    talk.say("b", [AB, SPACE, LT], "other")
    match = talk.match_ids([B, A, B, SPACE, SPACE])
    assert match.cut == Cut(turn.generation.span, 2, 3)
    assert talk.match_ids([B, AB, SPACE, SPACE]).cut.take == 2


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


@pytest.mark.parametrize("newest", ["a", "a<e>"])
def test_ids_find_an_equal_chain_that_has_another_text(newest: str) -> None:
    """One says "ab", whose end of turn has no text, and one "a<e>b". When the newest is collected, the other one is found."""
    talk = Talk()
    says = {"a": [EOS, B], "a<e>": [B]}
    turns = [
        talk.say(text, says[text], name)
        for name, text in zip(("r1", "r2"), sorted(says, key=newest.__eq__), strict=True)
    ]
    ids = [A, EOS, B, SPACE]
    assert turns[0].ids == turns[1].ids == ids[:3]
    assert turns[0].text != turns[1].text
    assert kept(talk.match_ids(ids)) == ids[:3]
    assert talk.match_ids(ids).cut.span is turns[1].generation.span
    assert talk.match_ids(ids, parent="r1").cut.span is turns[0].generation.span
    talk.tree.recall(NS, turns[1].text, request_id="r2")  # so that it goes first
    talk.collect(talk.tree.stats.tokens - 1)
    assert talk.alive(*turns) == [True, False]
    assert talk.match_ids(ids).cut.span is turns[0].generation.span
    talk.collect(0)


# Groups ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> list[Generation]:
    """The chains that were cut on trial."""
    found: list[Generation] = []
    resolve = tree_cut.resolve_partial

    def noting(generation: Generation, *args: Any, **options: Any) -> Any:
        found.append(generation)
        return resolve(generation, *args, **options)

    for module in (tree_cut, tree_match):
        monkeypatch.setattr(module, "resolve_partial", noting)
    return found


def test_a_prompt_is_found_again_however_many_samples_it_has(cuts: list[Generation]) -> None:
    talk = Talk()
    for i in range(64):
        talk.say("ab ab", [SPACE, B, *encode(format(i, "06b").replace("0", "a").replace("1", "b"))])
    cuts.clear()
    assert talk.match("ab ab").known is not None
    assert not cuts, "nothing was sampled up to there"
    assert kept(talk.match("ab ab b<")) == [*encode("ab ab"), SPACE, B]
    assert len(cuts) == 1, "the first chain reaches as far as the text agrees"


def test_equal_samples_with_one_observation_are_not_tried_one_by_one(cuts: list[Generation]) -> None:
    talk = Talk()
    for i in range(64):
        first = talk.say("ab", [SPACE, B], f"r{i}")
        match = talk.match(first.text + "<t>a", parent=f"r{i}")
        talk.answer(match, encode(match.text[match.cut.start :]), [A, *encode("ab" * (i + 1))])
    cuts.clear()
    match = talk.match("ab b<t>a", parent="r7")
    assert match.continues is not None
    assert match.continues.request_ids == ("r7",)
    assert not match.ambiguous
    assert len(cuts) <= 2
