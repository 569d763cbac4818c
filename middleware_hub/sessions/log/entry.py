"""An event that waits to be appended to the log of its session, and what all logs of one router share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from middleware_hub.sessions.log.events import AnyEvent
from middleware_hub.spans.chain import TokenSpan
from middleware_hub.spans.versions import VersionClock
from middleware_hub.store.protocol import Batch, OnDone, OnMissing, Store
from middleware_hub.store.records import Blob, Event, Serials, SpanRecord


def _future() -> asyncio.Future[bool]:
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True)
class Entry:
    """An event that waits.

    Attributes:
        act: applies it here.
        records, blobs, news: appended together with it; news are events of other logs.
        span: the sampled tokens of a turn.
        done: tells the caller that waits whether it is in the store.
    """

    event: AnyEvent
    act: Callable[[], object]
    records: Sequence[SpanRecord] = ()
    blobs: Sequence[Blob] = ()
    span: TokenSpan | None = None
    news: Sequence[Event] = ()
    done: asyncio.Future[bool] = field(default_factory=_future)

    def tell(self, outcome: bool | Exception) -> None:
        """Answer the caller that waits for it. May be called twice."""
        if self.done.done():
            return
        if isinstance(outcome, Exception):
            self.done.set_exception(outcome)
            self.done.exception()  # the caller may be gone
        else:
            self.done.set_result(outcome)


class Appends(Protocol):
    """Appends to a store, see `persistence.saving`."""

    @property
    def store(self) -> Store:
        """Return the store."""

    @property
    def incomplete(self) -> bool:
        """Return whether the store is known to lack something that is in the spool of a dead router."""
        ...

    @property
    def waiting_bytes(self) -> int:
        """Return how much waits in the spool: 0 if everything is in the store, or was given up."""
        ...

    async def save(
        self,
        batch: Batch,
        *,
        on_missing: OnMissing | None = None,
        on_done: OnDone | None = None,
    ) -> bool:
        """Append a batch, or keep it in the spool; return whether it was acknowledged in time."""
        ...

    async def write(self, batch: Batch) -> None:
        """Append a batch now or not at all."""

    async def hand_over(self) -> bool:
        """Append what waits in the spool; return whether all of it is in the store."""
        ...


@dataclass(frozen=True, slots=True)
class Shelf:
    """The parts that the logs of one router share.

    Attributes:
        saving: appends to the store.
        news: returns events of other logs that have to be appended with the next turn.
        failed: called with the number of events that could not be written, and why.
        held: called with the tokens that a turn of another router adds.
        closed: called with tenant and id of a session that was finalized or ended elsewhere.
    """

    saving: Appends
    serials: Serials
    clock: VersionClock
    news: Callable[[], Sequence[Event]]
    failed: Callable[[int, Exception], None]
    held: Callable[[int], None]
    closed: Callable[[str, str], None]

    @property
    def store(self) -> Store:
        return self.saving.store
