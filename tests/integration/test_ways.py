"""A request's way through the code does not grow unseen.

The limits are what was measured, the same each time. They are no budget to spend: lower them when a way gets shorter. The goal
is 26 files, 120 runs and 220 calls for a `/generate`; 36, 200 and 330 for a session's chat. Neither is worth gluing unlike
things together.
"""

from __future__ import annotations

import pytest

from tests.support.ways import Way, ways

LIMITS = {"generate": (44, 257, 243), "chat": (63, 349, 325)}
"""Files, runs, calls."""
TRIES = 3
"""The shortest way counts: timing makes a call more or less (of 25 chats two had one call less than the others)."""


def _too_long(name: str, way: Way) -> bool:
    found = len(way.files), len(way.runs), way.calls
    return any(one > most for one, most in zip(found, LIMITS[name], strict=True))


def test_a_turn_takes_no_longer_way() -> None:
    for _ in range(TRIES):
        too_long = {name: way for name, way in ways().items() if _too_long(name, way)}
        if not too_long:
            return
    pytest.fail("\n".join(f"{name}: {way}" for name, way in too_long.items()))
