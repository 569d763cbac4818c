"""The logs of sessions that ended long ago are forgotten: a store that is used for weeks does not fill up with them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from middleware_hub.sessions.events import DELETED
from middleware_hub.sessions.log.archive import REMEMBERED
from middleware_hub.store.protocol import Batch
from middleware_hub.store.records import Event
from tests.middleware_hub.sessions.in_process import PATH, Room
from tests.middleware_hub.sessions.test_shared_sessions import BODY, Routers, clocks, exported, more, routers
from tests.support.usual import usual

WEEK = 7 * 86_400.0
UNEXPORTED = "expired_unexported"
Later = Callable[[float], None]


@pytest.fixture(params=usual(["sqlite", "redis"], "redis"), autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Routers, "kind", request.param)


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Later:
    return clocks(monkeypatch)


async def sweep(room: Room) -> None:
    assert room.app.registry.archive is not None
    await room.app.registry.sweep_store(room.app.registry.archive)


async def names(room: Room) -> list[str]:
    assert room.hub.store is not None
    return [info.log.rpartition("/")[0] for info in await room.hub.store.logs("session")]


async def least(room: Room) -> int:
    """Return the bytes that are left when everything is forgotten that a budget forgets."""
    assert room.hub.store is not None
    await room.hub.store.forget(0)
    return (await room.hub.store.stats()).bytes


def test_logs_of_deleted_sessions_go_after_a_day(tmp_path: Path, later: Later) -> None:
    async def work() -> None:
        async with routers(tmp_path) as both:
            one = await both.another()
            for at in range(250):
                await one.call("POST", "/sessions", {"session_id": f"s{at}", "ttl_s": WEEK})
            for at in range(250):
                if at != 120:
                    assert (await one.call("DELETE", f"/sessions/s{at}"))[0] == 200
            later(REMEMBERED - 10)
            for _ in range(5):
                await sweep(one)
            assert len(await names(one)) == 250
            before = await least(one)
            later(REMEMBERED + 10)
            await sweep(one)  # to the end of all logs
            await sweep(one)
            assert len(await names(one)) == 1
            assert await least(one) < before - 30_000
            assert (await one.call("GET", "/sessions/s120"))[0] == 200
            assert (await one.call("GET", "/sessions/s3"))[0] == 404
            assert (await one.call("POST", "/sessions", {"session_id": "s3"}))[0] == 201
            assert (await one.ask(BODY, PATH.replace("/s/", "/s3/")).answer())[0] == 200

    asyncio.run(work())


def test_a_router_that_missed_the_end_learns_it_when_it_writes(tmp_path: Path, later: Later) -> None:
    async def work() -> None:
        async with routers(tmp_path) as both:
            one, other = await both.another(), await both.another()
            await one.open(ttl_s=WEEK)
            assert (await one.ask(BODY).answer())[0] == 200
            assert len(await exported(one)) == 1
            assert (await other.call("DELETE", "/sessions/s"))[0] == 200
            later(REMEMBERED + 10)
            await sweep(other)
            assert await names(other) == []
            status, answer = await one.ask(more(BODY)).answer()
            assert status in (404, 409), answer
            assert (await one.call("GET", "/sessions/s"))[0] == 404
            assert await names(one) == []

    asyncio.run(work())


def test_a_session_that_expired_elsewhere_does_not_stop_the_sweeping(tmp_path: Path, later: Later) -> None:
    async def work() -> None:
        async with routers(tmp_path) as both:
            one, other = await both.another(), await both.another()
            await one.open(ttl_s=2 * REMEMBERED)
            assert (await one.ask(BODY).answer())[0] == 200
            assert (await other.call("DELETE", "/sessions/s"))[0] == 200
            later(REMEMBERED + 10)
            await sweep(other)
            later(3 * REMEMBERED)
            await sweep(one)
            assert (await one.call("GET", "/sessions/s"))[0] == 404
            assert await names(one) == []

    asyncio.run(work())


def test_a_damaged_log_does_not_stop_the_sweeping(tmp_path: Path, later: Later) -> None:
    async def work() -> None:
        async with routers(tmp_path) as both:
            one = await both.another()
            assert one.hub.store is not None
            for at in range(3):
                await one.call("POST", "/sessions", {"session_id": f"s{at}"})
                assert (await one.call("DELETE", f"/sessions/s{at}"))[0] == 200
            (damaged,) = await one.hub.store.logs("session//s0/")
            await one.hub.store.append(Batch(events=[Event(damaged.log, "unknown", b"?", closes=DELETED + 1)]))
            later(REMEMBERED + 10)
            await sweep(one)
            assert await names(one) == ["session//s0"]

    asyncio.run(work())


def test_a_session_that_no_router_has_in_memory_is_told_when_its_samples_are_lost(
    tmp_path: Path, later: Later, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a restart: `SessionLost` calls a person by this count."""

    async def work() -> None:
        async with routers(tmp_path) as both:
            one = await both.another()
            for name in ("lost", "got", "empty", "asked"):
                await one.call("POST", "/sessions", {"session_id": name, "ttl_s": 100.0})
                if name != "empty":
                    path = f"/sessions/{name}/v1/chat/completions"
                    assert (await one.call("POST", path, BODY))[0] == 200
            assert (await one.call("GET", "/sessions/got/trajectories"))[0] == 200
            await both.end(one)
            other = await both.another()
            # Prometheus sees no increase in a series that begins with its first loss.
            assert other.registry.get_sample_value("tito_sessions_total", {"event": UNEXPORTED}) == 0
            later(200)
            assert (await other.call("GET", "/sessions/asked"))[0] == 404
            await sweep(other)
            assert [other.metric("tito_sessions_total", event=event) for event in ("expired", UNEXPORTED)] == [2, 2]

    asyncio.run(work())
    told = [record.message.split()[1] for record in caplog.records if "was forgotten after" in record.message]
    assert sorted(told) == ["asked", "lost"]
