"""How ids lie over a text: what is visible, what is hidden, where tokens end, and when ids and text do not belong together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers.decoders import DecodeStream

from middleware_hub.spans.chain import SpanFlag, TokenSpan, pack_ids
from middleware_hub.spans.hidden_tail import HiddenToken
from middleware_hub.tokenizer.alignment import Alignment, align_context, align_reply
from middleware_hub.tokenizer.vocabulary import REPLACEMENT, Vocabulary
from router.engines.form.reply import Numbers
from tests.conftest import examples
from tests.middleware_hub.real import ALL, added, sampled_ids, texts, tokenizer
from tests.middleware_hub.toy import (
    AB,
    BA,
    E_HEAD,
    E_TAIL,
    EOS,
    EOT,
    LT,
    NOTHING,
    PIECES,
    SPACE,
    SPACE_A,
    A,
    B,
    toy_vocabulary,
)
from tests.support.vocabularies import Name, load


class ComparesNothing(Vocabulary):
    def spells(self, ids: Sequence[int], text: str, *, skip_special: bool = False) -> bool:
        return False


TOY = toy_vocabulary()
COMPARES_NOTHING = ComparesNothing(PIECES, special=[EOS, EOT], boundaries=[EOS, EOT], added=[EOS, EOT])
BOTH = 90
HOLDS_BACK = Vocabulary({**PIECES, BOTH: b"b\xc3"}, special=[EOS, EOT], boundaries=[EOS, EOT], added=[EOS, EOT])
"""With a token of a whole character and half of another, as byte-level vocabularies have them."""
EXACT = SpanFlag.SKIPS_SPECIAL
SPLIT = SpanFlag.SKIPS_SPECIAL | SpanFlag.WHOLE | SpanFlag.SPLIT
MISMATCH = Alignment(SpanFlag.WHOLE | SpanFlag.MISMATCH, None, 2)
slow = settings(
    deadline=None, max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


def context(ids: list[int], text: str, *, bos: Sequence[int] = (), offsets: Any = None) -> Alignment:
    return align_context(TOY, ids, text, bos=bos, offsets=lambda: offsets)


def reply(ids: list[int], text: str, *, matched: int | str | None = None, skips: bool = True) -> Alignment:
    return align_reply(TOY, ids, text, skips_special=skips, matched=matched)


def ends_of(alignment: Alignment) -> list[int] | None:
    return None if alignment.ends is None else np.frombuffer(alignment.ends, dtype=np.int32).tolist()


def measured(vocabulary: Vocabulary, ids: list[int], text: str, alignment: Alignment, *, sampled: bool) -> list[int]:
    """Where the tokens of a span end that was recorded with this alignment."""
    span = TokenSpan(
        None,
        0,
        0,
        pack_ids(ids),
        len(text),
        versions="1" if sampled else None,
        flags=alignment.flags,
        visible=-1 if alignment.visible is None else alignment.visible,
        ends=alignment.ends,
    )
    return vocabulary.ends(span).tolist()


def hidden(text: str, *, tokens: int = 1, shown: int = 0) -> HiddenToken:
    return HiddenToken(tokens, text, False, shown)


def special(text: str) -> HiddenToken:
    return HiddenToken(1, text, True, 0)


# Contexts ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "text", "flags", "ends"),
    [
        pytest.param([AB, A], "aba", SpanFlag.NONE, [2, 3], id="spelled"),
        pytest.param([EOS, AB, A], "<e>aba", SpanFlag.NONE, [3, 5, 6], id="a BOS that the text spells"),
        pytest.param([EOS, AB, A], "aba", SpanFlag.BOS, [0, 2, 3], id="a BOS that it does not"),
        pytest.param([SPACE_A, B], "ab", SpanFlag.DUMMY, [1, 2], id="a dummy space"),
        pytest.param([SPACE, AB], "ab", SpanFlag.DUMMY, [0, 2], id="a dummy space of its own"),
        pytest.param([EOS, SPACE_A, B], "ab", SpanFlag.BOS | SpanFlag.DUMMY, [0, 1, 2], id="both"),
        pytest.param([EOS, SPACE_A, B], " ab", SpanFlag.BOS, [0, 2, 3], id="a space that the text has is no dummy"),
        pytest.param([EOS], "", SpanFlag.BOS, [0], id="nothing but a BOS"),
        pytest.param([], "", SpanFlag.NONE, [], id="nothing"),
        pytest.param([E_HEAD, E_TAIL, A], "éa", SpanFlag.NONE, [1, 1, 2], id="a character of two tokens"),
    ],
)
def test_a_context_lies_over_its_text_as_it_was_encoded(
    ids: list[int], text: str, flags: SpanFlag, ends: list[int]
) -> None:
    def offsets() -> None:
        raise AssertionError("nobody has to ask the tokenizer")

    alignment = align_context(TOY, ids, text, bos=[EOS], offsets=offsets)
    assert alignment == Alignment(flags)
    assert measured(TOY, ids, text, alignment, sampled=False) == ends


def test_without_a_bos_a_leading_special_token_is_text() -> None:
    assert context([EOS, A], "<e>a") == Alignment(SpanFlag.NONE)
    assert context([EOS, A], "a").flags & SpanFlag.WHOLE


def test_a_bos_of_several_tokens_is_not_taken_for_one() -> None:
    assert context([EOS, EOT, A], "a", bos=[EOS, EOT]).flags & SpanFlag.WHOLE


@pytest.mark.parametrize(
    ("ids", "text", "flags", "ends"),
    [
        ([A, E_HEAD], "a\ufffd", SpanFlag.NONE, [1, 2]),
        ([E_TAIL, E_TAIL, A], "\ufffd\ufffda", SpanFlag.NONE, [1, 2, 3]),
        ([EOS, E_TAIL, A], "\ufffda", SpanFlag.BOS, [0, 1, 2]),
        ([SPACE, E_TAIL, A], "\ufffda", SpanFlag.DUMMY, [0, 1, 2]),
        ([EOS, SPACE_A, E_TAIL], "a\ufffd", SpanFlag.BOS | SpanFlag.DUMMY, [0, 1, 2]),
    ],
)
def test_broken_characters_of_a_context_are_counted_where_they_are(
    ids: list[int], text: str, flags: SpanFlag, ends: list[int]
) -> None:
    """The table that ends are worked out from counts whole characters only."""
    alignment = context(ids, text, bos=[EOS])
    assert alignment.flags == flags
    assert ends_of(alignment) == ends


def test_where_a_normalizer_changed_characters_the_tokenizers_offsets_count() -> None:
    alignment = context([A, B, A], "äbä", offsets=[(0, 1), (1, 2), (2, 3)])
    assert alignment.flags == SpanFlag.NONE
    assert ends_of(alignment) == [1, 2, 3]


@pytest.mark.parametrize(
    ("offsets", "ends"),
    [
        pytest.param([(0, 1), (2, 3), (3, 4)], [2, 3, 4], id="a gap belongs to the token before it"),
        pytest.param([(0, 1), (1, 2), (2, 3)], [1, 2, 4], id="and at the end to the last one"),
        pytest.param([(0, 3), (1, 2), (2, 4)], [3, 3, 4], id="they never fall"),
        pytest.param([(0, 9), (9, 9), (9, 9)], [4, 4, 4], id="they stay within the text"),
    ],
)
def test_offsets_become_ends_that_leave_no_character_to_nobody(offsets: list[tuple[int, int]], ends: list[int]) -> None:
    assert ends_of(context([A, B, A], "wxyz", offsets=offsets)) == ends


def test_offsets_behind_a_bos_say_so() -> None:
    alignment = context([EOS, A, B], "äb", bos=[EOS], offsets=[(0, 0), (0, 1), (1, 2)])
    assert alignment.flags == SpanFlag.BOS
    assert ends_of(alignment) == [0, 1, 2]


@pytest.mark.parametrize("offsets", [None, [], [(0, 1)], [(0, 1), (1, 2), (2, 3)]])
def test_where_nothing_is_known_a_context_is_used_whole_or_not_at_all(offsets: Any) -> None:
    alignment = context([A, B], "ää", offsets=offsets)
    assert alignment == Alignment(SpanFlag.WHOLE)
    assert measured(TOY, [A, B], "ää", alignment, sampled=False) == [2, 2]


@given(st.lists(st.sampled_from(list(PIECES)), max_size=8))
def test_ids_lie_over_their_own_spelling(ids: list[int]) -> None:
    text = TOY.spell(ids)
    alignment = context(ids, text)
    assert alignment.flags == SpanFlag.NONE
    assert measured(TOY, ids, text, alignment, sampled=False) == TOY.counted(ids).tolist()


@pytest.mark.parametrize("name", ALL)
def test_any_text_is_covered_to_its_end_by_what_it_encodes_to(name: Name) -> None:
    made = tokenizer(name)

    @slow
    @given(texts(name), st.booleans())
    def check(text: str, start: bool) -> None:
        ids = made.encode_start(text) if start else made.encode_tail(text)
        assume(ids)
        ends = measured(made.vocabulary, ids, text, made.align(ids, text, start=start), sampled=False)
        assert ends == sorted(ends)
        assert ends[0] >= 0
        assert ends[-1] == len(text)

    check()


# Replies -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "text", "matched", "visible", "tail"),
    [
        pytest.param([A, B], "ab", None, 2, (), id="all of it"),
        pytest.param([], "", None, 0, (), id="nothing"),
        pytest.param([A, B, EOS], "ab", EOS, 2, (special("<e>"),), id="EOS"),
        pytest.param([A, B, EOS], "ab", None, 2, (special("<e>"),), id="EOS at a length stop"),
        pytest.param([EOS], "", EOS, 0, (special("<e>"),), id="nothing but EOS"),
        pytest.param([A, EOT, EOS], "a", EOS, 1, (special("<t>"), special("<e>")), id="two specials"),
        pytest.param([A, EOT, B, EOS], "ab", EOS, 3, (special("<e>"),), id="a special in the middle stays visible"),
        pytest.param([EOT, A], "a", None, 2, (), id="a special at the beginning too"),
        pytest.param([A, NOTHING], "a", None, 1, (hidden(""),), id="an id that spells nothing"),
        pytest.param([A, NOTHING, EOS], "a", EOS, 1, (hidden(""), special("<e>")), id="nothing, then EOS"),
        pytest.param([A, B], "a", B, 1, (hidden("b"),), id="a stop token, trimmed"),
        pytest.param([A, B], "ab", B, 2, (), id="a stop token, untrimmed"),
        pytest.param([A, EOT, B], "a", B, 1, (special("<t>"), hidden("b")), id="a special before a trimmed stop token"),
        pytest.param([B], "", B, 0, (hidden("b"),), id="nothing but a stop token"),
        pytest.param([B, A, B], "ba", B, 2, (hidden("b"),), id="only the last of its kind is the stop token"),
        pytest.param([A, AB], "a", AB, 1, (hidden("ab"),), id="a stop token of two characters"),
    ],
)
def test_what_the_text_lacks_at_its_end_is_the_hidden_tail(
    ids: list[int], text: str, matched: int | None, visible: int, tail: tuple[HiddenToken, ...]
) -> None:
    assert reply(ids, text, matched=matched) == Alignment(EXACT, None, visible, tail)


@pytest.mark.parametrize(
    ("ids", "text", "matched", "visible", "tail"),
    [
        pytest.param([A, EOS], "a<e>", EOS, 2, (), id="EOS, spelled"),
        pytest.param([A, EOS], "a", EOS, 1, (special("<e>"),), id="EOS, trimmed"),
        pytest.param([A, EOT, EOS], "a<t>", EOS, 2, (special("<e>"),), id="another special before it is spelled"),
        pytest.param([EOT, A], "<t>a", None, 2, (), id="in the beginning"),
    ],
)
def test_where_special_tokens_are_not_skipped_they_are_text(
    ids: list[int], text: str, matched: int | None, visible: int, tail: tuple[HiddenToken, ...]
) -> None:
    assert reply(ids, text, matched=matched, skips=False) == Alignment(SpanFlag.NONE, None, visible, tail)


@pytest.mark.parametrize(
    ("text", "stop", "tail"),
    [
        pytest.param("a", "<e>", special("<e>"), id="all of it"),
        pytest.param("a<", "e>", HiddenToken(1, "e>", False, 1), id="the end of it"),
    ],
)
def test_a_special_token_is_trimmed_by_a_stop_string_that_spells_it(text: str, stop: str, tail: HiddenToken) -> None:
    assert reply([A, EOS], text, matched=stop, skips=False).tail == (tail,)


@pytest.mark.parametrize(
    ("ids", "text", "matched", "skips"),
    [
        pytest.param([A, B], "ba", None, True, id="another text"),
        pytest.param([A, B], "a", None, True, id="less, and nothing stopped it"),
        pytest.param([A, B], "abb", None, True, id="more"),
        pytest.param([A, B], "a", A, True, id="another stop token"),
        pytest.param([A, B], "", B, True, id="more trimmed than the stop token"),
        pytest.param([A, EOS], "a<e>", EOS, True, id="a special that should have been skipped"),
        pytest.param([A, EOS], "a", None, False, id="a special that should not"),
        pytest.param([A, B], "a", "<", True, id="a stop string that is not there"),
        pytest.param([A, B], "", "b", True, id="cut before the stop string"),
        pytest.param([A, B], "a", "ba", True, id="a stop string that is there only in part"),
        pytest.param([A, B], "", None, True, id="no text at all"),
        pytest.param([A, E_HEAD], "\ufffd", None, True, id="half a character does not excuse another text"),
    ],
)
def test_ids_that_do_not_explain_the_text_are_a_mismatch(
    ids: list[int], text: str, matched: int | str | None, skips: bool
) -> None:
    assert reply(ids, text, matched=matched, skips=skips) == MISMATCH


def test_a_mismatch_is_used_whole_or_not_at_all() -> None:
    alignment = reply([A, B], "xyz")
    assert measured(TOY, [A, B], "xyz", alignment, sampled=True) == [3, 3]


# Stop strings ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "stop", "text", "visible", "tail"),
    [
        pytest.param([A, SPACE, B], " b", "a", 1, (hidden(" "), hidden("b")), id="trimmed"),
        pytest.param([A, SPACE, B, A], " b", "a", 1, (hidden(" "), hidden("b"), hidden("a")), id="and more behind it"),
        pytest.param([A, SPACE, B, A], " b", "a b", 3, (hidden("a"),), id="untrimmed"),
        pytest.param([A, SPACE, B, A], " b", "a ", 2, (hidden("b"), hidden("a")), id="ends inside of it"),
        pytest.param([A, SPACE, B], " b", "a b", 3, (), id="untrimmed, nothing behind it"),
        pytest.param([SPACE, B], " b", "", 0, (hidden(" "), hidden("b")), id="nothing but the stop string"),
        pytest.param([SPACE, AB, A], "ba", " a", 1, (hidden("b", shown=1), hidden("a")), id="begins inside a token"),
        pytest.param([SPACE, A, BA, B], "ab", " ab", 2, (hidden("a", shown=1), hidden("b")), id="ends inside a token"),
        pytest.param([AB], "b", "a", 0, (hidden("b", shown=1),), id="half of the only token"),
        pytest.param([A, SPACE, EOT, B], " b", "a", 1, (hidden(" "), special("<t>"), hidden("b")), id="special inside"),
        pytest.param([A, EOT, SPACE, B], " b", "a", 1, (special("<t>"), hidden(" "), hidden("b")), id="special before"),
        pytest.param([A, SPACE, B, EOS], " b", "a", 1, (hidden(" "), hidden("b"), special("<e>")), id="EOS behind it"),
        pytest.param(
            [SPACE, EOT, AB], "b", " a", 1, (hidden("b", tokens=2, shown=1),), id="special before a half token"
        ),
        pytest.param(
            [SPACE, EOT, NOTHING, AB, A],
            "ba",
            " a",
            1,
            (hidden("b", tokens=3, shown=1), hidden("a")),
            id="several textless ones before a half token",
        ),
        pytest.param(
            [A, E_HEAD, E_TAIL, B], "éb", "a", 1, (hidden("é", tokens=2), hidden("b")), id="two of a character"
        ),
        pytest.param([A, SPACE, B, SPACE, B], " b", "a", 1, (hidden(" "), hidden("b")) * 2, id="there twice"),
    ],
)
def test_a_stop_string_hides_itself_and_what_is_behind_it(
    ids: list[int], stop: str, text: str, visible: int, tail: tuple[HiddenToken, ...]
) -> None:
    alignment = reply(ids, text, matched=stop)
    assert alignment.flags == EXACT
    assert (alignment.visible, alignment.tail) == (visible, tail)


def test_the_ends_of_a_hidden_tail_are_those_of_the_text_that_spells_it() -> None:
    """A special token has no width in the reply, and its literal's in a later text."""
    assert ends_of(reply([A, SPACE, EOT, B], "a", matched=" b")) == [1, 2, 5, 6]
    assert ends_of(reply([A, EOT, B, SPACE, A], "ab", matched=" a")) == [1, 1, 2, 3, 4]


def test_a_stop_regex_is_not_trimmed() -> None:
    """`matched` is the pattern then, and stands nowhere in the text."""
    assert reply([A, B], "ab", matched="a|b+") == Alignment(EXACT, None, 2, ())


IDS = st.lists(st.sampled_from([A, B, AB, BA, SPACE, SPACE_A, LT, NOTHING, EOS, EOT]), min_size=1, max_size=8)


@settings(max_examples=examples(300))
@given(IDS, st.data())
def test_wherever_a_stop_string_cut_the_text_the_tail_spells_the_rest(ids: list[int], data: st.DataObject) -> None:
    """Before the stop string, behind it, or anywhere inside: no token and no character is lost."""
    spelled = TOY.spell(ids, skip_special=True)
    assume(spelled)
    low = data.draw(st.integers(0, len(spelled) - 1))
    high = data.draw(st.integers(low + 1, len(spelled)))
    stop = spelled[low:high]
    begin = spelled.find(stop)
    text = spelled[: data.draw(st.integers(begin, begin + len(stop)))]
    alignment = reply(ids, text, matched=stop)
    assert alignment.flags == EXACT
    visible = alignment.visible
    assert visible is not None
    assert visible + sum(token.tokens for token in alignment.tail) == len(ids)
    shown = alignment.tail[0].shown if alignment.tail else 0
    assert TOY.spell(ids[:visible], skip_special=True) == text[: len(text) - shown]
    assert text + "".join(token.text for token in alignment.tail if not token.special) == spelled
    assert all(token.shown == 0 for token in alignment.tail[1:]), "only the first can be half visible"
    ends = measured(TOY, ids, text, alignment, sampled=True)
    assert ends == sorted(ends)
    assert ends[:visible] == TOY.counted(ids[:visible], skip_special=True).tolist()


@settings(max_examples=examples(300))
@given(st.lists(st.sampled_from(list(PIECES)), max_size=8), st.booleans())
def test_whatever_is_sampled_explains_its_own_text(ids: list[int], skips: bool) -> None:
    """With halves of characters anywhere."""
    text = TOY.spell(ids, skip_special=skips)
    alignment = reply(ids, text, skips=skips)
    assert not alignment.flags & (SpanFlag.MISMATCH | SpanFlag.WHOLE)
    assert alignment.visible is not None
    assert alignment.visible + len(alignment.tail) == len(ids)
    assert TOY.spell(ids[: alignment.visible], skip_special=skips) == text
    ends = measured(TOY, ids, text, alignment, sampled=True)
    counted = TOY.counted(ids, skip_special=skips).tolist()
    assert ends[: alignment.visible] == counted[: alignment.visible]


SOME = st.lists(st.sampled_from([*PIECES, 999, 1000]), max_size=5)


@settings(max_examples=examples(300))
@given(SOME, SOME, st.booleans(), st.sampled_from(["b", "e>", "ab"]))
def test_a_reply_that_shows_token_0_for_an_unknown_id_lies_over_its_text_as_one_with_token_0(
    before: list[int], behind: list[int], skips: bool, stop: str
) -> None:
    ids = [*before, 999, *behind]
    shown = [token_id if token_id in PIECES else A for token_id in ids]
    text, found_stop, _ = TOY.spell(shown, skip_special=skips).partition(stop)
    matched = stop if found_stop else None
    assume(not TOY.spell(ids, skip_special=skips).startswith(text))  # else it explains the text without token 0
    found, known = (reply(one, text, matched=matched, skips=skips) for one in (ids, shown))
    assert not known.flags & SpanFlag.MISMATCH
    assert (found.flags, found.visible, found.tail) == (known.flags, known.visible, known.tail)
    assert measured(TOY, ids, text, found, sampled=True) == measured(TOY, shown, text, known, sampled=True)


@pytest.mark.parametrize("last", [EOT, 999])
def test_a_stop_token_is_trimmed_behind_an_unknown_id(last: int) -> None:
    found = reply([B, 999, last], "ba", matched=last, skips=False)
    assert (found.flags, found.visible, ends_of(found)) == (SpanFlag.NONE, 2, [1, 2, 5 if last == EOT else 3])


@settings(max_examples=examples(300))
@given(st.lists(st.sampled_from([*PIECES, 999]), max_size=8), st.booleans(), st.booleans(), st.data())
def test_the_text_of_all_ids_is_found_without_looking_at_each(
    ids: list[int], skips: bool, stopped: bool, data: st.DataObject
) -> None:
    """Whether the ids are a list or an array. The slow way gives the same alignment."""
    text = TOY.spell(ids[: data.draw(st.integers(0, len(ids)))], skip_special=skips)
    matched = ids[-1] if ids and stopped else None
    found = reply(ids, text, matched=matched, skips=skips)
    assert align_reply(TOY, Numbers("i", ids), text, skips_special=skips, matched=matched) == found
    assert align_reply(COMPARES_NOTHING, ids, text, skips_special=skips, matched=matched) == found


# Half characters ---------------------------------------------------------------------------------------------------------


def test_a_reply_that_ends_inside_a_character_is_exact_as_it_was_sent() -> None:
    shown = reply([A, E_HEAD], "a\ufffd")
    assert (shown.flags, shown.visible, shown.tail, ends_of(shown)) == (EXACT, 2, (), [1, 2])
    held_back = reply([A, E_HEAD], "a")
    assert (held_back.flags, held_back.visible, held_back.tail) == (EXACT, 1, (special(REPLACEMENT),))


def test_the_two_halves_of_a_character_are_one_character() -> None:
    alignment = reply([A, E_HEAD, E_TAIL, EOS], "aé", matched=EOS)
    assert alignment == Alignment(EXACT, None, 3, (special("<e>"),))
    assert measured(TOY, [A, E_HEAD, E_TAIL, EOS], "aé", alignment, sampled=True) == [1, 2, 2, 5]


def test_a_broken_character_before_the_end_has_ends_that_count_it() -> None:
    alignment = reply([E_TAIL, A, EOS], "\ufffda", matched=EOS)
    assert (alignment.flags, alignment.visible, ends_of(alignment)) == (EXACT, 2, [1, 2, 5])


@pytest.mark.parametrize(
    ("ids", "text", "matched"),
    [
        pytest.param([E_TAIL, A], "a", None, id="the prompt had the first half"),
        pytest.param([E_TAIL, A], "\ufffd\ufffda", None, id="an engine that decodes in pieces shows it twice"),
        pytest.param([A, E_HEAD], "a\ufffd\ufffd", None, id="or at the end"),
        pytest.param([E_TAIL, A, EOS], "a", EOS, id="with EOS"),
        pytest.param([E_TAIL, A, B], "a", B, id="with a stop token, trimmed"),
    ],
)
def test_characters_that_differ_at_an_edge_leave_a_reply_whole_and_exact(
    ids: list[int], text: str, matched: int | None
) -> None:
    alignment = reply(ids, text, matched=matched)
    assert not alignment.flags & SpanFlag.MISMATCH
    assert alignment.visible is not None
    assert alignment.visible + sum(token.tokens for token in alignment.tail) == len(ids)
    assert alignment.flags == SPLIT, "never cut inside"


@pytest.mark.parametrize(
    ("sampled", "text", "exact"),
    [
        (["<0x0A>", "<0x0A>", "Hello"], "\ufffd\ufffdHello", True),
        (["<0x0A>", "Hello"], "\ufffdHello", True),
        (["<0xEB>", "<0xB7>", "<0x81>"], "\ufffd\ufffd\ufffd", True),
        (["<0x0A>", "Hello", "</s>"], "\ufffdHello", True),
        (["<0x0A>", "Hello"], "Hello", False),
        (["<0x0A>", "Hello"], "\ufffdOther", False),
        (["Hello", "<0x0A>", "Hello"], "Hello\ufffdHello", False),
        (["Hello"], "\ufffdHello there", False),
    ],
)
def test_byte_tokens_that_break_with_those_of_the_prompt_leave_a_reply_whole_and_exact(
    sampled: list[str], text: str, exact: bool
) -> None:
    """Behind `뷁뷁`, six byte tokens, SGLang shows a newline as `�`: it decodes it with the last five."""
    ids = [load("mistral-v1").token_to_id(token) for token in sampled]
    alignment = align_reply(tokenizer("mistral-v1").vocabulary, ids, text, skips_special=True, matched=None)
    assert alignment.flags == (SPLIT if exact else SpanFlag.WHOLE | SpanFlag.MISMATCH)


@pytest.mark.parametrize(
    ("ids", "text", "matched", "tail"),
    [
        pytest.param([A, BOTH], "a", None, (special("b\ufffd"),), id="with the character before it"),
        pytest.param([A, BOTH, BOTH], "a", None, (special("b\ufffd"), special("b\ufffd")), id="twice"),
        pytest.param([BOTH], "", None, (special("b\ufffd"),), id="nothing is shown"),
        pytest.param([A, BOTH, EOS], "a", EOS, (special("b\ufffd"), special("<e>")), id="with EOS"),
        pytest.param([A, BOTH, EOS], "a", None, (special("b\ufffd"), special("<e>")), id="EOS at a length"),
    ],
)
def test_a_decoder_that_waits_for_the_rest_holds_back_the_whole_token(
    ids: list[int], text: str, matched: int | None, tail: tuple[HiddenToken, ...]
) -> None:
    found = align_reply(HOLDS_BACK, ids, text, skips_special=True, matched=matched)
    assert (found.flags, found.visible, found.tail) == (EXACT, len(ids) - len(tail), tail)


@pytest.mark.parametrize(
    ("ids", "text"),
    [([A, B, BOTH], "a"), ([A, BOTH, B], "a"), ([A, BOTH], "ab"), ([A, BOTH] * 9, "a")],
    ids=["whole characters are shown", "the rest has come", "half a token", "too much"],
)
def test_no_decoder_holds_back_more(ids: list[int], text: str) -> None:
    found = align_reply(HOLDS_BACK, ids, text, skips_special=True, matched=None)
    assert bool(found.flags & SpanFlag.MISMATCH) == (text == "a")


@pytest.mark.parametrize(
    ("ids", "text", "visible"),
    [([A, B, B], "a", 1), ([A, B, BOTH], "a", 1), ([A, B, EOS], "a", 1), ([A, B], "", 0), ([A, EOS, B], "a", 1)],
    ids=["characters", "with half of one", "with EOS", "all of it", "behind EOS"],
)
def test_the_end_of_an_unfinished_reply_may_be_held_back(ids: list[int], text: str, visible: int) -> None:
    def found(shown: str, *, unfinished: bool) -> Alignment:
        return align_reply(HOLDS_BACK, ids, shown, skips_special=True, matched=None, unfinished=unfinished)

    assert found(text, unfinished=False).flags & SpanFlag.MISMATCH
    assert found("b", unfinished=True).flags & SpanFlag.MISMATCH
    alignment = found(text, unfinished=True)
    assert (alignment.flags, alignment.visible) == (EXACT, visible)
    assert visible + sum(token.tokens for token in alignment.tail) == len(ids)


def test_a_broken_character_in_the_middle_is_no_edge() -> None:
    assert reply([A, E_TAIL, B], "ab").flags & SpanFlag.MISMATCH


# Real vocabularies -------------------------------------------------------------------------------------------------------

EOS_TEXT = {"qwen": "<|im_end|>", "tekken": "</s>", "mistral-v1": "</s>", "mistral-v1-legacy": "</s>"}


def eos_of(name: Name) -> int:
    return next(number for number, content in added(name).items() if content == EOS_TEXT[name])


@pytest.mark.parametrize("name", ALL)
def test_a_reply_ends_with_eos_in_its_ids_and_not_in_its_text(name: Name) -> None:
    made, eos = tokenizer(name), eos_of(name)
    ids = [*made.encode_tail("The answer is 42."), eos]
    for text, matched, skips in (
        ("The answer is 42.", eos, True),
        ("The answer is 42.", None, True),
        ("The answer is 42.", eos, False),
    ):
        alignment = align_reply(made.vocabulary, ids, text, skips_special=skips, matched=matched)
        assert alignment.visible == len(ids) - 1
        assert alignment.tail == (special(EOS_TEXT[name]),)
        assert not alignment.flags & (SpanFlag.WHOLE | SpanFlag.MISMATCH)
    spelled = "The answer is 42." + EOS_TEXT[name]
    assert align_reply(made.vocabulary, ids, spelled, skips_special=False, matched=eos).visible == len(ids)


@pytest.mark.parametrize("name", ALL)
def test_a_stop_string_is_found_wherever_the_text_was_cut_in_it(name: Name) -> None:
    made = tokenizer(name)
    whole, stop = "Action: look\nObservation: I see", "\nObservation:"
    ids = made.encode_tail(whole)
    begin = whole.find(stop)
    for cut in range(begin, begin + len(stop) + 1):
        alignment = align_reply(made.vocabulary, ids, whole[:cut], skips_special=True, matched=stop)
        assert alignment.flags == EXACT
        assert whole[:cut] + "".join(token.text for token in alignment.tail) == whole
        assert (alignment.visible or 0) + sum(token.tokens for token in alignment.tail) == len(ids)
    for cut in (begin - 1, begin + len(stop) + 1):
        wrong = align_reply(made.vocabulary, ids, whole[:cut], skips_special=True, matched=stop)
        assert wrong.flags & SpanFlag.MISMATCH


@pytest.mark.parametrize("name", ALL)
def test_any_sampled_ids_explain_their_text_and_no_other(name: Name) -> None:
    vocabulary, eos = tokenizer(name).vocabulary, eos_of(name)

    @slow
    @given(sampled_ids(name), st.booleans(), st.booleans())
    def check(ids: list[int], skips: bool, stopped: bool) -> None:
        text = vocabulary.spell(ids, skip_special=skips)
        sampled = [*ids, eos] if stopped else ids
        alignment = align_reply(vocabulary, sampled, text, skips_special=skips, matched=eos if stopped else None)
        assert not alignment.flags & (SpanFlag.MISMATCH | SpanFlag.WHOLE)
        visible = alignment.visible
        assert visible is not None
        assert visible + sum(token.tokens for token in alignment.tail) == len(sampled)
        ends = measured(vocabulary, sampled, text, alignment, sampled=True)
        assert ends == sorted(ends)
        assert (ends[visible - 1] if visible else 0) == len(text)
        other = align_reply(vocabulary, sampled, text + "x", skips_special=skips, matched=None)
        assert other.flags & SpanFlag.MISMATCH

    check()


@pytest.mark.parametrize("name", ["qwen", "tekken"])
def test_what_a_decoder_shows_in_pieces_is_explained(name: Name) -> None:
    """The decoder is the one that vLLM uses, behind a prompt."""
    made, real = tokenizer(name), load(name)
    prompt = real.encode("A prompt: ", add_special_tokens=False).ids

    @slow
    @given(sampled_ids(name), st.booleans())
    def check(ids: list[int], skips: bool) -> None:
        decoder = DecodeStream(ids=prompt, skip_special_tokens=skips)
        text = "".join(decoder.step(real, one) or "" for one in ids)
        alignment = align_reply(made.vocabulary, ids, text, skips_special=skips, matched=None)
        assert not alignment.flags & SpanFlag.MISMATCH
        visible = alignment.visible
        assert visible is not None
        assert visible + sum(token.tokens for token in alignment.tail) == len(ids)

    check()


@pytest.mark.parametrize("name", ["mistral-v1", "mistral-v1-legacy"])
@slow
@given(text=st.text(alphabet="ab é\n<", min_size=1, max_size=12), stop=st.integers(0, 6))
def test_a_reply_decoded_by_itself_lacks_its_first_space(name: Name, text: str, stop: int) -> None:
    """SentencePiece takes it for the dummy one unless it is shown what stands before. The ids are the same ones."""
    vocabulary = tokenizer(name).vocabulary
    ids = tokenizer(name).encode_tail(" " + text)
    assume(vocabulary.spell(ids) == " " + text)
    whole = align_reply(vocabulary, ids, text, skips_special=True, matched=None)
    assert not whole.flags & (SpanFlag.MISMATCH | SpanFlag.WHOLE)
    ends = measured(vocabulary, ids, text, whole, sampled=True)
    assert ends[-1] == len(text)
    assert ends == [max(0, end - 1) for end in vocabulary.begun(ids)]
    if 0 < stop < len(text) and text.find(text[stop:]) == stop:
        cut = align_reply(vocabulary, ids, text[:stop], skips_special=True, matched=text[stop:])
        assert not cut.flags & SpanFlag.MISMATCH
        assert "".join(token.text for token in cut.tail) == text[stop:]
