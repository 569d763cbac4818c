"""How routers restore acknowledged writes that a server has lost.

    another process answers, or the store was emptied
      -> nothing is looked up or appended: a result may lack what another router has not yet written again
      -> what was written in the last seconds is written again; what follows the writes of others has to wait for them
      -> what this process still knows is compared with the store, and what that lacks is appended       ("refilled")
      -> what had to wait is written, because the others do the same meanwhile                            ("done")
      -> all routers that were there are done, or have had enough time: the store answers again

Each router announces how far it is (`RecoveryProgress`). After any failure on the way, the store is not asked before a try has
succeeded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from enum import IntEnum
from time import monotonic
from typing import Final

from middleware_hub.store.errors import StoreError, StoreUnreachableError
from middleware_hub.store.protocol import Batch, Loss
from middleware_hub.store.records import Event
from middleware_hub.store.redis.connection import Command
from middleware_hub.store.redis.keys import Keys, encoded
from middleware_hub.store.redis.logs import Logs
from middleware_hub.store.redis.opening import Ownership
from middleware_hub.store.redis.preparing import has_entry, prepare
from middleware_hub.store.redis.servers import Servers

logger = logging.getLogger(__name__)

OTHERS_SECONDS: Final = 6.0
"""How long to wait for a router that announces nothing new: a little longer than a dead router's announcement holds."""
_SAY_EVERY: Final = 1.0
_KEPT_SECONDS: Final = 60
_UNHEARD: Final = (-1, 0)
_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 0.5
"""Seconds between two tries, after a failure."""
_COMPLAIN_EVERY: Final = 60.0
_PATIENCE: Final = 1.0
"""Seconds that a request waits until the store is whole."""
_IDLE_LOOKS: Final = 10
"""After this many looks without progress, no router is expected to write what a group of the last seconds needs."""


class Recovery:
    """See the top of this file.

    Args:
        append: appends a batch, even during the recovery.
        trusted: raises StoreError if the present servers would lose data.
        refills: each appends something that this process knows and the store lacks.
    """

    def __init__(
        self,
        servers: Servers,
        keys: Keys,
        ownership: Ownership,
        logs: Logs,
        append: Callable[[Batch], Awaitable[object]],
        trusted: Callable[[], Awaitable[object]],
        refills: Sequence[Loss],
    ) -> None:
        self._servers = servers
        self._keys = keys
        self._ownership = ownership
        self._logs = logs
        self._append = append
        self._trusted = trusted
        self._refills = refills
        self._own: set[str] = set()
        self._others: frozenset[str] = frozenset()
        self._progress: RecoveryProgress | None = None
        self._begun = self._away = False
        self._complained: dict[type[Exception], float] = {}
        self._task: asyncio.Task[None] | None = None

    def check(self) -> None:
        """Raise StoreUnreachableError while the store may lack records that it had."""
        if self._task is not None:
            raise StoreUnreachableError("the store has lost what it had last, and routers are writing it again")

    async def over(self) -> None:
        """Wait a moment until the store is whole; raise StoreUnreachableError after that, or if it cannot be reached."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=2 * _PAUSE if self._away else _PATIENCE)
        self.check()

    def announced(self, name: str, seconds: float) -> None:
        """Note that this router announces itself under a name, or withdraws that."""
        (self._own.add if seconds > 0 else self._own.discard)(name)

    def saw(self, names: Mapping[str, bytes]) -> None:
        """Note which routers are there."""
        self._others = frozenset(names) - self._own

    def begin(self) -> None:
        """Note that the store may have lost something."""
        self._begun = True
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        begun, pause = monotonic(), _PAUSE
        try:
            while self._begun:
                self._begun = False
                try:
                    await self._recover()
                except Exception as error:  # noqa: BLE001 - also a fault of ours: the store is not whole, whatever it was
                    self._complain(error)
                    self._begun = self._away = True
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE)
                else:
                    pause = _PAUSE
        finally:
            self._task = None
        logger.warning("the store answers again, %.1f s after it was found to have lost something", monotonic() - begun)

    def _complain(self, error: Exception) -> None:
        """Log why the store is not whole yet, each kind of fault once a minute."""
        now = monotonic()
        if now - self._complained.get(type(error), -_COMPLAIN_EVERY) < _COMPLAIN_EVERY:
            return
        self._complained[type(error)] = now
        if isinstance(error, StoreError):
            logger.warning("the store is not whole again yet: %s", error)
        else:
            text = "what the store has lost could not be written again: it counts as away, and this is tried again"
            logger.error(text, exc_info=error)

    async def _recover(self) -> None:
        await self._trusted()
        await self._ownership.hold()
        life = b"%b %b" % (self._ownership.life or b"", (await self._servers.life()).encode())
        self._away = False
        progress = self._progress = RecoveryProgress(self._servers, self._keys, life, self._own, self._others)
        await progress.say(RecoveryStage.REFILLING)
        await self._servers.complete()
        for refill in self._refills:
            await refill(self)
        await progress.say(RecoveryStage.REFILLED)
        idle, done = 0, False
        while not self._begun:
            await progress.look()
            if not done:
                done = await self._servers.complete()
                idle = idle + 1 if progress.others_are(RecoveryStage.REFILLED) else 0
                if not done and (idle > _IDLE_LOOKS or progress.silent):
                    logger.error("some of what was written last cannot be written again: what it builds on is lost")
                    done = True
                if done:
                    await progress.say(RecoveryStage.DONE)
            if done and (progress.others_are(RecoveryStage.DONE) or progress.silent):
                return
            await asyncio.sleep(_PAUSE)

    # What a refill uses ------------------------------------------------------------------------------------------------

    async def lacking(self, records: Mapping[bytes, bytes]) -> set[bytes]:
        await self._step()
        if not self._servers.together:
            return set(records)  # the places of a record may be lost without the record: they are at several nodes
        names = list(records)
        commands: list[Command] = [("HEXISTS", self._keys.root(records[one]), one) for one in names]
        there = await self._servers.read(commands)
        return {one for one, found in zip(names, there, strict=True) if not found}

    async def finds(self, batch: Batch) -> bool:
        await self._step()
        if self._servers.together:
            return True
        places = prepare(batch, {}).places
        commands: list[Command] = []
        for place, _, _ in places:
            main, more, field = self._keys.places(place)
            commands += [("HGET", main, field), ("GET", more)] if field else [("GET", main), ("GET", more)]
        held = await self._servers.read(commands)
        return all(
            any(has_entry(place.kind, reference, one) for one in pair)
            for (place, _, reference), pair in zip(places, zip(held[::2], held[1::2], strict=True), strict=True)
        )

    async def ends(self, logs: Sequence[str]) -> list[int]:
        await self._step()
        return [info.last for info in await self._logs.ends(logs)]

    async def events(self, log: str, after: int, limit: int) -> Sequence[Event]:
        await self._step()
        return await self._logs.read(log, after, limit)

    async def append(self, batch: Batch) -> None:
        await self._append(batch)  # first, because records that are asked for later may build on it
        await self._step()

    async def _step(self) -> None:
        if self._progress is not None:
            await self._progress.step()


class RecoveryStage(IntEnum):
    """How far a router is with writing again what a store has lost; see `RecoveryProgress`."""

    REFILLING = 0
    REFILLED = 1
    DONE = 2


_WORDS: Final = {stage: stage.name.lower().encode() for stage in RecoveryStage}
_STAGES: Final = {word: stage for stage, word in _WORDS.items()}


class RecoveryProgress:
    """How far each router is: the announcements of one recovery, in the store under `returned`.

        refilling 0 -> refilling 1 -> ... -> refilled -> done

    An announcement counts for one loss only: it names the life of the store, and the processes that have its keys. The others
    wait for a router as long as it makes progress. A router that has died, or cannot go on, announces nothing new, and they
    stop waiting for it.

    Args:
        life: that of the store, and of the processes that have its keys.
        own: the names under which this router announces itself.
        others: the names of the routers to wait for.
    """

    def __init__(
        self, servers: Servers, keys: Keys, life: bytes, own: Collection[str], others: Collection[str]
    ) -> None:
        self._servers = servers
        self._key = keys.returned
        self._life = life + b" "
        self._own = [encoded(name) for name in own]
        self._others = [encoded(name) for name in others]
        self._said = dict.fromkeys(self._others, _UNHEARD)
        self._furthest = dict(self._said)
        self._until = self._said_at = monotonic()
        self._steps = 0

    async def say(self, stage: RecoveryStage) -> None:
        """Announce how far this router is. The time limit of the others begins when this router has nothing more to refill."""
        self._said_at = monotonic()
        if stage is RecoveryStage.REFILLED:
            self._until = self._said_at + OTHERS_SECONDS
        word = self._life + _WORDS[stage] + (b" %d" % self._steps if stage is RecoveryStage.REFILLING else b"")
        if self._own:
            pairs = [part for name in self._own for part in (name, word)]
            await self._servers.write([("HSET", self._key, *pairs), ("EXPIRE", self._key, _KEPT_SECONDS)])

    async def step(self) -> None:
        """Note progress of the refill, and announce it now and then."""
        self._steps += 1
        if monotonic() - self._said_at >= _SAY_EVERY:
            await self.say(RecoveryStage.REFILLING)

    async def look(self) -> None:
        """Read how far the others are."""
        if not self._others:
            return
        (found,) = await self._servers.read([("HMGET", self._key, *self._others)])
        for name, word in zip(self._others, found, strict=True):
            self._said[name] = place = self._place(word or b"")
            if place > self._furthest[name]:  # a router that begins again and again gets no more time
                self._furthest[name] = place
                self._until = monotonic() + OTHERS_SECONDS

    def _place(self, word: bytes) -> tuple[int, int]:
        if not word.startswith(self._life):
            return _UNHEARD
        name, _, steps = word[len(self._life) :].partition(b" ")
        return (_STAGES[name], int(steps) if steps.isdigit() else 0) if name in _STAGES else _UNHEARD

    def others_are(self, stage: RecoveryStage) -> bool:
        """Return whether all others had reached this stage when they were last read."""
        return all(place >= (stage, 0) for place in self._said.values())

    @property
    def silent(self) -> bool:
        """Return whether no router has announced anything new for too long."""
        return monotonic() > self._until
