"""Batches of requests to one router, and what to do when one of them was too much for it: find the smallest that is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from tests.fuzz.case import Case
from tests.fuzz.draw import Drawing, Shape
from tests.fuzz.garbled import SEED
from tests.fuzz.shrink import smaller
from tests.fuzz.tally import Tally
from tests.fuzz.target import Target

AT_ONCE = 8
SECONDS = 30.0  # for one answer
_PATIENCE = 200  # requests, to find a smaller one

SHARES = {"/generate": 60, "/retrieve_from_text": 12, "/radix_tree/explain": 5, "/abort_request": 8, "/add_worker": 3}
SHARES |= {"/sessions/s/v1/chat/completions": 20, "/sessions/s/v1/messages": 12, "/sessions": 3}
SHARES |= {
    "/sessions/s/v1/responses": 8,
    "/trajectories/claim": 6,
    "/trajectories/reward": 4,
    "/v1/chat/completions": 6,
}
"""Of the routes where there is most to go wrong; every other one has one."""


@dataclass(frozen=True)
class Batch:
    """Requests of one route, spoilt in one way; one for each number."""

    path: str
    shape: Shape
    numbers: Sequence[int]


class Round:
    """A router, and what it is sent.

    Args:
        make: makes one like it, for a second look at what left something behind.
        tally: of all rounds.
    """

    def __init__(self, make: Callable[[], Target], tally: Tally) -> None:
        self._make = make
        self._tally = tally
        self._running = AsyncExitStack()
        self.target = make()
        self._drawing = Drawing(self.target.around)

    @property
    def paths(self) -> list[str]:
        """All routes, each as often as it is to be taken."""
        return [path for path in self._drawing.paths for _ in range(SHARES.get(path, 1))]

    async def start(self) -> None:
        """The router's startup."""
        await self._running.enter_async_context(self.target.running())

    async def begin(self) -> None:
        """What runs now is what runs always."""
        self.target.begin()

    async def stop(self) -> None:
        """Its shutdown."""
        await self._running.aclose()

    async def play(self, batch: Batch) -> str | None:
        """Send a batch: what was wrong, and with which request; None if nothing was."""
        with self.target.watched():
            wrong = await self._play(batch)
        if wrong is not None:
            await self._renew()
        return wrong

    async def _play(self, batch: Batch) -> str | None:
        found: list[tuple[int, str]] = []
        waiting = iter(batch.numbers)

        async def client() -> None:
            for number in waiting:
                case = self._case(batch, number)
                if case is not None:
                    answer, wrong = await self.target.ask(case, SECONDS)
                    self._tally.add(batch.path, case, answer)
                    if wrong is not None:
                        found.append((number, wrong))

        await asyncio.gather(*(client() for _ in range(AT_ONCE)))
        wrong = await self.target.afterwards()
        if wrong is not None and not found:
            wrong = await self._blamed(batch, wrong)
        if found:
            wrong = await self._told(batch, *found[0])
        return wrong

    async def _renew(self) -> None:
        """What was left behind is not to be found again and again."""
        await self.stop()
        self.target = self._make()
        self._running = AsyncExitStack()
        await self.start()
        await self.begin()

    def _case(self, batch: Batch, number: int, steps: int | None = None) -> Case | None:
        if self.target.good_workers:
            return self._drawing.case(batch.path, batch.shape, number, steps)
        # The reply is spoilt as well; and mostly only that, for a bad request gets none.
        shape = "nothing" if number % 3 else batch.shape
        case = self._drawing.case(batch.path, shape, number, steps)
        return case and replace(case, headers=(*case.headers, (SEED, b"%d" % number)))

    async def _told(self, batch: Batch, number: int, wrong: str) -> str:
        """With as little in it as still does it."""
        case = self._case(batch, number)
        assert case is not None
        fewer = [self._case(batch, number, steps) for steps in range(self._drawing.steps(number))]
        candidates = iter([one for one in fewer if one is not None])
        for _ in range(_PATIENCE):
            candidate = next(candidates, None)
            if candidate is None:
                break
            _, again = await self.target.ask(candidate, SECONDS)
            if again is not None:
                case, wrong = candidate, again
                candidates = smaller(case)
        await self.target.afterwards()
        return f"{wrong}\n\n{self.target.kind}, {batch.path}, {batch.shape}, {number}:\n{case}"

    async def _blamed(self, batch: Batch, wrong: str) -> str:
        """Which request it was, if it was one alone: in a router that has seen no other."""
        if len(batch.numbers) == 1:
            return f"{wrong}\n\n{self.target.kind}, {batch}:\n{self._case(batch, batch.numbers[0])}"
        other = Round(self._make, self._tally)
        await other.start()
        await other.begin()
        try:
            for number in batch.numbers:
                again = await other.play(replace(batch, numbers=[number]))
                if again is not None:
                    return again
        finally:
            await other.stop()
        return f"{wrong}\n\n{self.target.kind}, after all of {batch}, and after none of them alone"
