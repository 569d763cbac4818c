"""The weight version of the fleet, and whether there is one now.

It is what the replies show (`reported`), else what the workers say. A trainer may update workers past the router, which then
learns of it from their replies: a worker's own word is as old as the last call, or as its registration. While a call changes
the weights, while the fleet is paused, and while workers are known to have different versions, no one version is that of all:
a request that is sent now may be computed with older or with newer weights. So it is while nobody knows the version that a
worker has: it may have been restarted, or has not answered an update, and the next probe tells it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from router.engines.form.fleet_paths import CONTINUES, PAUSES
from router.workers.worker import Worker


class FleetVersion:
    """See the top of this file.

    Attributes:
        reported: returns the current version as replies show it; None if they have shown none.
        shown: returns the version that a worker's replies show, by its URL; None if there were none.
        pauses: how many pauses began, by which a reply shows whether it was sent in the present one.
    """

    def __init__(self, workers: Callable[[], Sequence[Worker]]) -> None:
        self.reported: Callable[[], str | None] = lambda: None
        self.shown: Callable[[str], str | None] = lambda _: None
        self.pauses = 0
        self._workers = workers
        self._calls: dict[str, str] = {}  # that change the fleet and are not over: their paths
        self._paused = False
        # By URL, as the next: what replies had shown when a call set versions, or a worker may have been restarted.
        self._outdated: dict[str, str | None] = {}
        self._doubts: dict[str, int] = {}  # how often each may have been, as far as is noted

    def begins(self, call: str, path: str) -> None:
        """Note that a call to all workers begins, which changes weights, or begins or ends a pause."""
        self._calls[call] = path
        if path in PAUSES:
            self.pauses += 1

    def over(self, call: str, *, done: bool = True, paused: bool | None = None) -> None:
        """Note that such a call is over. A second time it has no effect.

        Args:
            call: the call.
            done: whether a worker did it, or may have.
            paused: whether workers are paused now, if that is known. Else the path says what the call has done.
        """
        path = self._calls.pop(call, None)
        if path is None:
            return
        if paused is None and done and (path in PAUSES or path in CONTINUES):
            paused = path in PAUSES
        if paused is not None:
            self.pauses += paused and not (self._paused or path in PAUSES)
            self._paused = paused

    def called(self) -> None:
        """Note that a call has set versions: what replies have shown so far is older."""
        self._outdated = {one.url: self.shown(one.url) for one in self._workers()}

    def take_over(self, *, paused: bool) -> None:
        """Take over whether the fleet is paused, as other routers know."""
        self._paused = paused
        self.pauses += paused

    def resumed(self) -> None:
        """Note that a worker answered what it got in the pause: somebody has ended that at the workers."""
        self._paused = False

    @property
    def paused(self) -> bool:
        """Whether the fleet is in a pause that a call through a router began."""
        return self._paused

    @property
    def settled(self) -> bool:
        """Whether one version is that of all workers, as far as is known. (It may be unknown: some engines never tell it.)"""
        if self._calls or self._paused:
            return False
        told: set[str | None] = set()
        for one in self._workers():
            if one.routable and ((version := self._version(one)) is not None or one.has_told_version):
                told.add(version)
        return len(told) < 2 and None not in told

    @property
    def current(self) -> str | None:
        """The version; None if nobody has told one."""
        reported = self.reported()
        return next(iter(self._told()), None) if reported is None else reported

    def _told(self) -> set[str]:
        return {version for one in self._workers() if one.routable and (version := self._version(one)) is not None}

    def _version(self, worker: Worker) -> str | None:
        url, shown = worker.url, self.shown(worker.url)
        if worker.doubts != self._doubts.get(url, 0):
            self._doubts[url] = worker.doubts
            self._outdated[url] = shown
        return worker.version if shown is None or shown == self._outdated.get(url) else shown
