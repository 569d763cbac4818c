"""An event that waits to be appended to the log of its session, and what all logs of a router share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from middleware_hub.sessions.log.events import AnyEvent
from middleware_hub.spans.chain import TokenSpan
from middleware_hub.spans.versions import VersionClock
from middleware_hub.store.protocol import Store
from middleware_hub.store.records import Blob, Event, Serials, SpanRecord


def _future() -> asyncio.Future[bool]:
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True)
class Entry:
    """An event that waits.

    Attributes:
        act: lets it happen here.
        records, blobs, news: appended in one step with it; news are events of other logs.
        span: the sampled tokens of a turn.
        done: for whoever waits: whether it is in the store.
    """

    event: AnyEvent
    act: Callable[[], None]
    records: Sequence[SpanRecord] = ()
    blobs: Sequence[Blob] = ()
    span: TokenSpan | None = None
    news: Sequence[Event] = ()
    done: asyncio.Future[bool] = field(default_factory=_future)

    def tell(self, outcome: bool | Exception) -> None:
        """Answer whoever waits for it. May be called twice."""
        if self.done.done():
            return
        if isinstance(outcome, Exception):
            self.done.set_exception(outcome)
            self.done.exception()  # whoever asked may be gone
        else:
            self.done.set_result(outcome)


@dataclass(frozen=True, slots=True)
class Shelf:
    """What the logs of one router share.

    Attributes:
        news: returns events of other logs that have to be appended with the next turn.
        failed: called with the number of events that could not be written, and why.
        held: called with the tokens that a turn of another router adds.
        closed: called with tenant and id of a session that was finalized or ended elsewhere.
    """

    store: Store
    serials: Serials
    clock: VersionClock
    news: Callable[[], Sequence[Event]]
    failed: Callable[[int, Exception], None]
    held: Callable[[int], None]
    closed: Callable[[str, str], None]
