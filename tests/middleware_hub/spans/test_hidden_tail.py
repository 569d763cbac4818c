"""How much of a hidden tail stays when a text goes on behind its reply, and what of the text spells it (rule 6)."""

from __future__ import annotations

import pytest

from middleware_hub.spans.hidden_tail import HiddenToken, spell_tail

A, B = HiddenToken(1, "<a>", True, 0), HiddenToken(1, "<b>", True, 0)
STOP, REST = HiddenToken(1, "ST", False, 0), HiddenToken(1, "OP", False, 0)


@pytest.mark.parametrize(
    ("tail", "text", "taken", "spelled"),
    [
        ((A,), "<a>\n", 1, "<a>"),
        ((A,), "\n", 1, ""),
        ((A, B), "<a><b>\n", 2, "<a><b>"),
        ((A, B), "<b>\n", 2, "<b>"),
        ((A, B), "<a>\n", 2, "<a>"),
        ((A, B), "\n", 2, ""),
        ((A, A), "<a><a>\n", 2, "<a><a>"),
        ((A, A), "<a>\n", 2, "<a>"),
        ((STOP, REST), "STOP\n", 2, "STOP"),
        ((STOP, REST), "STAR\n", 1, "ST"),
        ((STOP, REST), "\n", 0, ""),
        ((STOP, A), "<a>\n", 0, ""),
        ((A, STOP), "<a>ST\n", 2, "<a>ST"),
    ],
)
def test_what_stays_of_a_tail(tail: tuple[HiddenToken, ...], text: str, taken: int, spelled: str) -> None:
    """Special tokens stay whatever the text says, the tokens of a stop string as far as it spells them."""
    assert spell_tail(tail, "reply" + text, 5) == (taken, 5 + len(spelled))
