"""A request whose router was not announced for a time reads on before it is served, and waits for no store that is away."""

from __future__ import annotations

import asyncio
import time

import pytest

from router.peers import peers
from router.peers.channel import ChannelError
from router.peers.peers import Peers
from router.peers.presence import LEASE_SECONDS, RENEW_SECONDS, Presence
from tests.router.peers.fleets import Breakable
from tests.support.clock import run_by_a_clock
from tests.support.dictionary_store import DictionaryStore


class Troubled(Breakable):
    """Announcements fail so many times at once, or hang."""

    def __init__(self) -> None:
        super().__init__(DictionaryStore())
        self.failures = self.asked = 0
        self.hangs = False

    async def announce(self, name: str, data: bytes, seconds: float) -> None:
        self.asked += 1
        if self.hangs:
            await asyncio.Event().wait()
        if self.failures:
            self.failures -= 1
            raise ChannelError("it was asked before this process was stopped")
        await super().announce(name, data, seconds)


def overdue(channel: Troubled) -> Peers:
    found = Peers(Presence("one"))
    found.join(channel)
    found.until = 0.0
    return found


def test_a_store_is_known_to_be_away_before_an_announcement_has_run_out() -> None:
    """So it is not a request that finds that out."""
    assert RENEW_SECONDS + peers._RUSHED + peers._DOUBT < LEASE_SECONDS


@pytest.mark.parametrize("count", [1, 20])
def test_nobody_waits_longer_than_the_bound_and_only_once(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if many ask at once, and behind the listening task, which holds the lock."""

    async def main() -> None:
        channel = Troubled()
        channel.hangs = True
        one = overdue(channel)
        listening = asyncio.create_task(one.announce())
        await asyncio.sleep(0)
        begun = time.monotonic()
        await asyncio.gather(*(one.look_again() for _ in range(count)))
        assert time.monotonic() - begun < peers._RUSHED + peers._LATER
        assert one.away
        asked, begun = channel.asked, time.monotonic()
        for _ in range(50):
            await one.look_again()
        assert channel.asked == asked, "it is known to be away"
        assert time.monotonic() == begun < one.until
        await listening

    run_by_a_clock(monkeypatch, main())


def test_what_failed_because_the_process_was_stopped_is_tried_again() -> None:
    """The store is there: what it was asked before has failed meanwhile."""

    async def main() -> None:
        channel = Troubled()
        channel.failures = 5
        one = overdue(channel)
        await one.look_again()
        assert channel.asked >= 6
        assert one.until > time.monotonic() + LEASE_SECONDS / 2

    asyncio.run(main())


def test_the_log_says_why_a_router_goes_on_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where nothing was said, because the store hangs."""

    async def main() -> None:
        channel = Troubled()
        channel.hangs = True
        await overdue(channel).look_again()

    run_by_a_clock(monkeypatch, main())
    (said,) = (message for message in caplog.messages if "goes on alone" in message)
    assert said.endswith("the store has not answered in time")
