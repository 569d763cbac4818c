"""Lines fit their cells, and lose nothing but what does not fit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.demo.text_width import folded, padded, shortened, width

TEXTS = st.text(st.sampled_from("ab 京é🐟…\u0301\u200d"), max_size=30)


def test_what_takes_how_many_cells() -> None:
    assert width("Fuji") == 4
    assert width("富士山") == 6
    assert width("🐟") == 2
    assert width("e\u0301") == 1


@given(TEXTS, st.integers(2, 20))
def test_a_shortened_text_fits_and_is_its_own_beginning(text: str, cells: int) -> None:
    found = shortened(text, cells)
    assert width(found) <= cells
    if width(text) <= cells:
        assert found == text
    else:
        assert found.endswith("…")
        assert text.startswith(found[:-1])


@given(TEXTS, st.integers(2, 20), st.integers(1, 4))
def test_a_folded_text_fits_and_has_its_words_in_their_order(text: str, cells: int, lines: int) -> None:
    found = folded(text, cells, lines)
    assert 1 <= len(found) <= lines
    assert all(width(line) <= cells for line in found)
    if all(width(word) <= cells for word in text.split(" ")) and len(folded(text, cells, 99)) <= lines:
        assert " ".join(found).split() == text.split()


@given(TEXTS, st.integers(0, 60))
def test_a_padded_text_is_as_wide_as_asked_for_if_it_is_not_wider(text: str, cells: int) -> None:
    assert width(padded(text, cells)) == max(cells, width(text))
