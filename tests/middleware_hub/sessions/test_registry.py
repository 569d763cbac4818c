"""Sessions are found, counted and forgotten in time, and never dropped for want of room before they were exported."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from middleware_hub.chat.errors import CapacityError, SessionExistsError, UnknownSessionError
from middleware_hub.chat.keys import canonical
from middleware_hub.metrics import SessionMetrics
from middleware_hub.sessions.registry import SessionRegistry
from middleware_hub.sessions.session import Session
from middleware_hub.sessions.trie.nodes import NewTurn
from middleware_hub.spans.chain import TokenSpan, pack_ids


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


class Shop:
    """A store, and what its metrics say."""

    def __init__(self, max_tokens: int = 1000) -> None:
        self.registry = CollectorRegistry()
        self.store = SessionRegistry(SessionMetrics(self.registry), max_tokens=max_tokens)

    def counted(self, event: str) -> float:
        return self.registry.get_sample_value("tito_sessions_total", {"event": event}) or 0.0

    def open(self, name: str, tenant: str = "", *, tokens: int = 0, ttl: float = 100.0) -> Session:
        session = Session(name, tenant, canonical, ttl=ttl)
        self.store.add(session)
        if tokens:
            turn = session.trie.prepare(b"x", [{"role": "user", "content": "a"}])
            handle = session.trie.open(turn, f"{tenant}-{name}")
            span = TokenSpan(None, 0, 0, pack_ids(range(tokens)), 0, versions="1")
            session.trie.commit(handle, NewTurn({"role": "assistant", "content": "b"}, span, "stop"))
            session.tokens += tokens
            self.store.held(tokens)
        return session


def test_a_name_belongs_to_a_tenant() -> None:
    async def work() -> None:
        shop = Shop()
        mine, theirs = shop.open("s", "me"), shop.open("s", "them")
        assert shop.store.get("me", "s") is mine
        assert shop.store.get("them", "s") is theirs
        assert shop.store.of("me") == [mine]
        with pytest.raises(SessionExistsError, match="choose another `session_id`, or leave it out"):
            shop.open("s", "me")
        with pytest.raises(UnknownSessionError):
            shop.store.get("", "s")

    run(work())


def test_many_sessions_are_listed_in_steps_without_those_that_end_meanwhile() -> None:
    async def work() -> None:
        shop = Shop()
        *_, last = [shop.open(f"s{number}") for number in range(5_000)]
        shop.open("s0", "another")
        listing, turns = asyncio.create_task(shop.store.summaries("")), 0
        while not listing.done():
            await asyncio.sleep(0)
            turns += 1
            if turns == 3:
                await shop.store.delete(last)
        summaries, damaged = listing.result()
        found = [summary["session_id"] for summary in summaries]
        assert not damaged
        assert found == [f"s{number}" for number in range(4_999)]
        assert turns > 15

    run(work())


def test_an_expired_session_is_forgotten_and_a_loss_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        shop = Shop()
        empty, lost, exported = shop.open("empty"), shop.open("lost", tokens=5), shop.open("exported", tokens=5)
        longer = shop.open("longer", tokens=5, ttl=10_000.0)
        exported.exported = True
        shop.store.sweep(empty.used + 50)
        assert len(shop.store) == 4
        shop.store.sweep(longer.used + 101)
        assert list(shop.store) == [longer]
        assert (shop.counted("expired"), shop.counted("expired_unexported")) == (2, 1)
        assert shop.store.tokens == 5
        await shop.store.close()
        assert lost.trie.closed

    run(work())
    assert "session lost was forgotten" in caplog.text


def test_what_is_in_flight_keeps_its_session() -> None:
    async def work() -> None:
        shop = Shop()
        session = shop.open("s", ttl=1.0)
        turn = session.trie.prepare(b"x", [{"role": "user", "content": "a"}])
        handle = session.trie.open(turn, "g")
        shop.store.sweep(session.used + 1000)
        assert len(shop.store) == 1
        session.trie.abandon(handle)
        shop.store.sweep(session.used + 1000)
        assert len(shop.store) == 0

    run(work())


def test_what_is_being_asked_keeps_its_session() -> None:
    """A turn whose body is still coming, or a trainer that waits for the agent, for longer than the time to live."""

    async def work() -> None:
        shop = Shop()
        session = shop.open("s", ttl=1.0)
        session.visitors += 1
        shop.store.sweep(session.used + 1000)
        assert len(shop.store) == 1
        session.visitors -= 1
        shop.store.sweep(session.used + 1000)
        assert len(shop.store) == 0

    run(work())


def test_only_what_was_exported_makes_room() -> None:
    async def work() -> None:
        shop = Shop(max_tokens=10)
        done, fresh = shop.open("done", tokens=6), shop.open("fresh", tokens=6)
        with pytest.raises(CapacityError, match="12 tokens"):
            shop.open("more")
        await done.finalize()
        with pytest.raises(CapacityError):
            shop.open("more")
        done.exported = True
        shop.open("more")
        assert [session.id for session in shop.store] == ["fresh", "more"]
        assert (shop.counted("evicted"), shop.store.tokens) == (1, 6)
        assert fresh.trie.head is not None

    run(work())


class Archive:
    """Finds one session, when `go` is set, as often as it is asked."""

    def __init__(self) -> None:
        self.go, self.comes, self.asked = asyncio.Event(), asyncio.Event(), 0

    async def find(self, tenant: str, name: str) -> Session:
        self.asked += 1
        self.comes.set()
        await self.go.wait()
        return Session(name, tenant, canonical, ttl=100.0)

    async def refresh(self, _: Session) -> bool:
        return True


@pytest.mark.timeout(60)
def test_a_session_that_makes_room_as_soon_as_it_was_read_is_read_again() -> None:
    """Whoever asks for it in the same pass of the event loop gets it, and holds nobody up."""

    async def work() -> None:
        shop, archive = Shop(), Archive()
        shop.store.archive = cast(Any, archive)

        async def comes_with_it() -> Session | None:
            await archive.go.wait()
            (there,) = shop.store
            shop.store._end(there)
            return await shop.store.reach("", "s")

        first = asyncio.create_task(shop.store.reach("", "s"))
        await archive.comes.wait()
        second = asyncio.create_task(comes_with_it())
        await asyncio.sleep(0)
        archive.go.set()
        assert await first is not None
        found = await second
        assert archive.asked == 2
        assert found is shop.store.find("", "s")

    run(work())
