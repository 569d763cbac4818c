"""The entries of the routers' log, and the state of the fleet that they add up to.

A router skips an entry of an unknown kind, which a newer router wrote. Fields may be added; an entry that lacks them has their
defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

import msgspec

from router.engines.form.fleet_paths import CONTINUES, PAUSES

MOST_REMOVED: Final = 10_000
"""How many removed workers are remembered, the latest ones."""
_SHOWN: Final = 200


class ControlEvent(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """An entry of the log. `KIND` is its name there, `by` the token of the router that wrote it."""

    KIND: ClassVar[str]

    by: str = ""

    def __str__(self) -> str:
        named = getattr(self, "url", "") or getattr(self, "path", "") or getattr(self, "rid", "")
        return f"{self.KIND} {str(named)[:_SHOWN]}".strip()


class RouterCame(ControlEvent, frozen=True):
    """A router has announced itself. The others look at once who is there: they wait for it if the store loses its writes."""

    KIND = "router_came"


class WorkerAdded(ControlEvent, frozen=True):
    """A worker was added by a call, or named by a router's command line. The other fields say what that router found."""

    KIND = "worker_added"

    url: str
    complaint: str | None = None
    version: str | None = None
    absent: bool = False
    engine: str | None = None
    abilities: tuple[str, ...] = ()
    role: str | None = None
    bootstrap_port: int | None = None
    ranks: int | None = None


class WorkerRemoved(ControlEvent, frozen=True):
    """A worker was removed by a call: no router sends it more requests."""

    KIND = "worker_removed"

    url: str


class CallBegan(ControlEvent, frozen=True):
    """A call to all workers begins. `aborts`: from now on until `AbortsOver`, the workers may abort all that they have."""

    KIND = "call_began"

    call: str
    path: str
    aborts: bool = False
    updates: bool = False


class AbortsOver(ControlEvent, frozen=True):
    """The workers have aborted their generations. Generations that begin from now on are not meant."""

    KIND = "aborts_over"

    call: str


class CallOver(ControlEvent, frozen=True):
    """A call to all workers is over.

    Attributes:
        version: the weights of the workers (ids) in `taken` have it, perhaps of `unsure`.
        paused: whether workers are paused now; None where the path of the call says it.
    """

    KIND = "call_over"

    call: str
    version: str | None = None
    taken: tuple[str, ...] = ()
    unsure: tuple[str, ...] = ()
    paused: bool | None = None


class Abort(ControlEvent, frozen=True):
    """Generations have to end: those with this very id (`exact`), or those whose ids begin with it.

    Attributes:
        tenant: whose generations are meant; None for all.
        fields: the other fields of the client's request, JSON by name.
    """

    KIND = "abort"

    rid: str
    tenant: str | None = None
    exact: bool = False
    fields: dict[str, msgspec.Raw] = {}


class AbortAnswered(ControlEvent, frozen=True):
    """The answers of another router's workers to an abort, which the number of its entry names."""

    KIND = "abort_answered"

    abort: int
    answers: tuple[dict[str, Any], ...] = ()


class Snapshot(ControlEvent, frozen=True):
    """Everything that the log has said so far, so that earlier entries can be forgotten."""

    KIND = "snapshot"

    workers: dict[str, bool] = {}
    version: str | None = None
    paused: bool = False
    calls: tuple[CallBegan, ...] = ()


KINDS: Final[Mapping[str, type[ControlEvent]]] = {
    one.KIND: one
    for one in (RouterCame, WorkerAdded, WorkerRemoved, CallBegan, AbortsOver, CallOver, Abort, AbortAnswered, Snapshot)
}

_decoders = {kind: msgspec.json.Decoder(one) for kind, one in KINDS.items()}


def encoded(event: ControlEvent, by: str) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(event, by=by))


def decoded(kind: str, data: bytes) -> ControlEvent | None:
    """Return an entry; None for one of an unknown kind. Raises msgspec.MsgspecError for one that cannot be read."""
    decoder = _decoders.get(kind)
    return None if decoder is None else decoder.decode(data)


class FleetState:
    """The sum of the entries that were read.

    Attributes:
        workers: by URL, in the order in which they came: True, or False for a worker that was removed.
        version: the weights that the last update set.
        paused: whether the last such call was a pause.
        calls: by id, that have begun and are not over.
        entries: how many there were since the last snapshot.
    """

    def __init__(self) -> None:
        self.workers: dict[str, bool] = {}
        self.version: str | None = None
        self.paused = False
        self.calls: dict[str, CallBegan] = {}
        self.entries = 0

    def apply(self, event: ControlEvent | None) -> None:
        self.entries += 1
        if isinstance(event, WorkerAdded):
            if not self.workers.get(event.url):
                self.workers.pop(event.url, None)
                self.workers[event.url] = True
        elif isinstance(event, WorkerRemoved):
            self.workers.pop(event.url, None)
            self.workers[event.url] = False
            self._shorten()
        elif isinstance(event, CallBegan):
            self.calls[event.call] = event
            if event.path in PAUSES or event.path in CONTINUES:
                self.paused = event.path in PAUSES
        elif isinstance(event, CallOver):
            self.calls.pop(event.call, None)
            if event.version is not None and event.taken:
                self.version = event.version
            if event.paused is not None:
                self.paused = event.paused
        elif isinstance(event, Snapshot):
            self.workers = dict(event.workers)
            self.version, self.paused = event.version, event.paused
            self.calls = {call.call: call for call in event.calls}
            self.entries = 0

    def _shorten(self) -> None:
        removed = [url for url, there in self.workers.items() if not there]
        for url in removed[: max(0, len(removed) - MOST_REMOVED)]:
            del self.workers[url]

    def snapshot(self) -> Snapshot:
        return Snapshot(dict(self.workers), self.version, self.paused, tuple(self.calls.values()))
