"""How far each router is with writing again what a store has lost. Each announces that under `returned`, and reads the others.

    refilling 0 -> refilling 1 -> ... -> refilled -> done

An announcement counts for one loss only: it names the life of the store, and the processes that have its keys. The others wait
for a router as long as it makes progress. A router that has died, or cannot go on, announces nothing new, and they stop waiting
for it.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import IntEnum
from time import monotonic
from typing import Final

from middleware_hub.store.redis.keys import Keys, encoded
from middleware_hub.store.redis.wire.servers import Servers

OTHERS_SECONDS: Final = 6.0
"""How long to wait for a router that announces nothing new: a little longer than a dead router's announcement holds."""
_SAY_EVERY: Final = 1.0
_KEPT_SECONDS: Final = 60
_UNHEARD: Final = (-1, 0)


class Stage(IntEnum):
    """See the top of this file."""

    REFILLING = 0
    REFILLED = 1
    DONE = 2


_WORDS: Final = {stage: stage.name.lower().encode() for stage in Stage}
_STAGES: Final = {word: stage for stage, word in _WORDS.items()}


class Progress:
    """The announcements of one recovery.

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

    async def say(self, stage: Stage) -> None:
        """Announce how far this router is. The time limit of the others begins when this router has nothing more to refill."""
        self._said_at = monotonic()
        if stage is Stage.REFILLED:
            self._until = self._said_at + OTHERS_SECONDS
        word = self._life + _WORDS[stage] + (b" %d" % self._steps if stage is Stage.REFILLING else b"")
        if self._own:
            pairs = [part for name in self._own for part in (name, word)]
            await self._servers.write([("HSET", self._key, *pairs), ("EXPIRE", self._key, _KEPT_SECONDS)])

    async def step(self) -> None:
        """Note progress of the refill, and announce it now and then."""
        self._steps += 1
        if monotonic() - self._said_at >= _SAY_EVERY:
            await self.say(Stage.REFILLING)

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

    def others_are(self, stage: Stage) -> bool:
        """Return whether all others had reached this stage when they were last read."""
        return all(place >= (stage, 0) for place in self._said.values())

    @property
    def silent(self) -> bool:
        """Return whether no router has announced anything new for too long."""
        return monotonic() > self._until
