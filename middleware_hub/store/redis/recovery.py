"""What a server has lost although it was acknowledged, and how routers make it whole again.

    another process answers, or the store was emptied
      -> nothing is looked up or appended: whatever would be found may lack what another router has not yet written again
      -> what was written in the last seconds is written again; what stands behind others' has to wait for them
      -> what this process still knows is compared with the store, and what that lacks is appended       ("refilled")
      -> what had to wait is written, since the others do the same meanwhile                            ("done")
      -> all routers that were there are done, or have had time enough: the store answers again

Each router says under `returned` how far it is. One that died with the server is not waited for long.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from time import monotonic
from typing import Final

from middleware_hub.store.errors import StoreError, StoreUnreachableError
from middleware_hub.store.protocol import Batch, Refill
from middleware_hub.store.redis.keys import Keys, encoded
from middleware_hub.store.redis.opening import Claim
from middleware_hub.store.redis.wire.connection import Command
from middleware_hub.store.redis.wire.servers import Servers

logger = logging.getLogger(__name__)

_PAUSE: Final = 0.05
_PATIENCE: Final = 1.0
"""Seconds that a request waits until the store is whole."""
_OTHERS_SECONDS: Final = 6.0
"""How long the other routers have time: a little longer than the announcement of one that died holds."""
_IDLE_LOOKS: Final = 10
"""After so many looks without any progress, nobody is expected to write what some group of the last seconds needs."""
_REFILLED: Final = b"refilled"
_DONE: Final = b"done"
_KEPT_SECONDS: Final = 60


class Recovery:
    """See the top of this file.

    Args:
        append: appends a batch, whatever is going on.

    Attributes:
        refill: appends what this process knows and the store lacks.
    """

    def __init__(
        self, servers: Servers, keys: Keys, claim: Claim, append: Callable[[Batch], Awaitable[object]]
    ) -> None:
        self.refill: Callable[[Refill], Awaitable[None]] | None = None
        self._servers = servers
        self._keys = keys
        self._claim = claim
        self._append = append
        self._own: set[str] = set()
        self._others: frozenset[str] = frozenset()
        self._begun = self._away = False
        self._task: asyncio.Task[None] | None = None

    def check(self) -> None:
        """Raise StoreUnreachableError while the store may lack what it had."""
        if self._task is not None:
            raise StoreUnreachableError("the store has lost what it had last, and routers are writing it again")

    async def over(self) -> None:
        """Wait for a moment until the store is whole; raise StoreUnreachableError if it takes longer, or cannot be reached."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=2 * _PAUSE if self._away else _PATIENCE)
        self.check()

    def announced(self, name: str, seconds: float) -> None:
        """Say that this router announces itself under a name, or takes that back."""
        (self._own.add if seconds > 0 else self._own.discard)(name)

    def saw(self, names: Mapping[str, bytes]) -> None:
        """Say who is there."""
        self._others = frozenset(names) - self._own

    def begin(self) -> None:
        """Say that the store may have lost something."""
        self._begun = True
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        begun = monotonic()
        try:
            while self._begun:
                self._begun = False
                try:
                    await self._recover()
                except StoreError as error:
                    if not self._away:
                        logger.warning("the store is not whole again yet: %s", error)
                    self._begun = self._away = True
                    await asyncio.sleep(_PAUSE)
        except Exception:
            logger.exception("what the store has lost could not be written again")
        finally:
            self._task = None
        logger.warning("the store answers again, %.1f s after it was found to have lost something", monotonic() - begun)

    async def _recover(self) -> None:
        await self._claim.hold()
        self._away = False
        if self.refill is not None:
            await self.refill(self)
        await self._say(_REFILLED)
        end = monotonic() + _OTHERS_SECONDS
        idle, done = 0, False
        while not self._begun:
            if not done:
                done = await self._servers.complete()
                refilled = await self._others_are(_REFILLED, _DONE)
                idle = idle + 1 if refilled else 0
                if not done and (idle > _IDLE_LOOKS or monotonic() > end):
                    logger.error("some of what was written last cannot be written again: what it builds on is lost")
                    done = True
                if done:
                    await self._say(_DONE)
            if done and (await self._others_are(_DONE) or monotonic() > end):
                return
            await asyncio.sleep(_PAUSE)

    async def _say(self, what: bytes) -> None:
        if self._own:
            pairs = [part for name in self._own for part in (encoded(name), self._of_life(what))]
            key = self._keys.returned
            await self._servers.write([("HSET", key, *pairs), ("EXPIRE", key, _KEPT_SECONDS)])

    async def _others_are(self, *states: bytes) -> bool:
        if not self._others:
            return True
        (found,) = await self._servers.read([("HMGET", self._keys.returned, *map(encoded, self._others))])
        return all(one in [self._of_life(state) for state in states] for one in found)

    def _of_life(self, what: bytes) -> bytes:
        return b"%b %b %b" % (self._claim.life or b"", self._servers.life.encode(), what)

    # What `refill` uses ------------------------------------------------------------------------------------------------

    async def lacking(self, records: Mapping[bytes, bytes]) -> set[bytes]:
        names = list(records)
        commands: list[Command] = [("HEXISTS", self._keys.root(records[one]), one) for one in names]
        there = await self._servers.read(commands)
        return {one for one, found in zip(names, there, strict=True) if not found}

    async def append(self, batch: Batch) -> None:
        await self._append(batch)
