"""A request's way through the code does not grow unseen.

The limits are what was measured, and a little for the router's own tasks in between. They are no budget to spend: lower them
when a way gets shorter. The goal is 26 files, 120 runs and 220 calls for a `/generate`; 36, 200 and 330 for a session's chat.
Neither is worth gluing unlike things together.
"""

from __future__ import annotations

import pytest

from tests.support.ways import Way, ways

LIMITS = {"generate": (54, 365, 280), "chat": (78, 505, 407)}
"""Files, runs, calls."""


TRIES = 12
"""A reply that comes in two pieces wakes every layer once more, and the router's own tasks come in between. A way that has
grown is too long each time."""


def _too_long(name: str, way: Way) -> bool:
    found = len(way.files), len(way.runs), way.calls
    return any(one > most for one, most in zip(found, LIMITS[name], strict=True))


def test_a_second_turn_takes_no_longer_way() -> None:
    too_long: dict[str, Way] = {}
    for _ in range(TRIES):
        found = ways()
        too_long = {name: found[name] for name in too_long or LIMITS if _too_long(name, found[name])}
        if not too_long:
            return
    pytest.fail("\n".join(f"{name}: {way}" for name, way in too_long.items()))
