"""The store is away for a while, at random places, and routers are killed at random places: nothing is missing afterwards."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from middleware_hub.persistence import saving
from middleware_hub.persistence.saving import Saving
from middleware_hub.radix.cut import end_of
from middleware_hub.radix.late_answers import doubts
from middleware_hub.spans.chain import SpanFlag
from middleware_hub.store.errors import StoreUnreachableError
from middleware_hub.store.guarded import GuardedStore
from middleware_hub.store.opening import open_store
from middleware_hub.store.protocol import Store
from middleware_hub.store.records import Serials
from middleware_hub.store.spool.folder import SpoolFolder
from middleware_hub.store.spool.handover import Adoption
from tests.conftest import examples
from tests.middleware_hub.persistence.lives import Ask, Life, Namespace
from tests.middleware_hub.persistence.test_restarts import NAMESPACES, PICK, REQUEST, request_of
from tests.middleware_hub.store.dying import dies
from tests.middleware_hub.store.troubled import TroubledStore
from tests.middleware_hub.store.world import MEMORY

ASK = st.tuples(st.just("ask"), REQUEST)
STEP = st.one_of(
    ASK,
    ASK,
    ASK,
    st.tuples(st.just("retrieve"), PICK),
    st.tuples(st.just("appends"), st.sampled_from(["raises", "fails after", "hangs"])),
    st.tuples(st.just("back")),
    st.tuples(st.just("half")),
    st.tuples(st.just("kill")),
    st.tuples(st.just("restart")),
)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that hangs is noticed at once, so that nobody waits in these tests."""
    monkeypatch.setattr(saving, "ANSWER_SECONDS", 0.004)
    monkeypatch.setattr(saving, "CLOSE_SECONDS", 0.02)
    monkeypatch.setattr(saving, "_LOOK_SECONDS", 0.001)
    monkeypatch.setattr(saving, "RETRY_SECONDS", 3600.0)


class Routers:
    """One life that never ends and has no store, and one whose store comes and goes, and that dies now and then."""

    left = False
    """Whether the store does not take what a dead router has left."""

    def __init__(self, folder: str, max_tokens: int | None) -> None:
        self.folder = folder
        self.max_tokens = max_tokens
        self.one = Life(None, Serials())
        self.serials = Serials()
        self.troubled: TroubledStore
        self.saving: Saving
        self.many: Life

    async def begin(self) -> None:
        address = f"sqlite:{self.folder}/store.sqlite3"
        self.troubled = TroubledStore(open_store(address))
        guarded = GuardedStore(self.troubled)  # type: ignore[arg-type]
        await guarded.open("toy")
        self.saving = Saving(guarded)

        async def another() -> Store:
            store = open_store(address)
            await store.open("toy")
            return store

        await self.saving.open(SpoolFolder(f"{self.folder}/spool", address, "toy", 1 << 20), another)
        assert self.saving.incomplete == self.left
        self.many = Life(guarded, self.serials, self.max_tokens, self.saving)
        self.many.away = True
        await self.many.begin()

    async def end(self, *, killed: bool) -> None:
        """End a life: by a signal it has no time to hand anything over, and its locks end with it."""
        if killed:
            for task in (self.saving._adopting, self.saving._trying, self.many.memory and self.many.memory._tending):
                if task is not None:
                    task.cancel()
            for append in [*self.saving._waited_for, *self.saving._stuck]:
                append.cancel()
            dies(self.saving._spool)
        else:
            await self.many.end()
        await asyncio.sleep(0)
        await self.saving.store.close()


def request(**how: Any) -> dict[str, Any]:
    rest = {"namespace": 0, "pick": 0, "cut": 1, "long": False, "parent": None, "version": "1", "skips": True}
    return {"kind": "start", "extra": "a", "sampled": [2, 3], **rest, **how}


def spools(folder: str) -> list[Path]:
    return list(Path(folder, "spool").rglob("*.spool.sqlite3"))


async def play(folder: str, steps: list[Any], max_tokens: int | None) -> None:
    routers = Routers(folder, max_tokens)
    await routers.begin()
    said: list[tuple[int, str, str, list[int]]] = []

    async def retrieve(namespace: Namespace, text: str, name: str | None = None) -> None:
        expected = await routers.one.retrieve(namespace, text, name)
        assert await routers.many.retrieve(namespace, text, name) == expected

    for number, (kind, *rest) in enumerate(steps):
        if kind == "appends":
            routers.troubled.appends = rest[0]
        elif kind == "back":
            routers.troubled.mend()
            assert await routers.saving.hand_over()
        elif kind == "half":
            routers.troubled.mend()  # nobody has noticed
        elif kind in ("kill", "restart"):
            await routers.end(killed=kind == "kill")
            await routers.begin()
        elif kind == "ask":
            ask = request_of(rest[0], said, number)
            if ask is None:
                continue
            expected = await routers.one.ask(ask)
            found = await routers.many.ask(ask)
            assert found == expected
            chain = await routers.one.chain_of(ask.namespace, ask.name)
            assert chain is not None
            assert await routers.many.chain_of(ask.namespace, ask.name) == chain
            said.append((NAMESPACES.index(ask.namespace), str(found["text"]), ask.name, chain))
            await retrieve(ask.namespace, str(found["text"]))
        elif said:
            namespace, text, _, _ = said[rest[0] % len(said)]
            await retrieve(NAMESPACES[namespace], text)
    routers.troubled.mend()
    assert await routers.saving.hand_over()
    assert (routers.saving.waiting, routers.saving.lost) == (0, 0)
    await routers.end(killed=False)
    assert not spools(folder), "nothing waits"
    await routers.begin()  # everything comes from the store
    for namespace, text, name, _ in said:
        await retrieve(NAMESPACES[namespace], text)
        await retrieve(NAMESPACES[namespace], text, name)
    replies = [record async for record in routers.saving.store.scan() if record.sampled]
    assert len(replies) == len(said), "each reply is recorded once"
    assert [finding async for finding in routers.saving.store.verify()] == []
    await routers.end(killed=False)


@settings(max_examples=examples(150), deadline=None, report_multiple_bugs=False)
@given(steps=st.lists(STEP, min_size=3, max_size=16), budget=st.none() | st.integers(0, 30))
def test_a_router_whose_store_comes_and_goes_answers_as_one_that_never_died(
    steps: list[Any], budget: int | None
) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        asyncio.run(play(folder, steps, budget))


@pytest.mark.parametrize("before", [0, 1, 3])
def test_what_was_adopted_is_looked_up(before: int, tmp_path: Path) -> None:
    """Also by a router that takes itself for the only one, and in conversations that it knows."""
    steps = [("ask", request())] * before
    steps += [("appends", "raises"), ("ask", request(kind="continue", extra="b")), ("kill",), ("retrieve", before)]
    asyncio.run(play(str(tmp_path), steps, None))


@pytest.mark.parametrize("saved", [0, 1])
def test_what_a_dead_router_left_and_the_store_does_not_take_may_belong_to_any_text(saved: int, tmp_path: Path) -> None:
    """Also if the store has nothing else, and to the notes of any chat."""

    async def work() -> None:
        routers = Routers(str(tmp_path), None)
        await routers.begin()
        for appends in (*["none"] * saved, "raises"):
            routers.troubled.appends = appends  # type: ignore[assignment]
            ask = request_of(request(), [], 0)
            assert ask is not None
            text = (await routers.many.ask(ask))["text"]
        await routers.end(killed=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Adoption, "run", look)
            routers.left = True
            await routers.begin()
        memory = routers.many.memory
        assert memory is not None
        match = await routers.many.match(replace(ask, text=text + "b"))
        assert match.unasked
        assert (match.continues is not None) == bool(saved), "what the store has is used all the same"
        for _ in range(2):
            assert not await memory.cover(ask.namespace, text)
            assert (await routers.many.match(ask)).unasked
            with pytest.raises(StoreUnreachableError):
                await memory.notes(ask.namespace, ["n"], whole=True)
        adoption = routers.saving._adoption
        assert adoption is not None
        await adoption.run()
        assert await memory.cover(ask.namespace, text)
        assert not await memory.notes(ask.namespace, ["n"], whole=True)
        await routers.end(killed=False)

    asyncio.run(work())


async def look(adoption: Adoption) -> None:
    """Stands for a store that takes no writes: the files are found, and that is all."""
    adoption.left += adoption._left_behind()


@pytest.mark.parametrize("versions", ["12|121|11", "2|1212|11", "12|1212121|11"])
def test_versions_that_are_noted_again_while_the_store_is_away_are_all_handed_over(
    versions: str, tmp_path: Path
) -> None:
    """The same news twice: a version goes back, comes, and goes back. The third reply in a row is a fall."""
    before, away, after = ([("ask", request(version=one)) for one in part] for part in versions.split("|"))
    asyncio.run(play(str(tmp_path), [*before, ("appends", "raises"), *away, ("kill",), *after], None))


def test_what_is_handed_over_after_an_outage_is_looked_up_once(tmp_path: Path) -> None:
    """Also the turns of one chain, each of which was made without the store, and which are handed over together."""
    turns = 12

    async def work() -> None:
        routers = Routers(str(tmp_path), None)
        await routers.begin()
        troubled, store, memory = routers.troubled, routers.saving.store, routers.many.memory
        assert memory is not None
        troubled.appends = troubled.reads = "raises"
        text = ""
        for number in range(turns):
            turn = Ask(NAMESPACES[0], text + "a b", None, None, [2, 3], f"r{number}", "1")
            text = str((await routers.many.ask(turn))["text"])
        last = routers.many.tree.reply(NAMESPACES[0], f"r{turns - 1}")
        assert last is not None
        unasked = doubts(NAMESPACES[0], end_of(last.span))
        assert len(unasked) >= turns - 2, "all but those before the outage was noticed"
        troubled.mend()
        assert store._probing is not None
        await store._probing
        troubled.asked.clear()
        assert await routers.saving.hand_over()
        assert memory._asking is not None
        await memory._asking
        assert troubled.asked["find"] == len(unasked)
        assert all(doubt.span.flags & SpanFlag.DOUBTFUL == SpanFlag.ASKED_LATE for doubt in unasked)
        await routers.end(killed=False)

    asyncio.run(work())
