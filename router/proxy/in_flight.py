"""The generations in flight: which worker has each, under which ids, and whether somebody asked for their end.

A client may give a generation an id of its own, or read the one that a stream shows; a second attempt needs another one
at the worker, because a worker refuses an id it has seen. Here is what knows both.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from router.workers.worker import Worker

FLIGHT = "flight"
"""Key in `scope["state"]` under which the proxy finds the flight, to say which worker it went to."""

RID_LENGTH = 32
"""Of the ids that workers make up: a UUID in hexadecimal."""


class Flight:
    """One request to `/generate`, from its first attempt to its last.

    Attributes:
        names: what the client calls each of its generations; empty where it has no say in it (`n > 1`).
        rids: what the worker calls them in the present attempt, by position in `names`; those not sent again are missing.
        tenant: whose it is.
        worker: who has it, or had it last.
        whole: whether the client waits for a reply in one piece.
        renew: makes the body under ids that no worker has seen, where ids are told; for a worker that is asked twice.
    """

    def __init__(self, names: Sequence[str], rids: Sequence[str] | None = None, *, tenant: str = "") -> None:
        """`rids`: where the worker is told others than `names`."""
        self.names = tuple(names)
        self.rids: dict[int, str] = dict(enumerate(names if rids is None else rids))
        self.tenant = tenant
        self.worker: Worker | None = None
        self.renew: Callable[[], bytes] | None = None
        self.whole = False
        self._asked: set[int] = set()
        self._all_asked = False
        self._changed = asyncio.Event()

    def end(self, positions: Iterable[int] | None = None) -> None:
        """Somebody asked for the end of these generations (None: of all): they are not sent again."""
        if positions is None:
            self._all_asked = True
        else:
            self._asked.update(positions)
        self._changed.set()

    def asked(self, position: int) -> bool:
        """Whether a generation is to end."""
        return self._all_asked or position in self._asked

    @property
    def unwanted(self) -> bool:
        """Whether all of it is to end."""
        return self._all_asked or (bool(self.names) and len(self._asked) == len(self.names))

    async def until_asked(self, positions: Sequence[int]) -> None:
        """Wait until each of these generations is to end."""
        while not all(self.asked(position) for position in positions):
            self._changed.clear()
            await self._changed.wait()


class Flights:
    """All of them, found by their names: as an exact one, and by how it begins."""

    def __init__(self) -> None:
        self._flights: set[Flight] = set()
        self._by_name: dict[str, list[tuple[Flight, int]]] = {}
        self._names: list[str] = []  # sorted
        self._ending = 0

    def __len__(self) -> int:
        return len(self._flights)

    def begin(self, flight: Flight) -> None:
        """A request was let in."""
        self._flights.add(flight)
        for position, name in enumerate(flight.names):
            if name not in self._by_name:
                insort(self._names, name)
            self._by_name.setdefault(name, []).append((flight, position))
        if self._ending:
            flight.end()

    def over(self, flight: Flight) -> None:
        """It has its reply, or nobody waits for it any more."""
        self._flights.discard(flight)
        flight.renew = None  # it knows the flight, and the whole request: a circle that would wait for a collection
        for position, name in enumerate(flight.names):
            self._by_name[name].remove((flight, position))
            if not self._by_name[name]:
                del self._by_name[name]
                del self._names[bisect_left(self._names, name)]

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Workers are told to abort all they have: what is in flight, and what overtakes that on its way to them."""
        for flight in self._flights:
            flight.end()
        self._ending += 1
        try:
            yield
        finally:
            self._ending -= 1

    def named(self, rid: str, tenant: str | None = None) -> list[tuple[Flight, int]]:
        """The generations that an abort of this id means: that one, or else all that begin so, as with SGLang.

        `tenant`: whose generations it may mean; None for everybody's.
        """
        exact = self._of(tenant, self._by_name.get(rid, ()))
        return exact or [one for name in self._beginning(rid) for one in self._of(tenant, self._by_name[name])]

    def alone(self, rids: Iterable[str], worker: Worker) -> list[str]:
        """Those of a request's ids of which an abort ends no other generation of the same worker."""
        short: list[str] = []
        long: list[str] = []
        for rid in rids:
            (long if len(rid) >= RID_LENGTH else short).append(rid)
        found = [rid for rid in long if not self.shares_prefix(rid, worker)]
        if not short:
            return found
        # As `shares_prefix` has it, for thousands of them at once.
        there = [flight for flight in self._flights if flight.worker is worker]
        if all(flight.names for flight in there):
            others = sorted({other for flight in there for other in flight.rids.values()})
            for rid in short:
                after = bisect_right(others, rid)
                if after == len(others) or not others[after].startswith(rid):
                    found.append(rid)
        return found

    def shares_prefix(self, rid: str, worker: Worker) -> bool:
        """Whether an abort of this id would (or might) end another generation of the same worker, too."""
        if len(rid) >= RID_LENGTH:
            # Under the very same name there may be one whose later attempt has a longer id.
            found = (one for name in self._beginning(rid) for one in self._by_name[name])
            return any(flight.worker is worker and flight.rids.get(at) not in (None, rid) for flight, at in found)
        # A short one may also begin an id that was made up, here for a later attempt or by the worker (`n > 1`).
        there = [flight for flight in self._flights if flight.worker is worker]
        rids = [other for flight in there for other in flight.rids.values()]
        return not all(flight.names for flight in there) or any(r != rid and r.startswith(rid) for r in rids)

    @staticmethod
    def _of(tenant: str | None, found: Sequence[tuple[Flight, int]]) -> list[tuple[Flight, int]]:
        return [(flight, position) for flight, position in found if tenant is None or flight.tenant == tenant]

    def _beginning(self, rid: str) -> list[str]:
        begin = end = bisect_left(self._names, rid)
        while end < len(self._names) and self._names[end].startswith(rid):
            end += 1
        return self._names[begin:end]
