"""What ids spell and where they end, against a byte-by-byte recount and against the decoder a worker uses."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from middleware_hub.spans.chain import SpanFlag, TokenSpan, pack_ids
from middleware_hub.tokenizer import vocabulary as vocabulary_module
from middleware_hub.tokenizer.vocabulary import Vocabulary
from tests.conftest import examples
from tests.middleware_hub.real import ALL, recount, reference, sampled_ids, texts, tokenizer
from tests.middleware_hub.toy import AB, E_HEAD, E_TAIL, EOS, EOT, NOTHING, PIECES, SPACE_A, A, B, toy_vocabulary
from tests.support.vocabularies import Name

slow = settings(
    deadline=None, max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


def context(ids: list[int], text: str, flags: SpanFlag = SpanFlag.NONE) -> TokenSpan:
    return TokenSpan(None, 0, 0, pack_ids(ids), len(text), flags=flags)


def sampled(ids: list[int], text: str, flags: SpanFlag = SpanFlag.SKIPS_SPECIAL, visible: int = -1) -> TokenSpan:
    return TokenSpan(None, 0, 0, pack_ids(ids), len(text), versions="1", flags=flags, visible=visible)


TOY = toy_vocabulary()
ANY_IDS = st.lists(st.sampled_from([*PIECES, -1, -(2**31), 999, 2**31 - 1]), max_size=6)


@given(ANY_IDS, ANY_IDS, st.booleans())
def test_ids_spell_a_text_if_their_bytes_are_the_same(ids: list[int], others: list[int], skips: bool) -> None:
    kept = [i for i in ids if not (skips and i in TOY.special_ids)]
    spelled = b"".join(PIECES.get(i, b"") for i in kept)
    for text in (TOY.spell(ids), TOY.spell(kept), TOY.spell(others)):
        assert TOY.spells(ids, text, skip_special=skips) == (spelled == text.encode())


class Table:
    """A table of spellings that notes how many ids each call is for."""

    def __init__(self, table: NDArray[np.object_], calls: list[int]) -> None:
        self._table, self._calls = table, calls

    def take(self, ids: NDArray[np.uint32], mode: Literal["clip"]) -> NDArray[np.object_]:
        self._calls.append(len(ids))
        return self._table.take(ids, mode=mode)


@given(ANY_IDS, st.booleans())
def test_many_ids_are_spelled_in_several_calls(ids: list[int], skips: bool) -> None:
    """One call for all of them would hold up the event loop, from a thread as well."""
    whole, calls = TOY.lossy(ids, skip_special=skips), list[int]()
    noted: Any = toy_vocabulary()
    noted._spelled, noted._spelled_if_skipping = Table(TOY._spelled, calls), Table(TOY._spelled_if_skipping, calls)
    with pytest.MonkeyPatch.context() as few:
        few.setattr(vocabulary_module, "_AT_ONCE", 2)
        assert noted.lossy(ids, skip_special=skips) == whole
    assert max(calls, default=0) <= 2


# Real vocabularies -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_any_ids_spell_and_end_where_a_recount_of_their_bytes_says(name: Name) -> None:
    vocabulary = tokenizer(name).vocabulary

    @slow
    @given(sampled_ids(name), st.booleans())
    def check(ids: list[int], skip: bool) -> None:
        text, ends = recount(name, ids, skip_special=skip)
        assert vocabulary.spell(ids, skip_special=skip) == text
        assert vocabulary.counted(ids, skip_special=skip).tolist() == ends
        if "\ufffd" not in text:
            assert vocabulary.begun(ids, skip_special=skip).tolist() == ends

    check()


@pytest.mark.parametrize("name", ["qwen", "tekken"])
@pytest.mark.parametrize(
    "spelled", [b"\xed\xa1", b"\xed\xa1\x80", b"\xe0\x80", b"\xf4\x90", b"\xc0\x80", b"\xf0\x9f\x98"]
)
@pytest.mark.parametrize("behind", [b"", b"a", "é".encode(), b"\xed"])
def test_bytes_that_are_no_character_end_where_they_are_known_to_be_none(
    name: Name, spelled: bytes, behind: bytes
) -> None:
    """Half a surrogate looks like the beginning of something."""
    vocabulary = tokenizer(name).vocabulary
    one_byte = {piece: number for number in range(2000) if len(piece := vocabulary.piece(number)) == 1}
    ids = [one_byte[bytes([byte])] for byte in spelled + behind]
    text, ends = recount(name, ids)
    assert vocabulary.spell(ids) == text
    assert vocabulary.counted(ids).tolist() == ends


@pytest.mark.parametrize("name", ALL)
def test_the_ends_of_an_encoded_text_need_no_slow_path(name: Name) -> None:
    """`ends` works them out by a sum over a table; that is what counting characters gives."""
    made = tokenizer(name)

    @slow
    @given(texts(name))
    @example("你好 😀 é")
    @example("\ufffd")
    def check(text: str) -> None:
        for ids in (made.encode_start(text), made.encode_tail(text)):
            spelled, ends = recount(name, ids)
            assert made.vocabulary.ends(context(ids, spelled)).tolist() == ends
            assert made.vocabulary.begun(ids).tolist() == ends
            assert made.vocabulary.counted(ids).tolist() == ends
            assert (ends[-1] if ends else 0) == len(spelled)

    check()


@pytest.mark.parametrize("name", ALL)
def test_sampled_ids_spell_what_a_worker_sends_for_them(name: Name) -> None:
    """SGLang decodes the last prompt tokens with the sampled ones and cuts the prompt's text off."""
    vocabulary, decoder = tokenizer(name).vocabulary, reference(name)
    prompt = decoder("Say something nice")["input_ids"][-5:]

    @slow
    @given(sampled_ids(name), st.booleans())
    def check(ids: list[int], skip: bool) -> None:
        before = decoder.decode(prompt, skip_special_tokens=skip)
        together = decoder.decode(prompt + ids, skip_special_tokens=skip)
        assert together.startswith(before)
        assert vocabulary.spell(ids, skip_special=skip) == together[len(before) :]

    check()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("character", ["🫎", "龘", "𝔘", "ꙮ"])
def test_tokens_of_one_character_share_an_end(name: Name, character: str) -> None:
    """So that a cut takes all of them or none."""
    made = tokenizer(name)
    ids = made.encode_tail("a" + character + "b")
    first, *shared, last = made.vocabulary.ends(context(ids, "a" + character + "b")).tolist()
    assert (first, last) == (1, 3)
    assert set(shared) == {2}
    assert len(shared) > 1


@pytest.mark.parametrize("name", ["mistral-v1", "mistral-v1-legacy"])
def test_every_byte_of_a_broken_sentencepiece_run_is_a_character(name: Name) -> None:
    """A line feed is a byte token, too: next to half a character it is lost with it."""
    vocabulary = tokenizer(name).vocabulary
    base = reference(name).convert_tokens_to_ids("<0x00>")
    newline, head, tail = base + 0x0A, base + 0xC3, base + 0xA9
    assert vocabulary.spell([newline, head]) == "\ufffd\ufffd"
    assert vocabulary.counted([newline, head]).tolist() == [1, 2]
    assert vocabulary.spell([newline, head, tail]) == "\né"
    assert vocabulary.counted([newline, head, tail]).tolist() == [1, 2, 2]


@pytest.mark.parametrize("name", ["mistral-v1", "mistral-v1-legacy"])
def test_a_skipped_special_token_does_not_end_a_sentencepiece_run(name: Name) -> None:
    vocabulary = tokenizer(name).vocabulary
    base = reference(name).convert_tokens_to_ids("<0x00>")
    eos = reference(name).convert_tokens_to_ids("</s>")
    ids = [base + 0xC3, eos, base + 0xA9]
    assert vocabulary.spell(ids, skip_special=True) == "é"
    assert vocabulary.counted(ids, skip_special=True).tolist() == [1, 1, 1]
    assert vocabulary.spell(ids) == "\ufffd</s>\ufffd"
    assert vocabulary.counted(ids).tolist() == [1, 5, 6]


# The rule, on a toy ------------------------------------------------------------------------------------------------------


def test_an_open_character_counts_for_the_token_that_begins_it() -> None:
    vocabulary = toy_vocabulary()
    assert vocabulary.counted([A, E_HEAD]).tolist() == [1, 2]
    assert vocabulary.counted([A, E_HEAD, E_TAIL, B]).tolist() == [1, 2, 2, 3]
    assert vocabulary.counted([E_HEAD, A]).tolist() == [1, 2]
    assert vocabulary.counted([E_TAIL, A]).tolist() == [1, 2]


def test_ids_that_are_not_known_spell_nothing() -> None:
    """Engines pad vocabularies; decoders skip what they do not know."""
    vocabulary = toy_vocabulary()
    for unknown in (len(vocabulary), 10**6, -1):
        assert vocabulary.spell([A, unknown, B]) == "ab"
        assert vocabulary.piece(unknown) == b""
        assert vocabulary.literal(unknown) == ""
        assert vocabulary.begun([A, unknown, B]).tolist() == [1, 1, 2]
        assert vocabulary.counted([A, unknown, B]).tolist() == [1, 1, 2]
        assert vocabulary.textless(sampled([unknown], ""), 0)
        assert vocabulary.ends(sampled([A, unknown], "a")).tolist() == [1, 1]
        assert vocabulary.last_boundary(context([unknown], ""), 1) == 0


def test_special_tokens_have_no_width_where_a_worker_left_them_out() -> None:
    vocabulary = toy_vocabulary()
    assert vocabulary.ends(sampled([A, EOS, B], "ab")).tolist() == [1, 1, 2]
    assert vocabulary.ends(sampled([A, EOS, B], "a<e>b", SpanFlag.NONE)).tolist() == [1, 4, 5]


def test_special_tokens_of_the_hidden_tail_are_as_wide_as_a_later_text_may_spell_them() -> None:
    vocabulary = toy_vocabulary()
    assert vocabulary.ends(sampled([EOS, A, EOS, EOT], "a", visible=2)).tolist() == [0, 1, 4, 7]


def test_a_bos_that_the_text_does_not_spell_has_no_width() -> None:
    vocabulary = toy_vocabulary()
    assert vocabulary.ends(context([EOS, A], "a", SpanFlag.BOS)).tolist() == [0, 1]
    assert vocabulary.ends(context([EOS, EOS], "<e>", SpanFlag.BOS)).tolist() == [0, 3]


def test_a_dummy_space_has_no_width() -> None:
    vocabulary = toy_vocabulary()
    assert vocabulary.ends(context([SPACE_A, B], "ab", SpanFlag.DUMMY)).tolist() == [1, 2]
    assert vocabulary.ends(context([EOS, SPACE_A, B], "ab", SpanFlag.DUMMY | SpanFlag.BOS)).tolist() == [0, 1, 2]


def test_what_is_not_known_ends_at_the_end_of_the_span() -> None:
    assert toy_vocabulary().ends(context([A, B, A], "xyz", SpanFlag.WHOLE)).tolist() == [3, 3, 3]


def test_ends_are_kept_with_the_span() -> None:
    vocabulary, span = toy_vocabulary(), context([AB, A], "aba")
    first = vocabulary.ends(span)
    assert span.ends is not None
    assert np.array_equal(vocabulary.ends(span), first)


def test_ends_that_came_with_a_span_are_believed() -> None:
    span = TokenSpan(None, 0, 0, pack_ids([A, B]), 5, ends=pack_ids([2, 5]))
    assert toy_vocabulary().ends(span).tolist() == [2, 5]


def test_tokens_without_text() -> None:
    vocabulary = toy_vocabulary()
    span = sampled([A, NOTHING, EOS, E_TAIL], "a")
    assert [vocabulary.textless(span, k) for k in range(4)] == [False, True, True, False]
    assert not vocabulary.textless(sampled([EOS], "<e>", SpanFlag.NONE), 0)


def test_the_last_boundary_is_behind_an_added_token_that_the_text_spells() -> None:
    vocabulary = toy_vocabulary()
    assert vocabulary.last_boundary(context([A, EOS, B, EOT, A], "a<e>b<t>a"), 5) == 4
    assert vocabulary.last_boundary(context([A, EOS, B, EOT, A], "a<e>b<t>a"), 3) == 2
    assert vocabulary.last_boundary(context([A, EOS, B, EOT, A], "a<e>b<t>a"), 1) == 0
    assert vocabulary.last_boundary(context([A, B], "ab"), 2) == 0


def test_a_bos_that_the_text_does_not_spell_is_no_boundary() -> None:
    """Behind it a text is encoded as the start that it is."""
    vocabulary = toy_vocabulary()
    assert vocabulary.last_boundary(context([EOS, A], "a", SpanFlag.BOS), 2) == 0
    assert vocabulary.last_boundary(context([EOS, A], "<e>a"), 2) == 1
    assert vocabulary.last_boundary(context([EOS, EOS, A], "<e>a", SpanFlag.BOS), 3) == 2


def test_there_is_no_boundary_in_what_is_not_known() -> None:
    vocabulary = toy_vocabulary()
    assert vocabulary.last_boundary(context([EOS, A], "?", SpanFlag.WHOLE), 2) == 0
    for entries in (len(vocabulary), len(vocabulary) + 1):
        beyond = [EOS + times * entries for times in (-2, -1, 1, 2)]
        assert vocabulary.last_boundary(context(beyond, ""), 4) == 0
        assert vocabulary.boundaries(np.array([A, EOS, *beyond], dtype=np.int32)).tolist() == [2]


def test_holes_in_a_vocabulary_spell_nothing() -> None:
    vocabulary = Vocabulary({0: b"a", 5: b"b"}, special=[99])
    assert len(vocabulary) == 6
    assert vocabulary.spell([0, 3, 5]) == "ab"
    assert vocabulary.special_ids == frozenset()


def test_tokens_share_a_character_over_a_token_without_text() -> None:
    """The second half of "é" begins an "x" as well: whoever takes the first half takes all of them."""
    known = Vocabulary({0: b"\xc3", 1: b"", 2: b"\xa9x", 3: b"a"}, special=[])
    assert known.begun([3, 0, 2, 3]).tolist() == [1, 3, 3, 4]
    assert known.begun([3, 0, 1, 2, 3]).tolist() == [1, 3, 3, 3, 4]
