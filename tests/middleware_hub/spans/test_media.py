"""Media spans and marks, against plain loops over lists of ids and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from middleware_hub.spans.chain import ID_BYTES, SpanFlag, TokenSpan, pack_ids, unpack_ids
from middleware_hub.spans.media import (
    MARK_LENGTH,
    Encoded,
    MediaSpan,
    UnlikePromptError,
    chain_media,
    collapsed,
    digests_in,
    keyed_ends,
    keyed_text,
    learned,
    mark,
    plain_length,
    plain_text,
    without_runs,
)

PAD, LEAST = 9, 4
DIGESTS = [f"sha256:{number:064x}" for number in range(4)]
Item = int | str
"""An id, or the digest of a picture."""

ids = st.integers(0, PAD)  # a pad among them is one that the model sampled
plain_ids = st.integers(0, PAD - 1)
digests = st.sampled_from(DIGESTS)
lengths_of_all = st.fixed_dictionaries({digest: st.integers(LEAST, 9) for digest in DIGESTS})


def items(number: st.SearchStrategy[int] = ids) -> st.SearchStrategy[list[Item]]:
    return st.lists(st.one_of(number, digests), max_size=14)


def compact(of: Sequence[Item]) -> list[int]:
    return [PAD if isinstance(one, str) else one for one in of]


def expanded(of: Sequence[Item], lengths: Mapping[str, int]) -> tuple[list[int], list[MediaSpan]]:
    found, media = list[int](), list[MediaSpan]()
    for one in of:
        if isinstance(one, int):
            found.append(one)
            continue
        length = lengths.get(one, 1)
        media.append(MediaSpan(len(found), length, one))
        for _ in range(length):
            found.append(PAD)
    return found, media


def encoded(of: Sequence[Item], flags: SpanFlag = SpanFlag.NONE) -> Encoded:
    pictures = tuple((place, one) for place, one in enumerate(of) if isinstance(one, str))
    ends = np.array([3 * (place + 1) for place in range(len(of))], dtype=np.int32)
    return Encoded(pack_ids(compact(of)), ends, flags, pictures)


# Texts -------------------------------------------------------------------------------------------------------------------

PLACEHOLDER = "<pad>"
words = st.text(st.sampled_from("ab<pd>é😀\n"), max_size=6).filter(lambda text: PLACEHOLDER not in text)
pieces = st.lists(st.one_of(words, digests.map(lambda one: (one,))), max_size=8)
Piece = str | tuple[str]


class Texts(NamedTuple):
    plain: str
    keyed: str
    digests: list[str]


def texts(of: Sequence[Piece]) -> Texts:
    plain = keyed = ""
    found = []
    for piece in of:
        if isinstance(piece, str):
            plain, keyed = plain + piece, keyed + piece
        else:
            plain, keyed = plain + PLACEHOLDER, keyed + "\ufdd0" + piece[0] + "\ufdd1"
            found.append(piece[0])
    return Texts(plain, keyed, found)


@given(pieces)
def test_texts_go_there_and_back(of: list[Piece]) -> None:
    plain, keyed, pictures = texts(of)
    assume(plain.count(PLACEHOLDER) == len(pictures))  # pieces may spell another one together
    assert keyed_text(plain, PLACEHOLDER, pictures) == keyed
    assert plain_text(keyed, PLACEHOLDER) == plain
    assert digests_in(keyed) == pictures
    assert len(keyed) == len(plain) + len(pictures) * (MARK_LENGTH - len(PLACEHOLDER))
    end, seen = 0, 0
    for piece in of:  # at the end of each piece, and within each text
        wide, narrow = (len(piece), len(piece)) if isinstance(piece, str) else (MARK_LENGTH, len(PLACEHOLDER))
        if isinstance(piece, str):
            for inside in range(len(piece)):
                assert plain_length(keyed, PLACEHOLDER, end + inside) == seen + inside
        end, seen = end + wide, seen + narrow
        assert plain_length(keyed, PLACEHOLDER, end) == seen


@given(pieces, st.data())
def test_ends_in_plain_text_are_moved_to_keyed_text(of: list[Piece], data: st.DataObject) -> None:
    """The place of each plain character in keyed text; of a placeholder, only its end can be the end of an id."""
    plain, keyed, pictures = texts(of)
    assume(plain.count(PLACEHOLDER) == len(pictures))
    places = [(0, 0)]
    for piece in of:
        narrow, wide = places[-1]
        if isinstance(piece, str):
            places += [(narrow + number, wide + number) for number in range(1, len(piece) + 1)]
        else:
            places.append((narrow + len(PLACEHOLDER), wide + MARK_LENGTH))
    chosen = sorted(data.draw(st.lists(st.sampled_from(places), max_size=12)))
    ends = np.array([narrow for narrow, _ in chosen], dtype=np.int32)
    assert keyed_ends(ends, keyed, PLACEHOLDER).tolist() == [wide for _, wide in chosen]


def test_a_text_with_another_number_of_placeholders_is_our_own_fault() -> None:
    with pytest.raises(AssertionError):
        keyed_text(f"a{PLACEHOLDER}", PLACEHOLDER, [])


def test_a_half_mark_is_no_mark() -> None:
    for text in (mark(DIGESTS[0])[:-1], mark(DIGESTS[0])[1:], mark("sha256:0"), mark(DIGESTS[0].upper())):
        assert digests_in(text) == []
        assert plain_text(text, PLACEHOLDER) == text


# Ids ---------------------------------------------------------------------------------------------------------------------


@given(items(), st.dictionaries(digests, st.integers(LEAST, 9)))
def test_expanded_ids_have_a_run_for_each_picture(of: list[Item], lengths: dict[str, int]) -> None:
    packed, ends, media = encoded(of).expanded(lengths)
    wanted, spans = expanded(of, lengths)
    assert unpack_ids(packed) == wanted
    assert list(media) == spans
    assert ends is not None
    told = np.frombuffer(ends, dtype=np.int32).tolist()
    runs = [lengths.get(one, 1) if isinstance(one, str) else 1 for one in of]
    assert told == [3 * (place + 1) for place, run in enumerate(runs) for _ in range(run)]


@given(items(), st.dictionaries(digests, st.integers(LEAST, 9)))
def test_collapsed_ids_are_those_before_the_expansion(of: list[Item], lengths: dict[str, int]) -> None:
    """Whatever stands beside a picture: another one, or a placeholder that the model sampled."""
    packed, _, media = encoded(of).expanded(lengths)
    assert unpack_ids(collapsed(packed, media)) == compact(of)


def test_ids_without_ends_have_none_afterwards() -> None:
    found = encoded([1, DIGESTS[0]])._replace(ends=None)
    assert found.expanded({DIGESTS[0]: 4})[1] is None
    assert found.after(1, 3).ends is None


@given(items(), st.data())
def test_what_is_behind_some_ids_is_what_was_encoded_of_it(of: list[Item], data: st.DataObject) -> None:
    count = data.draw(st.integers(0, len(of)))
    rest = encoded(of, SpanFlag.BOS | SpanFlag.DUMMY | SpanFlag.GIVEN).after(count, 3 * count)
    wanted = encoded(of[count:])
    assert (rest.ids, rest.pictures) == (wanted.ids, wanted.pictures)
    assert rest.ends is not None
    assert wanted.ends is not None
    assert rest.ends.tolist() == wanted.ends.tolist()
    begins = SpanFlag.NONE if count else SpanFlag.BOS | SpanFlag.DUMMY
    assert rest.flags == SpanFlag.GIVEN | begins


@given(st.lists(items(), min_size=1, max_size=4), lengths_of_all, st.data())
def test_a_chain_has_the_media_spans_of_its_parts(
    parts: list[list[Item]], lengths: dict[str, int], data: st.DataObject
) -> None:
    """A chain that leaves its parent between two items, as every cut does."""
    span, take, kept = None, 0, list[Item]()
    for number, part in enumerate(parts):
        own, media = expanded(part, lengths)
        span = TokenSpan(span, take, 0, pack_ids(own), len(own), media=tuple(map(tuple, media)))  # type: ignore[arg-type]
        cut = len(part) if number + 1 == len(parts) else data.draw(st.integers(0, len(part)))
        take, kept = len(expanded(part[:cut], lengths)[0]), [*kept, *part[:cut]]
    assert chain_media(span, take) == expanded(kept, lengths)[1]


def test_no_chain_has_no_media() -> None:
    assert chain_media(None, 0) == []


# What an engine tells ----------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A prompt, and the ids that an honest engine computes with."""

    items: list[Item]
    sent: bytes
    media: list[MediaSpan]
    unknown: set[str]
    lengths: dict[str, int]
    returned: list[int]

    def learned(self, returned: Sequence[int]) -> dict[str, int]:
        return learned(self.sent, self.media, self.unknown, pack_ids(list(returned)), LEAST)


def case(of: list[Item], lengths: dict[str, int], unknown: set[str]) -> Case:
    """Return the case. A picture that is known stands in `sent` with its run, another one with one id."""
    known = {digest: length for digest, length in lengths.items() if digest not in unknown}
    sent, media = expanded(of, known)
    asked = {one for one in of if isinstance(one, str)} & unknown
    return Case(of, pack_ids(sent), media, asked, lengths, expanded(of, lengths)[0])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Return a prompt in which no two pictures stand side by side: templates put ids around each."""
    of = list[Item]()
    for one in draw(items(plain_ids)):
        of += [one] if isinstance(one, int) else [PAD - 1, one, PAD - 2]
    return case(of, draw(lengths_of_all), draw(st.sets(digests)))


@given(cases())
def test_the_lengths_of_pictures_are_learned(one: Case) -> None:
    assert one.learned(one.returned) == {digest: one.lengths[digest] for digest in one.unknown}


@given(cases(), st.data())
def test_another_id_is_refused(one: Case, data: st.DataObject) -> None:
    assume(one.returned)
    place = data.draw(st.integers(0, len(one.returned) - 1))
    other = data.draw(st.integers(0, PAD).filter(lambda number: number != one.returned[place]))
    changed = [*one.returned[:place], other, *one.returned[place + 1 :]]
    assume(not _is_another_length(one, changed))
    with pytest.raises(UnlikePromptError):
        one.learned(changed)


@given(cases(), st.data())
def test_an_id_more_or_less_is_refused(one: Case, data: st.DataObject) -> None:
    assume(one.returned)
    place = data.draw(st.integers(0, len(one.returned) - 1))
    more = data.draw(st.booleans())
    changed = [
        *one.returned[:place],
        *([data.draw(ids)] if more else []),
        *one.returned[place if more else place + 1 :],
    ]
    assume(changed != one.returned and not _is_another_length(one, changed))
    with pytest.raises(UnlikePromptError):
        one.learned(changed)


def _is_another_length(one: Case, changed: list[int]) -> bool:
    """Return whether an honest engine with other lengths of the unknown pictures could return these ids."""
    runs, lengths = list[int](), dict(one.lengths)
    position = 0
    for item in one.items:
        if isinstance(item, int) or item not in one.unknown:
            position += 1 if isinstance(item, int) else one.lengths[item]
            continue
        run = 0
        while position + run < len(changed) and changed[position + run] == PAD:
            run += 1
        runs.append(run)
        if item in lengths:
            lengths[item] = run
        position += run
    return all(run >= LEAST for run in runs) and expanded(one.items, lengths)[0] == changed


@given(cases(), st.data())
def test_a_picture_that_was_left_out_is_refused(one: Case, data: st.DataObject) -> None:
    """A placeholder stays where its picture is missing, or a run too short for a picture, or nothing."""
    assume(one.media)
    dropped = data.draw(st.integers(0, len(one.media) - 1))
    left = data.draw(st.integers(0, LEAST - 1))
    changed, number = list[int](), 0
    for item in one.items:
        if isinstance(item, int):
            changed.append(item)
            continue
        changed += [PAD] * (left if number == dropped else one.lengths[item])
        number += 1
    with pytest.raises(UnlikePromptError):
        one.learned(changed)


@given(cases(), st.data())
def test_pictures_in_another_order_are_refused_where_it_shows(one: Case, data: st.DataObject) -> None:
    """The lengths tell, if one of the two is known, or is there twice."""
    assume(len(one.media) > 1)
    first, second = sorted(data.draw(st.lists(st.integers(0, len(one.media) - 1), min_size=2, max_size=2, unique=True)))
    names = [span.digest for span in one.media]
    swapped = list(names)
    swapped[first], swapped[second] = names[second], names[first]
    pending = iter(swapped)
    changed = expanded([item if isinstance(item, int) else next(pending) for item in one.items], one.lengths)[0]
    assume(changed != one.returned and not _is_another_length(one, changed))
    with pytest.raises(UnlikePromptError):
        one.learned(changed)


@given(items(plain_ids), lengths_of_all, st.data())
def test_runs_become_one_id_for_each_picture(of: list[Item], lengths: dict[str, int], data: st.DataObject) -> None:
    """Side by side, too, if their lengths are known; a picture by itself may be compact, or of an unknown length."""
    alone = [
        isinstance(one, str)
        and not any(isinstance(other, str) for other in (*of[max(0, at - 1) : at], *of[at + 1 : at + 2]))
        for at, one in enumerate(of)
    ]
    given, expected = list[int](), list[int]()
    for one, by_itself in zip(of, alone, strict=True):
        if isinstance(one, str):
            run = 1 if by_itself and data.draw(st.booleans()) else lengths[one]
            given += [PAD] * run
            expected.append(run)
        else:
            given.append(one)
    names = [one for one in of if isinstance(one, str)]
    sides = {one for one, by_itself in zip(of, alone, strict=True) if not by_itself}
    known = {one: length for one, length in lengths.items() if one in sides or data.draw(st.booleans())}
    assert without_runs(given, PAD, names, known) == (compact(of), expected)


def test_a_run_that_is_not_the_pictures_is_told_as_it_is() -> None:
    lengths = {DIGESTS[0]: 4, DIGESTS[1]: 5}
    pair = DIGESTS[:2]
    assert without_runs([PAD] * 9, PAD, pair, lengths) == ([PAD] * 2, [4, 5])
    for run in (2, 3, 5, 8, 10):
        assert without_runs([PAD] * run, PAD, pair, lengths) == ([PAD], [run])
    assert without_runs([PAD] * 9, PAD, pair, {DIGESTS[0]: 4}) == ([PAD] * 2, [4, 5])
    assert without_runs([1, *[PAD] * 3], PAD, [], lengths) == ([1, PAD], [3])


def test_the_same_picture_has_one_length() -> None:
    twice = case([1, DIGESTS[0], 2, DIGESTS[0], 3], {DIGESTS[0]: 5}, {DIGESTS[0]})
    assert twice.learned(twice.returned) == {DIGESTS[0]: 5}
    for other in ([1, *[PAD] * 5, 2, *[PAD] * 6, 3], [1, *[PAD] * 6, 2, *[PAD] * 5, 3], [1, *[PAD] * 5, 2]):
        with pytest.raises(UnlikePromptError):
            twice.learned(other)


def test_pictures_side_by_side() -> None:
    """One unknown length follows from the known ones beside it; of two unknown ones nobody can tell where they part."""
    lengths = {DIGESTS[0]: 5, DIGESTS[1]: 7}
    pair: list[Item] = [1, DIGESTS[0], DIGESTS[1], 2]
    for unknown in DIGESTS[:2]:
        beside = case(pair, lengths, {unknown})
        assert beside.learned(beside.returned) == {unknown: lengths[unknown]}
    both = case(pair, lengths, set(DIGESTS[:2]))
    with pytest.raises(UnlikePromptError):
        both.learned(both.returned)


def test_the_same_picture_side_by_side() -> None:
    """Equal pictures share their run equally, beside others of known lengths, too."""
    lengths = {DIGESTS[0]: 5, DIGESTS[1]: 7}
    for inside in ([DIGESTS[0]] * 2, [DIGESTS[0], DIGESTS[1], DIGESTS[0]], [DIGESTS[1], *[DIGESTS[0]] * 3, DIGESTS[1]]):
        same = case([1, *inside, 2], lengths, {DIGESTS[0]})
        assert same.learned(same.returned) == {DIGESTS[0]: 5}
        for other in (same.returned[:2] + same.returned[3:], [1, PAD, *same.returned[1:]]):
            with pytest.raises(UnlikePromptError):
                same.learned(other)


def test_nothing_is_learned_from_what_is_known() -> None:
    known = case([1, DIGESTS[0], 2], {DIGESTS[0]: 5}, set())
    assert known.learned(known.returned) == {}
    assert len(known.sent) == ID_BYTES * len(known.returned)
    with pytest.raises(UnlikePromptError):
        known.learned([1, *[PAD] * 6, 2])


def test_the_last_picture_is_looked_at_like_all_others() -> None:
    """Nothing stands behind it that would be displaced: it is shorter than before, or its ids are others, or none."""
    ends = case([1, DIGESTS[0], 2, DIGESTS[0]], {DIGESTS[0]: 5}, {DIGESTS[0]})
    assert ends.learned(ends.returned) == {DIGESTS[0]: 5}
    for run in ([PAD] * 4, [PAD] * 6, [PAD] * 4 + [3], [3] * 5, []):
        with pytest.raises(UnlikePromptError):
            ends.learned([1, *[PAD] * 5, 2, *run])
