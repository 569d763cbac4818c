"""How requests of the client travel, without a router."""

from __future__ import annotations

import random

from middleware_hub.client.transport import Sending
from middleware_hub.client.wire import ClientCall


def test_waits_and_seeded_environments_leave_each_other_alone() -> None:
    """Environments seed Python's shared generator for each rollout (findings/shared-dice.sh)."""
    before = random.getstate()
    try:
        waits = set()
        for _ in range(3):
            random.seed(5)
            seeded = random.getstate()
            sending = Sending("http://127.0.0.1:9")
            waits.add(sending.go_on(ClientCall("GET", "/health"), 1, sending.url, 503, None))
            assert random.getstate() == seeded, "a wait has drawn a number that the environment would have had"
        assert len(waits) == 3, "clients that were seeded alike return at the same time"
    finally:
        random.setstate(before)
