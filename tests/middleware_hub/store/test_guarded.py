"""A store that hangs, or comes and goes, hangs nobody."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from middleware_hub.store import guarded
from middleware_hub.store.errors import StoreUnreachableError
from middleware_hub.store.guarded import GuardedStore
from middleware_hub.store.protocol import Batch
from middleware_hub.store.records import Event
from tests.middleware_hub.sessions.in_process import until
from tests.middleware_hub.store.troubled import Trouble, TroubledStore
from tests.support.dictionary_store import DictionaryStore

LOOKUPS: list[Callable[[GuardedStore], Awaitable[object]]] = [
    lambda store: store.read("log"),
    lambda store: store.logs(),
    lambda store: store.get([]),
    lambda store: store.blobs(b""),
    lambda store: store.announced(),
]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded, "ANSWER_SECONDS", 0.02)
    monkeypatch.setattr(guarded, "FETCH_SECONDS", 0.02)
    monkeypatch.setattr(guarded, "PROBE_SECONDS", 0.005)


@pytest.mark.parametrize("trouble", ["raises", "hangs"])
@pytest.mark.parametrize("ask", LOOKUPS)
def test_only_the_first_who_ask_wait(ask: Callable[[GuardedStore], Awaitable[object]], trouble: Trouble) -> None:
    async def work() -> None:
        troubled = TroubledStore(DictionaryStore())
        store = GuardedStore(troubled)  # type: ignore[arg-type]
        await store.open("toy")
        await ask(store)
        troubled.reads = trouble
        with pytest.raises(StoreUnreachableError):
            await ask(store)
        assert store.away
        asked = dict(troubled.asked)
        for _ in range(100):
            for one in LOOKUPS:
                with pytest.raises(StoreUnreachableError):
                    await one(store)
            with pytest.raises(StoreUnreachableError):
                await store.append(Batch())
        assert troubled.asked == asked, "nobody asks but the probe"
        troubled.mend()
        await until(lambda: not store.away)
        await ask(store)
        assert store.away_seconds > 0
        await store.close()

    asyncio.run(work())


def test_a_router_waits_for_a_store_that_starts(caplog: pytest.LogCaptureFixture) -> None:
    class Starting(DictionaryStore):
        tries = 0

        async def open(self, fingerprint: str | None) -> None:
            self.tries += 1
            if self.tries < 4:
                raise StoreUnreachableError("not yet")
            await super().open(fingerprint)

    async def work() -> None:
        store = Starting()
        with pytest.raises(StoreUnreachableError):
            await GuardedStore(store).open("toy")
        patient = GuardedStore(store, patience=5)
        await patient.open("toy")
        await patient.close()

    asyncio.run(work())
    assert caplog.text.count("waiting for the store") == 1


def test_a_loop_that_is_late_is_no_store_that_is_away() -> None:
    """The answer lies there unread when the loop goes on, and so is the time limit over."""

    class Answering(DictionaryStore):
        async def read(self, log: str, *, after: int = 0, limit: int = 1_000) -> list[Event]:
            answer = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_later(0.001, answer.set_result, [])
            found: list[Event] = await answer
            return found

    async def work() -> None:
        store = GuardedStore(Answering())
        await store.open("toy")
        asyncio.get_running_loop().call_soon(time.sleep, 0.1)  # longer than any answer may take
        assert await store.read("log") == []
        assert not store.away
        await store.close()

    asyncio.run(work())
