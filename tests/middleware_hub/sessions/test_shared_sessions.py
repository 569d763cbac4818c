"""Two routers and one store, and a store that fails: what happens in the middle of things."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from middleware_hub.sessions.log import archive
from middleware_hub.spans.chain import SpanFlag
from middleware_hub.store.errors import StoreUnreachableError
from middleware_hub.store.guarded import GuardedStore
from middleware_hub.store.protocol import Batch
from router.config import StoreConfig
from tests.middleware_hub.sessions.in_process import PATH, Client, Room, until
from tests.support.redis_server import empty_redis
from tests.support.usual import usual

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Count"}], "max_tokens": 20}
NEXT = [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "More"}]
Work = Callable[[], Coroutine[Any, Any, None]]


class Routers:
    """Routers on one store, all of which end with the test."""

    kind = "sqlite"

    def __init__(self, folder: Path) -> None:
        urls = {"sqlite": f"sqlite:{folder}", "memory": "memory:process"}
        self._url = urls.get(self.kind) or empty_redis()
        self._rooms: list[Room] = []

    async def another(self, **options: Any) -> Room:
        room = Room(store=StoreConfig(url=self._url), **options)
        assert room.hub.store is not None
        await room.hub.store.open("t")
        self._rooms.append(room)
        return room

    async def end(self, *rooms: Room) -> None:
        for room in rooms or list(self._rooms):
            self._rooms.remove(room)
            await room.app.registry.close()
            assert room.hub.store is not None
            await room.hub.store.close()


@pytest.fixture(autouse=True, params=usual(["sqlite", "redis"], "redis"))
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store of a test's routers."""
    monkeypatch.setattr(Routers, "kind", request.param)


@asynccontextmanager
async def routers(folder: Path) -> AsyncIterator[Routers]:
    found = Routers(folder)
    try:
        yield found
    finally:
        await found.end()


def more(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "messages": [*body["messages"], *NEXT]}


async def exported(room: Room) -> Any:
    status, found = await room.call("GET", "/sessions/s/trajectories")
    assert status == 200, found
    return found["trajectories"]


class Broken:
    """Breaks a method of a router's store: it fails, before or behind the real one, until it is mended."""

    def __init__(self, room: Room, name: str, *, behind: bool = False) -> None:
        self._store, self._name, self._behind = room.hub.store, name, behind
        self._real = getattr(self._store, name)
        setattr(self._store, name, self._fail)

    async def _fail(self, *args: Any, **more: Any) -> Any:
        if self._behind:
            await self._real(*args, **more)
        raise StoreUnreachableError("the disk is full")

    def mend(self) -> None:
        setattr(self._store, self._name, self._real)


class Held:
    """Holds what one client reads from a router's store until `go` is set."""

    def __init__(self, room: Room) -> None:
        self._store: Any = room.hub.store
        self._real = self._store.read
        self.client: Client | None = None
        self.reached, self.go = asyncio.Event(), asyncio.Event()
        self._store.read = self._read

    async def _read(self, *args: Any, **more: Any) -> Any:
        if self.client is not None and asyncio.current_task() is self.client._task:
            self.reached.set()
            await self.go.wait()
        return await self._real(*args, **more)


def test_a_turn_that_is_not_saved_is_answered_and_handed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with routers(tmp_path) as both:
            room = await both.another()
            await room.open()
            assert (await room.ask(BODY).answer())[0] == 200
            broken = Broken(room, "append")
            client = room.ask(more(BODY))
            assert (await client.answer())[0] == 200
            assert (b"x-radix-saved", b"no") in client.out[0]["headers"]
            status, _ = await room.call("POST", "/sessions/s/reward_info", {"reward_info": {"r": 1}})
            assert status == 200
            assert room.metric("tito_session_unsaved_total") == 2
            assert not room.session.idle
            told = await exported(room)
            other = await both.another()
            assert len((await exported(other))[0]["turns"]) == 1
            await both.end(other)
            broken.mend()
            client = room.ask(more(more(BODY)))
            assert (await client.answer())[0] == 200
            assert b"x-radix-saved" not in dict(client.out[0]["headers"])
            assert told[0]["response_ids"] == (await exported(room))[0]["response_ids"][: len(told[0]["response_ids"])]
            other = await both.another()
            assert await exported(other) == await exported(room)
            assert (await other.call("GET", "/sessions/s"))[1]["reward_info"] == {"r": 1}

    asyncio.run(work())
    assert len([one for one in caplog.records if "the store cannot be used" in one.message]) == 1


def test_what_was_written_although_the_store_failed_is_not_written_twice(tmp_path: Path) -> None:
    async def work() -> None:
        async with routers(tmp_path) as both:
            room = await both.another()
            await room.open()
            broken = Broken(room, "append", behind=True)
            assert (await room.ask(BODY).answer())[0] == 200
            assert (await room.call("POST", "/sessions/s/complete", {"reward_info": {"r": 1}}))[0] == 200
            broken.mend()
            assert (await room.ask(more(BODY)).answer())[0] == 200
            other = await both.another()
            (only,) = await exported(other)
            assert [only] == await exported(room)
            assert only["num_turns"] == 2

    asyncio.run(work())


def test_a_session_that_is_deleted_while_the_store_takes_nothing(tmp_path: Path) -> None:
    async def work() -> None:
        async with routers(tmp_path) as both:
            room = await both.another()
            await room.open()
            assert (await room.ask(BODY).answer())[0] == 200
            broken = Broken(room, "append")
            client = Client(room.app, "DELETE", "/sessions/s", {}, {})
            assert (await client.answer())[0] == 200
            assert (b"x-radix-saved", b"no") in client.out[0]["headers"]
            broken.mend()
            assert room.app.registry.archive is not None
            await room.app.registry.sweep_store(room.app.registry.archive)
            assert (await (await both.another()).call("GET", "/sessions/s"))[0] == 404

    asyncio.run(work())


def test_an_end_that_waits_for_the_store_has_come_from_another_router(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is lost, so nothing is reported as lost."""

    async def work() -> None:
        async with routers(tmp_path) as both:
            one, two = await both.another(), await both.another()
            await one.open()
            assert (await one.ask(BODY).answer())[0] == 200
            broken = Broken(one, "append")
            assert (await one.call("DELETE", "/sessions/s"))[0] == 200
            assert (await two.call("DELETE", "/sessions/s"))[0] == 200
            broken.mend()
            assert one.app.registry.archive is not None
            await one.app.registry.sweep_store(one.app.registry.archive)
            assert one.hub.saving is not None
            assert (one.hub.saving.waiting_bytes, one.hub.saving.lost) == (0, 0)
            assert (await one.call("POST", "/sessions", {"session_id": "s"}))[0] == 201

    asyncio.run(work())
    told = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert [message for message in told if "until the store takes writes" not in message] == []


def test_the_sweeper_hands_over_what_was_not_saved(tmp_path: Path) -> None:
    async def work() -> None:
        async with routers(tmp_path) as both:
            room = await both.another()
            await room.open()
            broken = Broken(room, "append")
            assert (await room.ask(BODY).answer())[0] == 200
            broken.mend()
            assert room.app.registry.archive is not None
            await room.app.registry.sweep_store(room.app.registry.archive)
            assert await exported(await both.another()) == await exported(room)

    asyncio.run(work())


def test_turns_that_were_saved_late_stand_behind_those_of_others(tmp_path: Path) -> None:
    async def work() -> None:
        async with routers(tmp_path) as both:
            one, other = await both.another(), await both.another()
            await one.open()
            assert (await one.ask(BODY).answer())[0] == 200
            broken = Broken(one, "append")
            one.engine.says("late")
            assert (await one.ask(more(BODY)).answer())[0] == 200
            other.engine.says("early")
            assert (await other.ask(more(BODY)).answer())[0] == 200
            broken.mend()
            assert (await one.ask(BODY).answer())[0] == 200
            found = await exported(await both.another())
            assert await exported(one) == found == await exported(other)
            assert [branch["messages"][-1]["content"] for branch in found] == ["early", "late", "Yes."]

    asyncio.run(work())


def test_a_store_that_cannot_be_read(tmp_path: Path) -> None:
    async def work() -> None:
        async with routers(tmp_path) as both:
            room = await both.another()
            await room.open()
            assert (await room.ask(BODY).answer())[0] == 200
            broken = [Broken(room, "read"), Broken(room, "logs")]
            client = room.ask(more(BODY))
            assert (await client.answer())[0] == 200
            assert dict(client.out[0]["headers"])[b"x-radix-reasons"] == b"store_unreachable"
            (only,) = await exported(room)
            assert (only["exact"], only["reasons"]) == (False, ["store_unreachable"])
            status, found = await room.call("GET", "/sessions/other")
            assert (status, found["error"]["type"]) == (503, "store_unreachable")
            assert (await room.call("POST", "/sessions", {}))[0] == 503
            for one in broken:
                one.mend()
            assert (await room.call("GET", "/sessions/other"))[0] == 404
            (only,) = await exported(room)
            assert only["exact"]

    asyncio.run(work())


def test_a_session_whose_turns_cannot_be_read_is_not_exported_without_them(tmp_path: Path) -> None:
    """Another router has sampled all of them: an empty list would say that there are none."""

    async def work() -> None:
        async with routers(tmp_path) as both:
            one, two = await both.another(), await both.another()
            await one.open()
            assert (await two.ask(BODY).answer())[0] == 200
            broken = Broken(one, "read")
            for call in (("GET", "/sessions/s/trajectories"), ("POST", "/sessions/s/finalize", {})):
                status, found = await one.call(*call)
                assert (status, found["error"]["type"]) == (503, "store_unreachable")
            broken.mend()
            assert (await two.ask(more(BODY)).answer())[0] == 200, "nothing was finalized"
            status, found = await one.call("POST", "/sessions/s/finalize", {})
            assert (status, [sample["num_turns"] for sample in found["trajectories"]]) == (200, [2])

    asyncio.run(work())


def test_a_reward_for_a_turn_that_cannot_be_read_is_not_refused_for_good(tmp_path: Path) -> None:
    """Another router has sampled it: a 404 would say that there is no such turn."""

    async def work() -> None:
        async with routers(tmp_path) as both:
            one, two = await both.another(), await both.another()
            await one.open()
            status, answer = await two.ask(BODY).answer()
            assert status == 200
            reward = {"reward_info": {"r": 1}, "branch": answer["id"].removeprefix("chatcmpl-")}
            unknown = {**reward, "branch": "unknown"}
            broken = Broken(one, "read")
            for body in (reward, unknown):
                status, found = await one.call("POST", "/sessions/s/reward_info", body)
                assert (status, found["error"]["type"]) == (503, "store_unreachable")
            broken.mend()
            assert (await one.call("POST", "/sessions/s/reward_info", reward))[0] == 200
            assert (await one.call("POST", "/sessions/s/reward_info", unknown))[0] == 404

    asyncio.run(work())


@pytest.mark.parametrize(("method", "path"), [("POST", "/sessions/s/finalize"), ("DELETE", "/sessions/s")])
def test_a_session_that_ends_elsewhere_while_it_generates(method: str, path: str, tmp_path: Path) -> None:
    async def work() -> None:
        async with routers(tmp_path) as both:
            one, other = await both.another(), await both.another()
            await one.open()
            says = one.engine.says("one two", hold=1)
            client = one.ask(BODY)
            await one.engine.arrived()
            assert (await other.call(method, path))[0] == 200
            says.go.set()
            status, found = await client.answer()
            assert (status, found["error"]["type"]) == (409, "session_over")
            status, found = await one.ask(BODY).answer()
            assert (status, found["error"]["type"]) == (
                (404, "not_found") if method == "DELETE" else (409, "session_over")
            )
            if method == "DELETE":
                await other.open()
                assert (await one.ask(BODY).answer())[0] == 200
                assert (await other.call("GET", "/sessions/s"))[1]["num_generations"] == 1

    asyncio.run(work())


async def waiting(log: Any, count: int) -> None:
    """Wait until so many events wait to be appended, also where the store is another process."""
    async with asyncio.timeout(30):
        while len(log._waiting) < count:  # noqa: ASYNC110  # it has no event
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(("method", "path"), [("POST", "/sessions/s/finalize"), ("DELETE", "/sessions/s")])
def test_a_turn_and_the_end_wait_for_the_same_group(method: str, path: str, tmp_path: Path) -> None:
    """Whichever comes second hears of the first, although nothing of either was in the store when they were asked for."""

    async def work() -> None:
        async with routers(tmp_path) as both:
            room = await both.another()
            await room.open()
            assert (await room.ask(BODY).answer())[0] == 200
            says = room.engine.says("one two", hold=1)
            late = room.ask(more(BODY))
            await room.engine.arrived()
            held = Held(room)
            end = Client(room.app, method, path, {}, {})
            held.client = look = Client(room.app, "GET", "/sessions/s", {}, {})
            await asyncio.wait_for(held.reached.wait(), 60)
            log: Any = room.session.log
            await waiting(log, 1)
            says.go.set()
            await waiting(log, 2)
            held.go.set()
            assert (await end.answer())[0] == 200
            seen = (await look.answer())[0]
            assert seen == 200 or (seen == 404 and method == "DELETE"), "it may look before or behind the end"
            status, found = await late.answer()
            assert (status, found["error"]["type"]) == (409, "session_over")
            other = await both.another()
            status, found = await other.call("GET", "/sessions/s/trajectories")
            assert status == (404 if method == "DELETE" else 200)
            if status == 200:
                assert [len(one["turns"]) for one in found["trajectories"]] == [1]

    asyncio.run(work())


def test_an_end_that_could_not_be_written_comes_behind_the_turns_of_others(tmp_path: Path) -> None:
    """Their turns are in the session, and so are those of the router that ended it."""

    async def work() -> None:
        async with routers(tmp_path) as both:
            one, other = await both.another(), await both.another()
            await one.open()
            assert (await one.ask(BODY).answer())[0] == 200
            broken = Broken(one, "append")
            assert (await one.ask(more(BODY)).answer())[0] == 200
            assert (await one.call("POST", "/sessions/s/finalize", {}))[0] == 200
            assert (await other.ask({**BODY, "max_tokens": 19}).answer())[0] == 200
            broken.mend()
            assert one.session.log is not None
            await one.session.log.hand_over()
            assert not one.session.log.unsaved
            third = await both.another()
            for room in (third, other, one):
                found = await exported(room)
                assert sorted(len(one["turns"]) for one in found) == [1, 2], room
                assert (await room.ask(BODY).answer())[0] == 409
            # What the first one knows of the order is the log's.
            assert await exported(one) == await exported(third)

    asyncio.run(work())


def test_a_finalize_after_one_that_failed_ends_the_generations_in_flight(tmp_path: Path) -> None:
    """The first one finds that another router has gone on, and then the store does not answer."""

    async def work() -> None:
        async with routers(tmp_path) as both:
            one, two = await both.another(), await both.another()
            await one.open()
            one.engine.says("one two three", hold=1)
            client = one.ask({**BODY, "stream": True})
            await one.engine.arrived()
            store, broken = one.hub.store, list[Broken]()
            assert store is not None
            append = store.append

            async def behind_another(batch: Batch) -> list[int]:
                store.append = append  # type: ignore[method-assign]
                status, _ = await two.call("POST", "/sessions/s/reward_info", {"reward_info": {"r": 1}})
                assert status == 200
                broken.append(Broken(one, "read"))
                return await append(batch)

            store.append = behind_another  # type: ignore[method-assign]
            assert (await one.call("POST", "/sessions/s/finalize"))[0] == 503
            broken[0].mend()
            assert (await one.call("POST", "/sessions/s/finalize"))[0] == 200
            assert one.session.trie.in_flight == 0
            _, events = await client.answer()
            assert "the session ended" in events[-1]["error"]["message"]
            assert one.metric("tito_sessions_total", event="finalized") == 1

    asyncio.run(work())


def test_turns_at_two_routers_at_once_are_both_kept(tmp_path: Path) -> None:
    async def work() -> None:
        async with routers(tmp_path) as both:
            rooms = [await both.another(), await both.another()]
            await rooms[0].open()
            said = [[room.engine.says(text, hold=1) for text in ("one two", "one three")] for room in rooms]
            clients = [room.ask({**BODY, "n": 2}) for room in rooms]
            for room in rooms:
                await room.engine.arrived(2)
            for room in said:
                for one in room:
                    one.go.set()
            assert [(await client.answer())[0] for client in clients] == [200, 200]
            first, second = [await exported(room) for room in rooms]
            assert first == second == await exported(await both.another())
            assert len(first) == 4
            shown = [masked((await room.call("GET", "/sessions/s"))[1]) for room in rooms]
            assert shown[0] == shown[1]

    asyncio.run(work())


def test_a_prompt_that_another_router_is_read_to_have_while_it_is_sampled_here(tmp_path: Path) -> None:
    """Both routers make the same record of it: the one that reads knows it before the store has brought it."""

    async def work() -> None:
        async with routers(tmp_path) as both:
            first, second = await both.another(), await both.another()
            await first.open()
            says = second.engine.says("Two.", hold=1)
            client = second.ask(BODY)
            await second.engine.arrived()
            assert (await first.ask(BODY).answer())[0] == 200
            store: Any = second.hub.store
            real, reached, go = store.get, asyncio.Event(), asyncio.Event()

            async def get(*args: Any, **more: Any) -> Any:
                reached.set()
                await go.wait()
                return await real(*args, **more)

            store.get = get
            reading = asyncio.create_task(second.call("GET", "/sessions/s/trajectories"))
            await reached.wait()
            says.go.set()
            await waiting(second.session.log, 1)
            go.set()
            status, found = await reading
            assert status == 200, found
            assert (await client.answer())[0] == 200
            assert len(await exported(second)) == 2
            assert await exported(first) == await exported(second)

    asyncio.run(work())


def masked(summary: Any) -> Any:
    return {**summary, "created_at": 0}


def test_one_of_two_that_make_a_session_at_once_is_told(tmp_path: Path) -> None:
    async def work() -> None:
        async with routers(tmp_path) as both:
            rooms = [await both.another(), await both.another()]
            made = [room.call("POST", "/sessions", {"session_id": "s"}) for room in rooms]
            assert sorted(status for status, _ in await asyncio.gather(*made)) == [201, 409]

    asyncio.run(work())


def test_what_a_client_left_behind_is_kept(tmp_path: Path) -> None:
    """It is cancelled after its time of grace; the sampled tokens are in the store, and so in the next process."""

    async def work() -> None:
        async with routers(tmp_path) as both:
            room = await both.another(orphan_grace=0.0)
            await room.open()
            room.engine.says("one two three", hold=2)
            client = room.ask({**BODY, "stream": True})
            await room.engine.arrived()
            await client.leave()
            await until(lambda: room.session.trie.head is not None)
            await until(lambda: room.session.idle)
            (only,) = await exported(await both.another())
            assert (only["finish_reason"], len(only["response_ids"])) == ("abort", 2)

    asyncio.run(work())


def test_a_turn_given_up_while_it_is_written_is_kept(tmp_path: Path) -> None:
    async def work() -> None:
        async with routers(tmp_path) as both:
            room = await both.another()
            session = await room.open()
            assert room.hub.store is not None
            real, go = room.hub.store.append, asyncio.Event()

            async def slow(batch: Any) -> Any:
                found = await real(batch)
                await go.wait()
                return found

            room.hub.store.append = slow  # type: ignore[method-assign]
            client = room.ask(BODY)
            await until(lambda: session._exchanges and session.log is not None and not session.log.settled)
            (exchange,) = session._exchanges
            cancelled = asyncio.create_task(exchange.cancel())
            await until(lambda: exchange.over)
            assert (await client.answer())[0] == 409
            go.set()
            await cancelled
            await until(lambda: session.trie.head is not None)
            assert await exported(room) == await exported(await both.another())
            assert session.tokens == (await (await both.another()).call("GET", "/sessions/s"))[1]["tokens"]

    asyncio.run(work())


def test_who_waits_for_an_agent_hears_that_it_is_done_elsewhere(tmp_path: Path) -> None:
    async def work() -> None:
        async with routers(tmp_path) as both:
            one, other = await both.another(), await both.another()
            session = await one.open()
            waiting = asyncio.create_task(session.completed(20))
            await asyncio.sleep(0)
            assert (await other.call("POST", "/sessions/s/complete"))[0] == 200
            assert await waiting

    asyncio.run(work())


def test_memory_is_a_cache(tmp_path: Path) -> None:
    """With room for almost nothing, nothing is refused and nothing lost."""

    async def work() -> None:
        async with routers(tmp_path) as both:
            room = await both.another(max_tokens=20)
            for name in "abc":
                assert (await room.call("POST", "/sessions", {"session_id": name}))[0] == 201
            bodies = dict.fromkeys("abc", BODY)
            for name in "abcabcab":
                status, _ = await room.ask(bodies[name], PATH.replace("/s/", f"/{name}/")).answer()
                assert status == 200
                bodies[name] = more(bodies[name])
            assert len(room.app.registry) < 3
            assert room.metric("tito_sessions_total", event="evicted") > 4
            held = [session.tokens for session in room.app.registry]
            assert room.app.registry.tokens == sum(held)
            found = (await room.call("GET", "/sessions"))[1]["sessions"]
            assert [(one["session_id"], one["num_generations"]) for one in found] == [("a", 3), ("b", 3), ("c", 2)]
            assert all(one["num_branches"] == 1 for one in found)
            assert room.app.registry.tokens == sum(session.tokens for session in room.app.registry)

    asyncio.run(work())


def test_what_the_store_does_not_take_is_not_dropped_but_refused(tmp_path: Path) -> None:
    async def work() -> None:
        async with routers(tmp_path) as both:
            room = await both.another(max_tokens=20)
            await room.open()
            assert (await room.ask(BODY).answer())[0] == 200
            broken = Broken(room, "append")
            assert (await room.ask(more(BODY)).answer())[0] == 200
            assert (await room.ask(more(more(BODY))).answer())[0] == 429
            broken.mend()
            assert room.app.registry.archive is not None
            await room.app.registry.sweep_store(room.app.registry.archive)
            assert (await room.ask(more(more(BODY))).answer())[0] == 200

    asyncio.run(work())


def clocks(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return what sets all clocks this many seconds ahead: those of routers, and that of the store."""
    now, monotonic, stores = time.time, time.monotonic, GuardedStore.now

    def set_ahead(seconds: float) -> None:
        monkeypatch.setattr(time, "time", lambda: now() + seconds)
        monkeypatch.setattr(time, "monotonic", lambda: monotonic() + seconds)
        monkeypatch.setattr(GuardedStore, "now", lambda store: stores(store) + seconds)

    return set_ahead


@pytest.mark.parametrize("ahead", [3600.0, -3600.0])
def test_the_clock_of_a_router_ends_no_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: float) -> None:
    """What counts is the store's clock: those of machines need not agree."""

    async def work() -> None:
        async with routers(tmp_path) as both:
            one, other = await both.another(), await both.another()
            now = time.time
            for number, (maker, reader) in enumerate([(one, other), (other, one)] * 2):
                name = f"s{number}"
                assert (await maker.call("POST", "/sessions", {"session_id": name, "ttl_s": 100.0}))[0] == 201
                assert (await maker.ask(BODY, PATH.replace("/s/", f"/{name}/")).answer())[0] == 200
                monkeypatch.setattr(time, "time", lambda: now() + ahead)
                _, listed = await reader.call("GET", "/sessions")
                assert name in [session["session_id"] for session in listed["sessions"]]
                assert (await reader.ask(BODY, PATH.replace("/s/", f"/{name}/")).answer())[0] == 200
                monkeypatch.setattr(time, "time", now)
                for room in (one, other):
                    assert room.app.registry.archive is not None
                    await room.app.registry.sweep_store(room.app.registry.archive)
                assert (await maker.call("GET", f"/sessions/{name}"))[0] == 200

    asyncio.run(work())


def test_time_to_live_is_that_of_all_routers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with routers(tmp_path) as both:
            one, other = await both.another(), await both.another()
            await one.open(ttl_s=100.0)
            assert (await one.ask(BODY).answer())[0] == 200
            later = clocks(monkeypatch)

            async def sweep() -> None:
                for room in (one, other):
                    assert room.app.registry.archive is not None
                    room.app.registry.sweep()
                    await room.app.registry.sweep_store(room.app.registry.archive)

            later(60)
            assert (await other.call("POST", "/sessions/s/complete"))[0] == 200
            await until(lambda: other.session.log is not None and other.session.log.settled)
            later(120)
            await sweep()
            assert (await one.call("POST", "/sessions/s/complete"))[0] == 200
            await until(lambda: one.session.log is not None and one.session.log.settled)
            later(200)
            await sweep()
            assert (await other.call("GET", "/sessions/s"))[0] == 200
            later(240)
            await sweep()
            assert (await one.call("GET", "/sessions/s"))[0] == 404
            assert (await other.call("GET", "/sessions/s"))[0] == 404
            lost = [room.metric("tito_sessions_total", event="expired_unexported") for room in (one, other)]
            assert sum(lost) == 1

    asyncio.run(work())


def test_a_generation_keeps_its_session_from_other_routers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another router sees only the log: it must not end a session whose turn runs for longer than the time to live."""

    async def work() -> None:
        async with routers(tmp_path) as both:
            one, other, third = [await both.another() for _ in range(3)]
            await one.open(ttl_s=100.0)
            assert (await other.call("GET", "/sessions/s"))[0] == 200  # has it in memory; the third one does not
            held = one.engine.says("Yes.", hold=1)
            client = one.ask(BODY)
            await one.engine.arrived()
            later = clocks(monkeypatch)
            for ahead in range(60, 400, 60):
                later(ahead)
                for room in (one, other, third):
                    assert room.app.registry.archive is not None
                    room.app.registry.sweep()
                    await until(lambda room=room: all(s.log is None or s.log.settled for s in room.app.registry))
                    await room.app.registry.sweep_store(room.app.registry.archive)
            held.go.set()
            assert (await client.answer())[0] == 200
            assert len(await exported(third)) == 1
            later(500)
            for room in (third, other, one):
                assert room.app.registry.archive is not None
                await room.app.registry.sweep_store(room.app.registry.archive)
            assert (await one.call("GET", "/sessions/s"))[0] == 404

    asyncio.run(work())


def test_to_read_a_session_at_another_router_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with routers(tmp_path) as both:
            one, other = await both.another(), await both.another()
            await one.open(ttl_s=100.0)
            assert (await one.ask(BODY).answer())[0] == 200
            assert (await one.ask(more(BODY)).answer())[0] == 200
            assert other.hub.store is not None
            (before,) = await other.hub.store.logs("session")
            clocks(monkeypatch)(60)
            assert (await other.call("GET", "/sessions/s"))[1]["num_generations"] == 2
            await until(lambda: other.session.log is not None and other.session.log.settled)
            assert await other.hub.store.logs("session") == [before]

    asyncio.run(work())


def test_no_time_passes_while_no_router_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with routers(tmp_path) as both:
            room = await both.another()
            await room.open(ttl_s=100.0)
            await both.end(room)
            later = clocks(monkeypatch)
            later(1000)
            room = await both.another()
            assert room.app.registry.archive is not None
            await room.app.registry.sweep_store(room.app.registry.archive)
            assert (await room.call("GET", "/sessions"))[1]["sessions"][0]["session_id"] == "s"
            later(1200)
            await room.app.registry.sweep_store(room.app.registry.archive)
            assert (await room.call("GET", "/sessions/s"))[0] == 404
            assert room.metric("tito_sessions_total", event="expired") == 1

    asyncio.run(work())


def test_further_fields_are_blobs(tmp_path: Path) -> None:
    """Arrays are kept in their dtype, and come back byte for byte."""

    async def work() -> None:
        async with routers(tmp_path) as both:
            room = await both.another()
            await room.open()
            experts = base64.b64encode(bytes(range(48))).decode()
            extra = {"routed_experts": experts, "other": [1, {"a": 2.5}], "indexer_topk": "no base64!"}
            room.engine.says("one two", extra=extra)
            assert (await room.ask(BODY).answer())[0] == 200
            other = await both.another()
            assert await exported(other) == await exported(room)
            assert other.session.trie.head is not None
            assert {name: bytes(value) for name, value in other.session.trie.head.extra.items()} == {
                name: bytes(value)
                for name, value in room.session.trie.head.extra.items()  # type: ignore[union-attr]
            }
            assert room.hub.store is not None
            span = other.session.trie.head.span
            blobs = {blob.name: blob for blob in await room.hub.store.blobs(span.stored.id)}
            assert (blobs["routed_experts"].dtype, blobs["routed_experts"].data) == ("int32", bytes(range(48)))
            assert blobs["other"].dtype == blobs["indexer_topk"].dtype == "json"

    asyncio.run(work())


@pytest.mark.parametrize(("method", "path"), [("GET", "trajectories"), ("POST", "finalize")])
def test_an_exported_session_counts_as_retrieved(tmp_path: Path, method: str, path: str) -> None:
    """So the store forgets it before those that no trainer has."""

    async def work() -> None:
        async with routers(tmp_path) as both:
            room = await both.another()
            await room.open()
            assert (await room.ask(BODY).answer())[0] == 200
            assert (await room.call(method, f"/sessions/s/{path}"))[0] == 200
            assert room.hub.store is not None
            gone = await room.hub.store.forget(0)
            assert (gone.retrieved, gone.unretrieved) == (1, 0)

    asyncio.run(work())


def test_a_session_that_the_store_has_forgotten(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where it is still remembered it goes on, and is written again. Elsewhere it is gone, and the answer says so."""

    async def work() -> None:
        async with routers(tmp_path) as both:
            room = await both.another()
            await room.open()
            assert (await room.ask(BODY).answer())[0] == 200
            assert (await room.ask({**more(BODY), "n": 2}).answer())[0] == 200
            assert room.hub.store is not None
            assert (await room.hub.store.forget(0)).unretrieved == 1
            assert (await room.ask(more(more(BODY))).answer())[0] == 200
            assert room.metric("tito_session_unsaved_total") == 0
            await room.hub.store.forget(0)
            other = await both.another()
            assert (await other.call("GET", "/sessions/s"))[0] == 404
            assert (await other.call("POST", "/sessions", {"session_id": "s"}))[0] == 201
            assert (await room.call("GET", "/sessions/s"))[1]["num_generations"] == 0

    asyncio.run(work())
    assert "was forgotten: the store had no room" in caplog.text


@pytest.mark.parametrize("how", ["a sibling", "other tools", "an earlier turn"])
def test_a_forgotten_session_is_written_again_as_a_whole(tmp_path: Path, how: str) -> None:
    """Its log still names every turn, also those that the next one does not continue."""

    async def work() -> None:
        async with routers(tmp_path) as both:
            room = await both.another()
            await room.open()
            room.engine.says("one two", extra={"routed_experts": base64.b64encode(bytes(range(48))).decode()})
            assert (await room.ask(BODY).answer())[0] == 200
            assert (await room.ask(more(BODY)).answer())[0] == 200
            assert room.hub.store is not None
            await room.hub.store.forget(0)
            tools = [
                {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
            ]
            asked = {"a sibling": BODY, "other tools": {**more(BODY), "tools": tools}, "an earlier turn": more(BODY)}
            assert (await room.ask(asked[how]).answer())[0] == 200
            assert room.metric("tito_session_unsaved_total") == 0
            other = await both.another()
            assert await exported(other) == await exported(room)
            assert (await other.call("GET", "/sessions/s"))[1]["num_generations"] == 3

    asyncio.run(work())


def test_a_session_of_which_a_router_has_not_read_what_was_forgotten(tmp_path: Path) -> None:
    """It is gone there, instead of an error for every call; all other sessions are well."""

    async def work() -> None:
        async with routers(tmp_path) as both:
            one, other = await both.another(), await both.another()
            await one.open()
            assert (await one.ask(BODY).answer())[0] == 200
            assert (await other.ask(more(BODY)).answer())[0] == 200
            assert one.hub.store is not None
            await one.hub.store.forget(0)
            for room in (one, await both.another()):
                assert (await room.call("GET", "/sessions"))[1] == {"sessions": []}
                assert (await room.call("GET", "/sessions/s"))[0] == 404
                assert (await room.ask(BODY).answer())[0] == 404
            # Where it is remembered as a whole it goes on, and its next turn brings it back everywhere.
            assert (await other.ask(more(more(BODY))).answer())[0] == 200
            assert await exported(one) == await exported(other)
            await one.hub.store.forget(0)
            third = await both.another()
            assert (await third.call("POST", "/sessions", {"session_id": "s"}))[0] == 201
            assert (await one.ask(BODY).answer())[0] == 200
            assert len(await exported(await both.another())) == 1

    asyncio.run(work())


def test_a_budget_that_is_used_up_is_so_everywhere(tmp_path: Path) -> None:
    async def work() -> None:
        async with routers(tmp_path) as both:
            one, other = await both.another(), await both.another()
            await one.open(response_budget=3)
            assert (await one.ask(BODY).answer())[1]["choices"][0]["finish_reason"] == "stop"
            for room in (other, one):
                status, found = await room.ask(more(BODY)).answer()
                assert (status, found["choices"][0]["finish_reason"]) == (200, "length")
            (only,) = await exported(await both.another())
            assert (only["finish_reason"], only["num_turns"]) == ("length", 1)

    asyncio.run(work())


def test_the_names_of_tenants_do_not_mix() -> None:
    keys = {archive.log_key(tenant, name, 1) for tenant in ("", "a", "a/b", "a%2Fb") for name in ("s", "s.s")}
    assert len(keys) == 8
    assert {(archive.tenant_of(key), archive.id_of(key)) for key in keys} == {
        (tenant, name) for tenant in ("", "a", "a/b", "a%2Fb") for name in ("s", "s.s")
    }


def test_a_session_that_several_make_by_its_first_use_is_one(tmp_path: Path) -> None:
    async def work() -> None:
        async with routers(tmp_path) as both:
            rooms = [await both.another(implicit=True) for _ in range(2)]
            for number in range(5):
                named = {"x-session-id": f"new-{number}"}
                asked = [Client(rooms[n % 2].app, "POST", "/v1/chat/completions", BODY, named) for n in range(6)]
                answers = [await one.answer() for one in asked]
                assert [status for status, _ in answers] == [200] * 6, answers
                for room in rooms:
                    status, found = await room.call("GET", f"/sessions/new-{number}/trajectories")
                    assert (status, len(found["trajectories"])) == (200, 6)

    asyncio.run(work())


def test_whoever_makes_a_session_is_told_so_although_somebody_found_it_first(tmp_path: Path) -> None:
    async def work() -> None:
        async with routers(tmp_path) as both:
            room = await both.another()
            registry = room.app.registry
            archive: Any = registry.archive
            create = archive.create

            async def late(*asked: Any) -> None:
                await create(*asked)
                assert await registry.reach("", "s") is not None

            archive.create = late
            status, _ = await room.call("POST", "/sessions", {"session_id": "s"})
            assert status == 201
            assert (await room.ask(BODY).answer())[0] == 200
            assert len(await exported(room)) == 1

    asyncio.run(work())


def test_a_session_whose_log_was_set_back_goes_on_from_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A server that is killed may lose what it had acknowledged in its last second."""

    async def work() -> None:
        async with routers(tmp_path) as both:
            room, other = await both.another(), await both.another()
            await room.open()
            log: Any = room.session.log
            assert (await room.ask(BODY).answer())[0] == 200
            log.events.number += 1  # as if the store had lost one
            status, found = await room.ask(more(BODY)).answer()
            assert (status, found["error"]["type"]) == (503, "store_unreachable")
            assert (await room.ask(more(BODY)).answer())[0] == 200
            assert (await room.call("POST", "/sessions/s/finalize", {}))[0] == 200
            assert await exported(room) == await exported(other)
            assert "are not in the store: it was set back" in caplog.text

    asyncio.run(work())


@pytest.mark.parametrize(("method", "path"), [("DELETE", "/sessions/s"), ("POST", "/sessions/s/finalize")])
def test_a_generation_ends_soon_when_its_session_is_ended_elsewhere(method: str, path: str, tmp_path: Path) -> None:
    async def work() -> None:
        async with routers(tmp_path) as both:
            room, other = await both.another(), await both.another()
            await room.open()
            assert (await room.ask(BODY).answer())[0] == 200
            room.engine.says("one two", hold=1)
            late = room.ask(more(BODY))
            await room.engine.arrived()
            assert (await other.call(method, path, {}))[0] == 200
            registry: Any = room.app.registry
            await registry.sweep_store(registry.archive)
            async with asyncio.timeout(30):  # it is held until its worker is told to abort it
                assert (await late.answer())[0] == 409

    asyncio.run(work())


def test_of_two_requests_that_learn_of_the_end_the_slow_one_leaves_the_new_session_alone(tmp_path: Path) -> None:
    """Its name was used again meanwhile. The turn that runs in the new session belongs to it: DELETE aborts it."""

    async def work() -> None:
        async with routers(tmp_path) as both:
            one, other = await both.another(), await both.another()
            await one.open()
            assert (await one.ask(BODY).answer())[0] == 200
            assert (await other.call("DELETE", "/sessions/s"))[0] == 200
            await other.open()
            assert (await other.ask(BODY).answer())[0] == 200
            held = Held(one)
            one.engine.says("one two", hold=1)
            turn = one.ask(more(BODY))
            held.client = slow = Client(one.app, "GET", "/sessions/s", {}, {})
            await one.engine.arrived()
            held.go.set()
            status, found = await slow.answer()
            assert (status, found["num_inflight_generations"]) == (200, 1)
            assert one.app.registry.tokens == found["tokens"]
            assert (await one.call("DELETE", "/sessions/s"))[0] == 200
            assert (await turn.answer())[0] == 409
            assert one.app.registry.tokens == 0

    asyncio.run(work())


def test_a_record_that_is_written_down_again_is_the_same(tmp_path: Path) -> None:
    """It may be in the store by then: an append that was not answered goes on. Other content would be refused."""

    async def work() -> None:
        async with routers(tmp_path) as both:
            room, other = await both.another(), await both.another()
            await room.open()
            room.engine.says("Yes.", extra={"indexer_topk": [[1, 2]] * 3})
            assert (await room.ask(BODY).answer())[0] == 200
            assert (await room.ask(more(BODY)).answer())[0] == 200
            assert len(await exported(other)) == 1
            assert room.hub.store is not None
            there = {record.id: record async for record in room.hub.store.scan() if record.sampled}
            assert len(there) == 2
            assert any(record.extras for record in there.values())
            for one in (room, other):
                log: Any = one.session.log
                assert {record.id: record for record in log._book.again(there, "a later version")} == there

    asyncio.run(work())


def test_a_turn_whose_session_is_forgotten_meanwhile_has_no_session(tmp_path: Path) -> None:
    """Another router has sampled in it, too, and what was sampled there can no longer be read."""

    async def work() -> None:
        async with routers(tmp_path) as both:
            one, other = await both.another(), await both.another()
            await one.open()
            assert (await one.ask(BODY).answer())[0] == 200
            says = one.engine.says("late", hold=1)
            late = one.ask(more(BODY))
            await one.engine.arrived()
            assert (await other.ask(more(BODY)).answer())[0] == 200
            assert one.hub.store is not None
            await one.hub.store.forget(0)
            says.go.set()
            status, found = await late.answer()
            assert (status, found["error"]["type"]) == (409, "session_over")
            assert one.metric("tito_session_unsaved_total") == 0
            assert (await one.call("GET", "/sessions/s"))[0] == 404
            assert (await other.ask(more(more(BODY))).answer())[0] == 200
            assert await exported(one) == await exported(other)

    asyncio.run(work())


def test_a_session_is_written_again_while_a_router_reads_it(tmp_path: Path) -> None:
    async def work() -> None:
        async with routers(tmp_path) as both:
            one, other = await both.another(), await both.another()
            await one.open()
            assert (await one.ask(BODY).answer())[0] == 200
            store: Any = other.hub.store
            await store.forget(0)
            real, asked = store.get, []

            async def get(*args: Any, **more_: Any) -> Any:
                found = await real(*args, **more_)
                asked.append(args)
                if len(asked) == 1:
                    assert (await one.ask(more(BODY)).answer())[0] == 200
                return found

            store.get = get
            assert await exported(other) == await exported(one)
            assert len(asked) > 1

    asyncio.run(work())


def test_a_turn_that_is_being_saved_takes_no_room_from_others(tmp_path: Path) -> None:
    """Over the limit a turn is refused only if the store does not take what waits for it."""

    async def work() -> None:
        async with routers(tmp_path) as both:
            room = await both.another(max_tokens=10)
            await room.open()
            assert (await room.ask(BODY).answer())[0] == 200
            assert (await room.call("POST", "/sessions", {"session_id": "t"}))[0] == 201
            store: Any = room.hub.store
            real, appends, go = store.append, asyncio.Event(), asyncio.Event()

            async def slow(batch: Any) -> Any:
                appends.set()
                await go.wait()
                return await real(batch)

            store.append = slow
            saving = room.ask(more(BODY))
            await appends.wait()
            others = room.ask(BODY, PATH.replace("/s/", "/t/"))
            await until(lambda: len(room.engine.log) == 3 or others.out)
            go.set()
            assert [(await one.answer())[0] for one in (saving, others)] == [200, 200]

    asyncio.run(work())


def test_a_client_goes_on_while_what_it_left_is_being_saved(tmp_path: Path) -> None:
    """The message that the left turn began with is no longer in the trie, and its generation is not over yet."""

    async def work() -> None:
        async with routers(tmp_path) as both:
            room = await both.another()
            session = await room.open()
            messages = [*BODY["messages"], {"role": "assistant", "content": "Yes."}]
            says = room.engine.says(" Or no.", hold=1)
            left = room.ask({**BODY, "messages": messages, "continue_final_message": True, "stream": True})
            await room.engine.arrived()
            await left.leave()
            log: Any = session.log
            real, saved, go = log.append_turn, asyncio.Event(), asyncio.Event()

            async def slow(*args: Any) -> Any:
                found = await real(*args)
                saved.set()
                await go.wait()
                return found

            log.append_turn = slow
            says.go.set()
            await saved.wait()
            log.append_turn = real
            echo = {"role": "assistant", "content": "Yes. Or no."}
            status, found = await room.ask({**BODY, "messages": [BODY["messages"][0], echo, NEXT[1]]}).answer()
            go.set()
            assert status == 200, found
            (sent, sampled), (then, _) = room.engine.log[-2:]
            chain = [*sent["input_ids"], *sampled]
            assert then["input_ids"][: len(chain)] == chain
            assert [len(one["turns"]) for one in await exported(room)] == [2]

    asyncio.run(work())


def test_what_is_found_out_about_a_shared_prompt_later_is_known_everywhere(tmp_path: Path) -> None:
    """The record of the prompt is older. The next turn with that prompt brings it."""

    async def work() -> None:
        async with routers(tmp_path) as both:
            room, other = await both.another(), await both.another()
            await room.open()
            assert (await room.ask(BODY).answer())[0] == 200
            assert (await room.ask(more(BODY)).answer())[0] == 200
            assert len(await exported(other)) == 1
            head = room.session.trie.head
            assert head is not None
            assert head.span.parent is not None
            head.span.parent.flags |= SpanFlag.UNLIKE
            assert (await room.ask(more(BODY)).answer())[0] == 200
            found = await exported(room)
            assert [one["reasons"] for one in found] == [["template_mismatch"]] * 2
            assert await exported(other) == found == await exported(await both.another())

    asyncio.run(work())
