"""One request of a client and the generations that answer it, which outlive the client.

    attached     a client reads along
    orphaned     it left; for the grace, somebody who sends the same request again may adopt it. Then it is aborted
    over         every generation has its answer, or its error
    delivered    a client has had all of it

A client's library that lost its connection sends its request again: it must not get another sample. But two clients that
want the same thing at the same time want two samples, so an exchange that is attached is never joined.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from middleware_hub.sessions.generation import Generation

RequestKey = tuple[str | None, bytes]

logger = logging.getLogger(__name__)


class Exchange:
    """See the top of this file.

    Args:
        key: by which the same request is known again: its `Idempotency-Key`, and its body.
        grace: seconds that it goes on without a client.
        on_over: told once, when the last generation is over.
        notes: what is to be known about how its prompt was made, one word each.
    """

    def __init__(
        self, key: RequestKey, *, grace: float, on_over: Callable[[Exchange], None], notes: tuple[str, ...] = ()
    ) -> None:
        self.key = key
        self.notes = notes
        self.generations: list[Generation] = []
        self.delivered = False
        self._grace = grace
        self._on_over = on_over
        self._attached = True
        self._bell = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._aborting: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        state = "over" if self.over else "attached" if self._attached else "orphaned"
        return f"<Exchange of {len(self.generations)}: {state}>"

    @property
    def over(self) -> bool:
        """Whether all generations are."""
        return all(generation.over for generation in self.generations)

    @property
    def adoptable(self) -> bool:
        """Whether nobody reads along, nobody has had all of it, and there is something to be had."""
        waiting = not self._attached and not self.delivered and self._aborting is None
        return waiting and (not self.over or self.answered)

    @property
    def answered(self) -> bool:
        """Whether there is an answer of any generation."""
        return any(generation.answer is not None for generation in self.generations)

    def start(self, generations: list[Generation]) -> None:
        """Let them run, whoever listens."""
        self.generations = generations
        for generation in generations:
            self._tasks.append(asyncio.create_task(self._run(generation)))

    async def _run(self, generation: Generation) -> None:
        try:
            await generation.run()
        finally:
            if self.over:
                if self._timer is not None:
                    self._timer.cancel()
                self._on_over(self)

    def ring(self) -> None:
        """There is something new to read."""
        self._bell.set()

    async def news(self) -> None:
        """Wait until there is; what was new before the last call does not count."""
        await self._bell.wait()
        self._bell.clear()

    async def all_over(self) -> None:
        """Wait until every generation is over."""
        while not self.over:
            await self.news()

    async def begun(self) -> None:
        """Wait until the first of them says something, or all are over."""
        while not self.over and not any(generation.begun for generation in self.generations):
            await self.news()

    def attach(self) -> None:
        """A client reads along."""
        self._attached = True
        self._bell.set()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def detach(self, *, delivered: bool) -> None:
        """The client has had everything, or is gone."""
        self._attached = False
        self.delivered = self.delivered or delivered
        if not self.over and not self.delivered:
            logger.info("a client left: its generation goes on for %g s, for whoever asks again", self._grace)
            self._timer = asyncio.get_running_loop().call_later(self._grace, self._give_up)

    def release(self) -> None:
        """Its client has had it. Generations and exchange know each other: what they hold would stay until a collection."""
        self.generations = []
        self._tasks = []
        self.key = (None, b"")

    def _give_up(self) -> None:
        self._aborting = asyncio.get_running_loop().create_task(self.abort())

    async def abort(self) -> None:
        """End all that runs: workers hand over what they have sampled, and those that do not are left."""
        running, tasks = [g for g in self.generations if not g.over], self._tasks
        if running:
            await asyncio.gather(*(generation.abort() for generation in running))
            await asyncio.wait(tasks, timeout=_HAND_OVER_SECONDS)
        await self.cancel()

    async def cancel(self) -> None:
        """End all that runs, at once."""
        if self._timer is not None:
            self._timer.cancel()
        tasks = self._tasks
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


_HAND_OVER_SECONDS = 5.0
