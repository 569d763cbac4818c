"""The documents do what they say: every block of README.md and docs/ is run, and outputs are compared.

What cannot run here says why, in a comment in front of it: `doc_pages` has the form.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.doc_pages import Piece, pieces, same
from tests.integration.doc_runner import reading

PIECES = pieces()


@pytest.mark.parametrize("piece", PIECES, ids=lambda piece: piece.name)
def test_what_a_page_says_happens(piece: Piece, tmp_path: Path) -> None:
    with reading(tmp_path) as reader:
        reader.read(piece)
