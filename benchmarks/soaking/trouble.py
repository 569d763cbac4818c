"""The trouble: aborts, pauses, new weights, workers that die, leave and return."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from benchmarks.soaking.clients import BROKEN, Clients
from benchmarks.soaking.processes import Process

_EVERY = {"update": 60.0, "abort": 7.0, "pause": 37.0, "death": 41.0, "leave": 47.0}
"""Mean seconds between two events of a kind; the first comes after a third of that."""
_DEAD = (1.0, 4.0)  # seconds that a worker stays away
_GONE = (2.0, 8.0)  # seconds that a removed worker stays away
_PAUSED = (0.3, 1.5)


class Trouble:
    """Makes all kinds of trouble.

    Attributes:
        counts: events by kind.
        wrong: calls that failed.
    """

    def __init__(self, url: str, workers: list[Process], clients: Clients, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._url = url
        self._workers = workers
        self._clients = clients
        self._random = random.Random(seed)
        self._version = 0
        # One at a time: some workers have to serve, and the end of one pause would end the other.
        self._away, self._pausing = asyncio.Lock(), asyncio.Lock()

    async def run(self, over: asyncio.Event) -> None:
        """Make trouble until the event is set; then finish what was begun."""
        ways: dict[str, Callable[[], Awaitable[None]]] = {
            "update": self._update,
            "abort": self._abort,
            "pause": self._pause,
            "death": self._death,
            "leave": self._leave,
        }
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as self._session,
            asyncio.TaskGroup() as group,
        ):
            for name, way in ways.items():
                group.create_task(self._repeat(name, way, over))

    async def _repeat(self, name: str, way: Callable[[], Awaitable[None]], over: asyncio.Event) -> None:
        seconds = _EVERY[name] / 3
        while not await _within(over, seconds):
            await way()
            self.counts[name] += 1
            seconds = _EVERY[name] * self._random.uniform(0.8, 1.2) if name != "update" else _EVERY[name]

    async def _update(self) -> None:
        """Update the weights in a pause, as a trainer does; every second time, only the version, which aborts generations."""
        self._version += 1
        version = str(self._version)
        if self._version % 2:
            body = {"model_path": "x", "weight_version": version, "abort_all_requests": False}
            await self._paused("/update_weights_from_disk", body)
        else:
            await self._call("/update_weight_version", {"new_version": version, "abort_all_requests": True})

    async def _abort(self) -> None:
        if self._clients.rids:
            await self._call("/abort_request", {"rid": self._random.choice(sorted(self._clients.rids))})

    async def _pause(self) -> None:
        await self._paused()

    async def _paused(self, target: str | None = None, body: dict[str, Any] | None = None) -> None:
        async with self._pausing:
            await self._call("/pause_generation", {"mode": self._random.choice(("abort", "in_place"))})
            await asyncio.sleep(self._random.uniform(*_PAUSED))
            if target is not None:
                await self._call(target, body or {})
            await self._call("/continue_generation", {})

    async def _death(self) -> None:
        async with self._away:
            worker = self._random.choice(self._workers)
            await asyncio.to_thread(worker.kill)
            await asyncio.sleep(self._random.uniform(*_DEAD))
            # With the weights that all other workers have by then.
            worker.start("--weight-version", str(self._version) if self._version else "default")
            await worker.up()

    async def _leave(self) -> None:
        async with self._away:
            worker = self._random.choice(self._workers)
            await self._call(f"/remove_worker?url={worker.url}", {})
            await asyncio.sleep(self._random.uniform(*_GONE))
            await self._call(f"/add_worker?url={worker.url}", {})

    async def _call(self, target: str, body: dict[str, Any]) -> None:
        """Call the fleet. If a worker is dead, the answer is 207; to an abort of what it alone had, 502."""
        try:
            async with self._session.post(self._url + target, json=body) as response:
                content = await response.read()
                if response.status not in (200, 207) and (target, response.status) != ("/abort_request", 502):
                    self.wrong.append(f"{target}: {response.status} {content[:300]!r}")
        except (*BROKEN, TimeoutError) as error:
            self.wrong.append(f"{target}: {error!r}")


async def _within(over: asyncio.Event, seconds: float) -> bool:
    try:
        await asyncio.wait_for(over.wait(), seconds)
    except TimeoutError:
        return False
    return True
