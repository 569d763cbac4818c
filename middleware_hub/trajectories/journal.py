"""The place of a ledger's events: a log of the store, which all routers read and append to, or only this process.

Code that depends on the ledger first reads on to the end of the log, and then appends wherever the log ends (see `ledger`: the
order decides). A router announces a lease in the store before the claim is in the log: the store's clock ends it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Iterator
from typing import Final, Protocol
from urllib.parse import quote

import msgspec

from middleware_hub.persistence.saving import Saving
from middleware_hub.store.errors import DamagedRecordError
from middleware_hub.store.event_log import EventLog
from middleware_hub.store.protocol import Batch, Store
from middleware_hub.store.records import Event
from middleware_hub.trajectories.events import AnyEvent
from middleware_hub.trajectories.ledger import Ledger
from router.peers.channel import SetBack

logger = logging.getLogger(__name__)

MOST_MEMBERS: Final = 100_000
"""Replies and sessions that wait in one ledger. Those of the oldest groups are dropped first; that is logged and counted."""
MOST_EVENTS: Final = 1_000_000
"""Events for which a reply or session waits to be claimed. Without a limit, an unclaimed one would keep the whole log."""
PREFIX: Final = "groups/"
_STEP: Final = 100
"""Events that are applied before the event loop serves other requests: about a millisecond."""
_SPARE: Final = 1_000
"""Events that stay in the log although nothing depends on them: a trainer may still ask about claims that are over."""
_TRIM_EVERY: Final = 500


_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[AnyEvent] = msgspec.msgpack.Decoder(AnyEvent)


class UnknownEventError(DamagedRecordError):
    """An event is whole, but none of this version. To leave it out could lose samples, or hand them out twice."""

    status = 409
    type = "unknown_event"


class Journal(Protocol):
    """A ledger, and the place of its events. Every method may raise StoreUnreachableError.

    Attributes:
        ledger: as of the last `read_on`.
        choosing: held while samples are chosen, so that two claims of one router do not choose the same samples.
    """

    ledger: Ledger
    choosing: asyncio.Lock

    async def read_on(self) -> None:
        """Apply the new events of the log to the ledger."""

    async def append(self, event: AnyEvent) -> None:
        """Append an event. The next `read_on` applies it."""

    async def keep(self, event: AnyEvent) -> bool:
        """Append an event, now or when the store takes writes again; return whether that was now."""
        ...

    @property
    def behind(self) -> bool:
        """Return whether events of this process may wait for the store."""
        ...

    async def wait(self, seconds: float) -> None:
        """Return when something was appended, or when the time is up."""

    def now(self) -> float:
        """Return the time by the clock that all routers of the log share, in seconds since 1970."""
        ...

    async def lease(self, claim: str, seconds: float) -> None:
        """Begin the lease of a claim, or begin it again; 0 seconds end it."""

    async def live(self) -> Collection[str]:
        """Return the claims whose lease is not over."""
        ...


class StoreJournal:
    """A `Journal` in a store that is open."""

    def __init__(self, saving: Saving, log: str) -> None:
        self.log = log
        self.ledger = self._filling = Ledger()
        """`_filling` is another one only while a log that was set back, or trimmed, is read again."""
        self.choosing = asyncio.Lock()
        self._reading = asyncio.Lock()
        self._saving = saving
        self._store: Store = saving.store
        self._log = EventLog(saving.store, log, whole=True)
        self._trimmed = 0

    async def read_on(self) -> None:
        async with self._reading:
            while found := await self._log.read_on():
                if isinstance(found, SetBack):
                    logger.error("%s was set back: what the store has lost of it cannot be claimed any more", self.log)
                    self._filling, self._trimmed = Ledger(), 0
                    continue
                if 0 < self._log.number < found[0].number - 1 and await self._begins_with(found[0]):
                    # Other routers have trimmed events that were not read here, such as acknowledgements. The rest of the log
                    # is whole.
                    self._filling = Ledger()
                for number, event in enumerate(found, 1):
                    decoded = read(event)
                    self._log.take(event)  # `_all` applies all of it, also if the request ends meanwhile
                    await _all(self._filling.applying(event.number, decoded))
                    if number % _STEP == 0:
                        await asyncio.sleep(0)
            self.ledger = self._filling
        await self._trim()

    async def _begins_with(self, event: Event) -> bool:
        first = await self._store.read(self.log, limit=1)
        return bool(first) and first[0].number >= event.number

    async def _trim(self) -> None:
        """Forget the events on which nothing depends any more."""
        ledger = self.ledger
        if ledger.last - self._trimmed < _TRIM_EVERY + _SPARE:
            return
        before = min(ledger.needed, ledger.last - _SPARE)
        self._trimmed = max(before, ledger.last - _SPARE - _TRIM_EVERY // 2)  # so that it is not counted again at once
        await self._log.trim(before)

    async def append(self, event: AnyEvent) -> None:
        await self._saving.write(Batch(events=[stored(self.log, event)]))

    async def keep(self, event: AnyEvent) -> bool:
        return await self._saving.save(Batch(events=[stored(self.log, event)]))

    @property
    def behind(self) -> bool:
        return self._saving.away

    async def wait(self, seconds: float) -> None:
        await self._log.wait(seconds)

    def now(self) -> float:
        return self._store.now()

    async def lease(self, claim: str, seconds: float) -> None:
        await self._store.announce(self._lease(claim), b"", seconds)

    async def live(self) -> Collection[str]:
        begin = self._lease("")
        return frozenset(name.removeprefix(begin) for name in await self._store.announced(begin))

    def _lease(self, claim: str) -> str:
        return f"lease/{self.log}/{claim}"


class MemoryJournal:
    """A `Journal` that ends with its process."""

    behind = False

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.choosing = asyncio.Lock()
        self._appending = asyncio.Lock()
        self._leases: dict[str, float] = {}
        self._news = asyncio.Event()

    async def read_on(self) -> None:
        pass

    def happen(self, event: AnyEvent) -> None:
        """Apply an event now."""
        self.ledger.apply(self.ledger.last + 1, event)
        self._news.set()

    async def append(self, event: AnyEvent) -> None:
        async with self._appending:
            await _all(self.ledger.applying(self.ledger.last + 1, event))
        self._news.set()

    async def keep(self, event: AnyEvent) -> bool:
        await self.append(event)
        return True

    async def wait(self, seconds: float) -> None:
        self._news.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            pass

    def now(self) -> float:
        return time.time()

    async def lease(self, claim: str, seconds: float) -> None:
        self._leases[claim] = time.monotonic() + seconds

    async def live(self) -> Collection[str]:
        now = time.monotonic()
        self._leases = {claim: until for claim, until in self._leases.items() if until > now}
        return self._leases.keys()


async def _all(steps: Iterator[None]) -> None:
    """Take the steps of a change. Between them the event loop serves other requests."""
    try:
        for _ in steps:
            await asyncio.sleep(0)
    finally:
        for _ in steps:  # if the request ends meanwhile: half an event must not stay
            pass


def log_key(tenant: str, namespace: str) -> str:
    """Return the key of the log."""
    return f"{PREFIX}{quote(tenant, safe='')}/{quote(namespace, safe='')}"


def stored(log: str, event: AnyEvent) -> Event:
    """Return an event as the store keeps it, to be appended wherever the log ends."""
    return Event(log, str(event.__struct_config__.tag), _encode(event))


def read(event: Event) -> AnyEvent:
    """Return the event that the store kept. Raises UnknownEventError."""
    try:
        return event.decoded(_decoder)
    except DamagedRecordError as error:
        raise UnknownEventError(
            f"{error}. Another version of the router wrote it. Claim what waits with that version; for new groups use another "
            "x-radix-namespace, or another --store"
        ) from error
