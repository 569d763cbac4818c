"""A request's way through the code does not grow unseen.

The limits are what was measured, and a little for the router's own tasks in between. They are no budget to spend: lower them
when a way gets shorter. The goal is 26 files, 120 runs and 220 calls for a `/generate`; 36, 200 and 330 for a session's chat.
Neither is worth gluing unlike things together.
"""

from __future__ import annotations

import pytest

from tests.support.ways import Way, ways

LIMITS = {"generate": (53, 475, 402), "chat": (80, 670, 685)}
"""Files, runs, calls."""


@pytest.fixture(scope="module")
def shortest() -> dict[str, Way]:
    """The shortest of three: a reply that comes in two pieces wakes every layer once more."""
    found = [ways() for _ in range(3)]
    return {name: min((one[name] for one in found), key=lambda way: len(way.runs)) for name in LIMITS}


@pytest.mark.parametrize("name", LIMITS)
def test_a_second_turn_takes_no_longer_way(name: str, shortest: dict[str, Way]) -> None:
    way = shortest[name]
    found = len(way.files), len(way.runs), way.calls
    assert all(one <= most for one, most in zip(found, LIMITS[name], strict=True)), str(way)
