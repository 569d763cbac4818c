"""Up to three trees over one store answer as one that never dies: killed, restarted, without room, kept from writing."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from middleware_hub.persistence import saving
from middleware_hub.store.errors import StoreUnreachableError
from middleware_hub.store.records import Serials
from tests.conftest import DEAR, examples
from tests.middleware_hub.persistence import at_once
from tests.middleware_hub.persistence.drawn import NAMESPACES, PICK, REQUEST, request_of
from tests.middleware_hub.persistence.lives import Ask, Life, Lives
from tests.middleware_hub.toy import AB, E_HEAD, E_TAIL, EOS, SPACE, A, B
from tests.support.usual import usual

Said = list[tuple[int, str, str, list[int]]]
TOGETHER = [3, 4, 5]
SPACES = [*NAMESPACES, ("", "adapter", ""), ("", "", "eval")]
"""Of requests at one moment each has a namespace of its own, so that their order does not matter."""

ASK = st.tuples(st.just("ask"), PICK, REQUEST)
STEP = st.one_of(
    *[ASK] * 4,
    st.tuples(st.just("together"), st.lists(st.tuples(PICK, REQUEST), min_size=2, max_size=3)),
    st.tuples(st.just("refused"), PICK, st.lists(REQUEST, min_size=1, max_size=4), st.booleans()),
    st.tuples(st.just("retrieve"), PICK, PICK, st.integers(0, 6), st.none() | PICK),
    st.tuples(st.just("name"), PICK, PICK),
    st.tuples(st.just("restart"), PICK),
    st.tuples(st.just("kill"), PICK),
    *[st.tuples(st.just("begin"), PICK, REQUEST)] * 2,
    st.tuples(st.just("end"), PICK, st.integers(1, 3)),
)


class Play:
    """Steps at random lives, and what was said in them."""

    def __init__(self, lives: Lives) -> None:
        self.lives = lives
        self.said: Said = []
        self.count = 0
        self.open: list[at_once.Open] = []

    async def begin(self, life: int, how: dict[str, Any]) -> None:
        """Begin a request that ends later: what is recorded meanwhile is not in its prompt."""
        self.count += 1
        ask = request_of(how, self.said, self.count, SPACES)
        if ask is not None:
            self.open.append(await at_once.begin(self.lives, life, ask))

    async def end(self, some: list[at_once.Open]) -> None:
        self.open = [one for one in self.open if one not in some]
        for one, text in zip(some, await at_once.end(self.lives, some), strict=True):
            chain = await self.lives.chain_of(one.number, one.ask.namespace, one.ask.name)
            assert chain is not None
            self.said.append((SPACES.index(one.ask.namespace), text, one.ask.name, chain))
            await self.lives.retrieve(one.number, one.ask.namespace, text)

    async def leave(self, life: int, *, killed: bool = False) -> None:
        """End the open requests of a life before its end: with their replies, or without."""
        for one in [one for one in self.open if one.number == life % self.lives.count]:
            if killed:
                self.open.remove(one)
                at_once.drop(self.lives, one)
            else:
                await self.end([one])

    async def ask(self, life: int, how: dict[str, Any], space: int | None = None) -> None:
        self.count += 1
        before = self.said if space is None else [one for one in self.said if one[0] == space]
        if space is not None:
            how = {**how, "namespace": space}
        ask = request_of(how, before, self.count, SPACES)
        if ask is None:
            return
        text = await self.lives.ask(life, ask, alone=space is None)
        chain = await self.lives.chain_of(life, ask.namespace, ask.name)
        assert chain is not None
        self.said.append((SPACES.index(ask.namespace), text, ask.name, chain))
        await self.lives.retrieve(life, ask.namespace, text)

    async def step(self, kind: str, *rest: Any) -> None:
        lives, said = self.lives, self.said
        if kind == "ask":
            await self.ask(*rest)
        elif kind == "together":
            # Of two at one moment either may be the current one afterwards; of two older ones at two routers only one counts.
            version, clock = rest[0][0][1]["version"], lives.one.tree.clock
            version = clock.current if clock.current and clock.distance(version) > 0 else version
            async with asyncio.TaskGroup() as group:
                for space, (life, how) in zip(TOGETHER, rest[0], strict=False):
                    group.create_task(self.ask(life, {**how, "version": version}, space))
        elif kind == "refused":
            life, requests, ends = rest
            await self.leave(life)
            lives.lines[life % lives.count].refuses = True
            for how in requests:
                await self.ask(life, how)
            if ends:
                lives.lines[life % lives.count].refuses = False
                await lives.restart(life)
            else:
                await lives.back(life)
        elif kind in ("restart", "kill"):
            await self.leave(rest[0], killed=kind == "kill")
            await lives.restart(rest[0], killed=kind == "kill")
        elif kind == "begin":
            await self.begin(*rest)
        elif kind == "end":
            at = rest[0] % max(1, len(self.open))
            await self.end([*self.open[at:], *self.open[:at]][: rest[1]])
        elif said and kind == "name":
            space, _, name, _ = said[rest[1] % len(said)]
            await lives.chain_of(rest[0], SPACES[space], name)
        elif said:
            space, text, _, _ = said[rest[1] % len(said)]
            name = None if rest[3] is None else said[rest[3] % len(said)][2]
            await lives.retrieve(rest[0], SPACES[space], text[: len(text) - rest[2]] or "a", name)

    async def run(self, steps: list[Any]) -> None:
        async with self.lives:
            for kind, *rest in steps:
                await self.step(kind, *rest)
            await self.end(self.open)
            for space, text, name, _ in self.said:
                for other in range(self.lives.count):
                    await self.lives.retrieve(other, SPACES[space], text)
                    await self.lives.retrieve(other, SPACES[space], text, name)
                await self.lives.made_again(other)
            assert [finding async for finding in self.lives.stores[0].verify()] == []


@pytest.mark.parametrize("scheme", usual(["memory", "sqlite", "redis"], "memory", "sqlite"))
@settings(max_examples=examples(300, DEAR), deadline=None, report_multiple_bugs=False)
@given(
    lives=st.integers(1, 3),
    steps=st.lists(STEP, min_size=2, max_size=16),
    budget=st.none() | st.integers(0, 30),
    seed=st.none() | st.integers(0, 9),
)
def test_trees_over_one_store_answer_as_one_that_never_died(
    scheme: str, lives: int, steps: list[Any], budget: int | None, seed: int | None
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "RETRY_SECONDS", 0.0)
        asyncio.run(Play(Lives(scheme, lives, budget, seed)).run(steps))


class OffClock(Serials):
    """Numbers of a machine whose clock is off by some seconds."""

    def __init__(self, seconds: int) -> None:
        super().__init__()
        self._off = seconds * 10**9

    def next(self) -> int:
        self._last = max(self._last + 1, time.time_ns() + self._off)
        return self._last


class OffClocks(Lives):
    """Each life has a clock of its own."""

    def __init__(self, scheme: str, off: list[int]) -> None:
        super().__init__(scheme, len(off))
        self._off = off

    def _life(self, number: int) -> Life:
        as_store: Any = self.lines[number]
        return Life(as_store, OffClock(self._off[number]))


@pytest.mark.parametrize("scheme", ["sqlite", "redis"])
@pytest.mark.parametrize("off", [(3600, 0), (0, 3600), (-3600, 3600)])
def test_the_newest_is_the_newest_whatever_the_clocks_of_machines_say(scheme: str, off: tuple[int, int]) -> None:
    """Equal texts in the order of asking, at each router and at one that is started later."""

    async def run() -> None:
        async with OffClocks(scheme, [*off]) as lives:
            text = ""
            for turn in range(5):
                text = await lives.ask(turn, Ask(SPACES[0], "a", None, None, [5, 0], f"r{turn}", "1"))
                for other in range(2):
                    await lives.retrieve(other, SPACES[0], text)
            await lives.restart(0)
            await lives.retrieve(0, SPACES[0], text)

    asyncio.run(run())


@pytest.mark.parametrize("scheme", ["memory", "sqlite"])
@pytest.mark.parametrize("text", ["a<e>b", "a<e>bb", "a<e>"])
def test_what_one_request_has_lost_is_not_said_of_the_next_ones(scheme: str, text: str) -> None:
    """They reuse no sampled token of it, and its context is what encoding their own text gives."""

    async def run() -> None:
        async with Lives(scheme, 2) as lives:
            await lives.ask(0, Ask(SPACES[0], "a<e>b", None, "nobody", [5, 0], "r0", "1"))
            said = await lives.ask(0, Ask(SPACES[0], text, None, None, [6, 0], "r1", "1"))
            for other in range(2):
                found = await lives.lives[other].retrieve(SPACES[0], said, "r1")
                assert found is not None
                assert "unknown_parent" not in found["reasons"]
                await lives.retrieve(other, SPACES[0], said, "r1")

    asyncio.run(run())


@pytest.mark.parametrize("scheme", ["sqlite", "redis"])
@pytest.mark.parametrize("text", ["a<e>b", "a<e>bb", "a<e>"])
def test_what_one_request_could_not_ask_for_is_not_said_of_the_next_ones(scheme: str, text: str) -> None:
    """Their replies are exact: here, at another router, and when all of it comes from the store."""

    async def run() -> None:
        async with Lives(scheme, 2) as lives:
            line: Any = lives.lines[0]
            real, spared = line.find, line.spared
            line.find, line.spared = unreachable, lambda query: None  # nothing is certain without asking
            first = Ask(SPACES[0], "a<e>b", None, None, [5, 0], "r0", "1")
            await lives.one.ask(first)
            await lives.ask(1, Ask(SPACES[3], "b", None, None, [5], "other", "1"))
            said = await lives.lives[0].ask(first)
            assert said["reasons"] == ("store_unreachable",)
            line.find, line.spared = real, spared
            exact = await lives.ask(0, Ask(SPACES[0], text, None, None, [6, 0], "r1", "1"))
            behind = await lives.ask(0, Ask(SPACES[0], exact + "b", None, "r1", [6, 0], "r2", "1"))
            for number in (0, 1, 0):
                await lives.retrieve(number, SPACES[0], exact, "r1")
                await lives.retrieve(number, SPACES[0], behind, "r2")
                found = await lives.lives[number].retrieve(SPACES[0], str(said["text"]), "r0")
                assert found is not None
                assert found["reasons"] == ("store_unreachable",)
                await lives.restart(number)

    asyncio.run(run())


async def unreachable(query: Any) -> Any:
    """Stands for a look-up of a store that does not answer."""
    raise StoreUnreachableError("it does not answer")


class Gate:
    """Holds the first look-up of a life until `go` is set."""

    def __init__(self, lives: Lives, number: int) -> None:
        self._line: Any = lives.lines[number]
        self._real, self._line.find = self._line.find, self._find
        self.reached, self.go = asyncio.Event(), asyncio.Event()

    async def _find(self, query: Any) -> Any:
        self._line.find = self._real
        self.reached.set()
        await self.go.wait()
        return await self._real(query)


SCHEMES = ["memory", "sqlite", "redis"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_ids_that_leave_a_sample_where_another_one_ends_continue_it(scheme: str) -> None:
    """Both have the same text up to there, and only the longer one has these ids."""

    async def run() -> None:
        async with Lives(scheme, 2) as lives:
            await lives.ask(0, Ask(SPACES[0], "a", None, None, [AB], "r0", "1"))
            await lives.ask(0, Ask(SPACES[0], "a", None, None, [A, B, SPACE], "r1", "1"))
            said = await lives.ask(1, Ask(SPACES[0], "aabé", [A, A, B, E_HEAD, E_TAIL], None, [EOS], "r2", "1"))
            for number in range(2):
                await lives.retrieve(number, SPACES[0], said)

    asyncio.run(run())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_another_request_has_brought_meanwhile_is_continued(scheme: str) -> None:
    """The store does not bring it again, and the match was made before it was there."""

    async def run() -> None:
        async with Lives(scheme, 2) as lives:
            said = await lives.ask(0, Ask(SPACES[0], "a b", None, None, [5, 6, 0], "r0", "1"))
            gate = Gate(lives, 1)
            late = asyncio.create_task(lives.ask(1, Ask(SPACES[0], said + "b", None, None, [6, 0], "r1", "1")))
            await asyncio.wait_for(gate.reached.wait(), 60)
            assert await lives.lives[1].retrieve(SPACES[0], said) is not None
            gate.go.set()
            await late

    asyncio.run(run())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_evicted_while_the_store_is_asked_is_read_again(scheme: str) -> None:
    """The store leaves it out, because it was there when it was asked for."""

    async def run() -> None:
        async with Lives(scheme, 1, 0, seed=1) as lives:
            for turn in range(12):
                how = [Ask(SPACES[space], "a b", None, None, [5, space, 0], f"r{turn}", "1") for space in TOGETHER]
                async with asyncio.TaskGroup() as group:
                    for ask in how:
                        group.create_task(told(lives, ask))

    async def told(lives: Lives, ask: Ask) -> None:
        text = await lives.ask(0, ask, alone=False)
        await lives.chain_of(0, ask.namespace, ask.name)
        await lives.retrieve(0, ask.namespace, text)

    asyncio.run(run())
