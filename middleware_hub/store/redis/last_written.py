"""The last writes to a server, kept here in case the server loses them.

A server that is killed may lose what it has acknowledged: with `appendfsync everysec` it delays writing its file while an older
part of the file is synced, for up to two seconds, and answers meanwhile ("Latency due to AOF and disk I/O" in
https://redis.io/docs/latest/operate/oss_and_stack/management/optimization/latency/). A replica that becomes the master lacks
what it had not yet been sent.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from time import monotonic
from typing import Any, Final

from middleware_hub.store.redis.connection import Command, CommandRefusedError, Connection, passing
from middleware_hub.store.redis.scripts import DROP_MEDIA, FORGET, FORGET_LOG, HOLD_MEDIA, LEAVE, TRIM

logger = logging.getLogger(__name__)

_KEPT_SECONDS: Final = 3.0
"""How long before its death a server may have acknowledged what it then loses, and a second more."""
_MOST_KEPT: Final = 10_000
_LEFT_OUT: Final = frozenset(
    {"HINCRBY"} | {one.digest for one in (DROP_MEDIA, FORGET, FORGET_LOG, HOLD_MEDIA, LEAVE, TRIM)}
)
_FOR_NOW: Final = (b"missing", b"early")
"""Answers of `append.lua` to a batch that follows writes of another router, which has not repeated them yet. A `moved` batch
comes too late: something else has its place in the log, perhaps the same event, which a refill has written."""


class LastWritten:
    """Commands of the last seconds, in the form for commands that may have been executed before.

    Commands that remove anything are left out, with their counting: if such a command was lost, nothing has changed.

    Attributes:
        waiting: the commands that were written again and refused for now.
    """

    def __init__(self) -> None:
        self._kept: deque[tuple[float, Sequence[Command]]] = deque(maxlen=_MOST_KEPT)
        self.waiting: list[Sequence[Command]] = []

    def keep(self, commands: Sequence[Command]) -> None:
        now = monotonic()
        while self._kept and self._kept[0][0] < now - _KEPT_SECONDS:
            self._kept.popleft()
        some = [one for one in commands if _LEFT_OUT.isdisjoint(one[:2])]
        if some:
            self._kept.append((now, some))

    def leave(self) -> list[Sequence[Command]]:
        """Return all commands, in order, for another server, and forget them."""
        left = [*self.waiting, *(commands for _, commands in self._kept)]
        self.waiting = []
        self._kept.clear()
        return left

    async def again(self, connection: Connection, shown: str) -> None:
        """Write all commands to a server that may have lost them. Raises BrokenError, CommandRefusedError."""
        self.waiting = [commands for _, commands in self._kept]
        await self.go_on(connection, shown)
        logger.warning(
            "%s was started again, or is another server: the last %d groups were written to it again, %d of them wait for "
            "what other routers wrote",
            shown,
            len(self._kept) - len(self.waiting),
            len(self.waiting),
        )

    async def go_on(self, connection: Connection, shown: str) -> None:
        """Write what waits, as long as some is taken. Raises BrokenError; CommandRefusedError if it is no master (yet)."""
        before = -1
        while self.waiting and len(self.waiting) != before:
            before, left = len(self.waiting), []
            for commands in self.waiting:
                try:
                    replies = await connection.call(commands)
                except CommandRefusedError as error:
                    if passing(str(error)):
                        raise
                    logger.error("%s: what it may have lost cannot be written again now: %s", shown, error)
                    left.append(commands)
                    continue
                if any(map(has_to_wait, replies)):
                    left.append(commands)
            self.waiting = left


def has_to_wait(reply: Any) -> bool:
    """Return whether a reply of `append.lua` refuses a batch for now. Replies to other commands do not look like that."""
    if not isinstance(reply, list) or not reply or not isinstance(reply[0], list):
        return False
    return any(isinstance(answer, list) and answer and answer[0] in _FOR_NOW for answer in reply[0])
