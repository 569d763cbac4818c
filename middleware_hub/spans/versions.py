"""The order of weight versions, which are strings.

Integers compare as integers, `default` is older than any of them, and any other string is one newer than everything that was
known when it first appeared. Versions normally only grow. They fall when a run is resumed from an older checkpoint: then a hit
under a higher version must count as a hit at the fall, or it would outlive everything, because its version never becomes old.
A hit under a lower version keeps its age: a fleet in which one worker lacks the last update falls and rises every few seconds,
and nothing would ever become old in it. Instead of re-stamping every leaf, a stamp carries the *era* it was made in, and reads
as the lowest version to which the fleet has fallen since, if its own is higher.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

ReportedVersions = str | Sequence[tuple[str, int]]
"""One weight version of a whole reply, or `(version, end)` runs."""

DEFAULT = "default"
MOST_DIGITS = 18
"""A longer integer is treated as a name."""
FALL_AFTER = 3
"""After this many replies in a row below the current version, their version becomes the current one."""
_LAST_ERA = itemgetter(0)


def is_number(version: str) -> bool:
    """Return whether a version is compared as an integer, and not as a name."""
    return version.isascii() and version.isdigit() and len(version) <= MOST_DIGITS


class Stamp(NamedTuple):
    """A version on the clock at the time of a hit."""

    era: int
    order: int


class WorkerVersions:
    """Which weight version each worker last reported, and since when.

    An engine that does not say where in a reply the weights changed reports only the version at its end. All tokens have that
    version if the worker was known to have it when the request was sent.
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[str, int]] = {}
        self._everywhere: tuple[str, int] | None = None
        self._now = 0
        self.changes: list[tuple[str, str]] | None = None
        """As `VersionClock.changes`: a `worker` (its name, a blank, its version), or `everywhere` a version."""

    def take_changes(self) -> list[tuple[str, str]]:
        """Return what happened since the last call."""
        found, self.changes = self.changes or [], []
        return found

    def state(self) -> list[tuple[str, str]]:
        """Return the changes that lead to what is known now."""
        everywhere = [] if self._everywhere is None else [("everywhere", self._everywhere[0])]
        return [*everywhere, *(("worker", f"{worker} {version}") for worker, (version, _) in self._seen.items())]

    def repeat(self, kind: str, value: str) -> None:
        """Apply `changes` of this process or another."""
        noted, self.changes = self.changes, None
        worker, _, version = value.partition(" ")
        if kind == "everywhere":
            self.set_everywhere(value)
        else:
            self.observe(worker, version)
        self.changes = noted

    def moment(self) -> int:
        """Return a logical time for a request that is sent now; later ones are greater."""
        self._now += 1
        return self._now

    def observe(self, worker: str, version: str) -> None:
        """Note that a reply of this worker ended under this version. The first version counts from the start."""
        known = self._seen.get(worker, self._everywhere)
        if known is None or known[0] != version:
            self._seen[worker] = version, 0 if known is None else self.moment()
            if self.changes is not None:
                self.changes.append(("worker", f"{worker} {version}"))

    def latest(self, worker: str) -> str | None:
        """Return the version that a worker has, by its last reply or by a call to all workers since; None if neither came."""
        known = self._seen.get(worker, self._everywhere)
        return None if known is None else known[0]

    def set_everywhere(self, version: str) -> None:
        """Note that all workers were set to this version."""
        self._seen.clear()
        self._everywhere = version, self.moment()
        if self.changes is not None:
            self.changes.append(("everywhere", version))

    def changed_since(self, worker: str, version: str, moment: int) -> bool:
        """Return whether a worker that now has `version` may have had another one at that moment."""
        known = self._seen.get(worker, self._everywhere)
        return known is not None and (known[0] != version or known[1] > moment)


class VersionClock:
    """The current weight version, and the age of earlier ones."""

    def __init__(self) -> None:
        self.current: str | None = None
        self._orders: dict[str, int] = {DEFAULT: -1}
        self._newest = -1
        self._era = 0
        self._falls: list[tuple[int, int]] = []
        """The last era before a fall, and the order of the version that began the next; without falls that went less far than a
        later one."""
        self._below = 0
        self.now = Stamp(0, -1)
        self.steps = 0
        """How often the current version has changed."""
        self.changes: list[tuple[str, str]] | None = None
        """What happened since the last `take_changes`, to be written down; None if it is not written down."""

    def _note(self, kind: str, version: str) -> None:
        if self.changes is not None:
            self.changes.append((kind, version))

    def take_changes(self) -> list[tuple[str, str]]:
        """Return the changes since the last call: versions that appeared, became current, fell, or came late."""
        found, self.changes = self.changes or [], []
        return found

    def orders(self) -> list[tuple[str, str]]:
        """Return the changes that lead to the versions that are known now, in their order."""
        return [("order", version) for version in self.known]

    def repeat(self, kind: str, version: str) -> None:
        """Apply `changes` of this process or another. Applying them twice has the effect of once."""
        noted, self.changes = self.changes, None
        if kind == "order":
            self.order(version)
        elif kind == "below":
            self._below = int(version)
        elif version != self.current:
            (self._fall if kind == "fall" else self._become)(version)
        self.changes = noted

    @property
    def known(self) -> list[str]:
        """Return every version seen, oldest first."""
        return sorted(self._orders, key=self._orders.__getitem__) if self.current is not None else []

    def stamp(self, version: str) -> Stamp:
        """Return the stamp of a hit under a version that was written down, without noting the version."""
        return Stamp(self._era, self._place(version))

    def order(self, version: str) -> int:
        """Return the place of a version among all; an unknown string becomes the newest."""
        if version not in self._orders:
            self._note("order", version)
        place = self._orders[version] = self._place(version)
        self._newest = max(self._newest, place)
        return place

    def _place(self, version: str) -> int:
        known = self._orders.get(version)
        if known is not None:
            return known
        return int(version) if is_number(version) else self._newest + 1

    def observe(self, version: str, *, late: bool = False) -> None:
        """Note that a reply came with this version.

        `late` says that the current version changed after the request was sent. A late reply may still have the
        previous version: that does not show a resumed run.
        """
        if version == self.current:
            if self._below:
                self._note("below", "0")
            self._below = 0
            return
        if self.current is None or self.order(version) >= self.now.order:
            self._become(version)
            return
        if late:
            return
        self._below += 1
        self._note("below", str(self._below))
        if self._below >= FALL_AFTER:
            self._fall(version)

    def observe_reply(self, versions: ReportedVersions, *, late: bool = False) -> None:
        """Note all versions of a reply, in the order of their appearance; the last one is the reply's own."""
        if isinstance(versions, str):
            self.observe(versions, late=late)
            return
        for version, _ in versions:
            self.order(version)
        self.observe(versions[-1][0], late=late)

    def set(self, version: str) -> None:
        """Note that the fleet was set to this version through the router, even if the version is known."""
        if version == self.current:
            self._note("become", version)
        else:
            (self._become if self.order(version) >= self.now.order else self._fall)(version)

    def age(self, stamp: Stamp) -> int:
        """Return how many versions ago a stamp was made; 0 for the current one."""
        fall = bisect_left(self._falls, stamp.era, key=_LAST_ERA)
        lowest = stamp.order if fall == len(self._falls) else min(stamp.order, self._falls[fall][1])
        return self.now.order - lowest

    def distance(self, version: str) -> int:
        """Return how many versions `version` is behind the current one (negative: ahead), without noting it."""
        return self.now.order - self._place(version)

    def staleness(self, versions: ReportedVersions) -> int:
        """Return how many versions the oldest of these tokens is behind the current one; 0 if none is."""
        if versions == self.current:
            return 0
        names = (versions,) if isinstance(versions, str) else (version for version, _ in versions)
        return max(0, *(self.distance(version) for version in names))

    def _become(self, version: str) -> None:
        self._note("become", version)
        self.current = version
        self.steps += 1
        self._below = 0
        self.now = Stamp(self._era, self.order(version))

    def _fall(self, version: str) -> None:
        self._note("fall", version)
        order = self.order(version)
        while self._falls and self._falls[-1][1] >= order:
            self._falls.pop()
        self._falls.append((self._era, order))
        self._era += 1
        self._become(version)
