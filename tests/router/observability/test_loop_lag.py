"""The lag of the event loop."""

from __future__ import annotations

import asyncio
import random
import time

from router.observability.loop_lag import RecentMax
from tests.router.conftest import running
from tests.router.serving.test_entrance import samples


def test_an_old_maximum_is_forgotten() -> None:
    recent = RecentMax(60)
    assert recent.at(0) == 0
    recent.add(0, 3)
    recent.add(10, 1)
    recent.add(20, 2)
    assert recent.at(60) == 3
    assert recent.at(61) == 2
    assert recent.at(81) == 0


def test_the_maximum_is_that_of_all_recent_values() -> None:
    """Compared with a list of all values."""
    chance, recent, now = random.Random(4), RecentMax(10), 0.0
    added: list[tuple[float, float]] = []
    for _ in range(2000):
        now += chance.choice((0.0, 0.5, 1.0, 9.0))
        added.append((now, chance.choice((0.0, 1.0, 2.0, 3.0, chance.random()))))
        recent.add(*added[-1])
        assert recent.at(now) == max(value for moment, value in added if moment >= now - 10)


def test_a_blocked_loop_is_seen() -> None:
    async def main() -> None:
        async with running() as router:
            blocked = time.perf_counter() + 0.3
            while time.perf_counter() < blocked:
                pass
            found = await samples(router)
            while found["tito_router_event_loop_lag_max_seconds",] < 0.2:
                found = await samples(router)
            count = found["tito_router_event_loop_lag_seconds_count",]
            assert found["tito_router_event_loop_lag_seconds_bucket", "0.1"] < count
            assert found["tito_router_event_loop_lag_seconds_bucket", "+Inf"] == count

    asyncio.run(main())


def test_the_task_ends_with_the_router() -> None:
    async def main() -> None:
        async with running():
            pass
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
