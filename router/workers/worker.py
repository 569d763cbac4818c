"""A worker: its address, its state, and how many requests it is serving.

`TRANSITIONS` has the steps from state to state. Probes move a worker among the first four: it is `STARTING` until its first
answer, `SUSPECT` from a first bad probe on, `QUARANTINED` after several, and `HEALTHY` again after good ones. Only workers in a
`ROUTABLE` state get new requests. A draining worker finishes its requests and is gone with the last one, unless it is added
again before that.

Requests are sent to a *target*: a worker, or one of several ranks of it. An engine with data parallelism has ranks that share
weights, address and health, and each has a KV cache and a queue of its own. So policies, limits and counts are about targets;
probes, circuit breakers and weight versions are about workers.
"""

from __future__ import annotations

import enum
import hashlib
import ipaddress
import re
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

import msgspec

from router.config.workers import HealthConfig
from router.engines.engine import EngineCall
from router.engines.known_names import KnownNames
from router.errors import BadRequestError
from router.workers.breaker import Breaker, BreakerState


class WorkerState(enum.Enum):
    """The states of a worker, see `TRANSITIONS`."""

    STARTING = "starting"
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    QUARANTINED = "quarantined"
    DRAINING = "draining"
    GONE = "gone"


TRANSITIONS: Mapping[WorkerState, frozenset[WorkerState]] = {
    WorkerState.STARTING: frozenset({WorkerState.HEALTHY, WorkerState.DRAINING}),
    WorkerState.HEALTHY: frozenset({WorkerState.SUSPECT, WorkerState.DRAINING}),
    WorkerState.SUSPECT: frozenset({WorkerState.HEALTHY, WorkerState.QUARANTINED, WorkerState.DRAINING}),
    WorkerState.QUARANTINED: frozenset({WorkerState.HEALTHY, WorkerState.DRAINING}),
    WorkerState.DRAINING: frozenset({WorkerState.STARTING, WorkerState.GONE}),
    WorkerState.GONE: frozenset(),
}


class Contact(enum.Enum):
    """Whether there is a process at a worker's address, and the same as before."""

    THERE = "there"
    ABSENT = "absent"  # the last probe found no connection
    BACK = "back"  # there is one again, to another process, which has not been healthy yet


class WorkerRole(enum.Enum):
    """Which part of a generation a worker does. Prefill and decode workers serve each request in pairs."""

    REGULAR = "regular"
    PREFILL = "prefill"
    DECODE = "decode"


ROUTABLE = frozenset({WorkerState.HEALTHY, WorkerState.SUSPECT})

_HOST = re.compile(r"\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
"""An address in brackets, or labels with dots between them: RFC 1035, 2.3.4, and the underscores of Docker's names."""


class KvState(enum.Enum):
    """How far a router is with a worker's KV cache events. Of several ranks, the first of these that one is in counts."""

    FAILED = "failed"  # it is tried again
    UNKNOWN = "unknown"  # the worker has not said whether it publishes; it is asked again
    CONNECTING = "connecting"
    CONNECTED = "connected"
    NONE = "none"  # the worker publishes none


class KvFollowing(msgspec.Struct, frozen=True):
    """How far a router is with a worker's events, and why it is no further: `kv_events` of `GET /workers`."""

    state: KvState
    error: str | None = None


class ProbeResult(msgspec.Struct, frozen=True):
    """The result of a probe.

    Attributes:
        complaint: why the worker is not well for now; None if it is.
        refusal: why it can never be used; None if it can.
        version: its weight version, if it reported one.
        absent: whether there was no connection.
        silent: whether there was no answer in time.
        stranger: whether a server answered that is no engine. There may be one later: the complaint or refusal is not for ever.
        engine: the name of its engine; None if it did not introduce itself.
        abilities: the features that its engine's adapter may use (`router/engines/engine.py`).
        ranks: the number of its data-parallel ranks; None if it did not say.
        role: its part of a generation; None if it did not say so.
        bootstrap_port: where the decode workers find a prefill worker; None if it did not say so.
    """

    complaint: str | None = None
    refusal: str | None = None
    version: str | None = None
    absent: bool = False
    silent: bool = False
    stranger: bool = False
    engine: str | None = None
    abilities: frozenset[str] = frozenset()
    ranks: int | None = None
    role: WorkerRole | None = None
    bootstrap_port: int | None = None


class WorkerCheck(msgspec.Struct, frozen=True):
    """A question that a middleware has each worker asked about itself, such as whether it has the same tokenizer.

    The answer changes nothing about the routing: a warning is logged, and `GET /workers` shows it.

    Attributes:
        call: is sent to a worker once it is healthy, and again after it may have been restarted.
        judge: returns a fault of a worker that gives this answer (status 200), or None. It is not called for other
            answers: not every version of an engine has every path.
    """

    call: EngineCall
    judge: Callable[[bytes], str | None]


class Worker:
    """An inference server. Only the pool that holds it changes it.

    Attributes:
        targets: its ranks, of which it has at least one.
        told_ranks: whether it has said how many ranks it has, since it may have been restarted.
        inflight: the number of requests that it is serving, at all of them, and at ranks that it no longer has.
        rank_mismatches: the number of replies that came from another rank than the one that was asked.
        version: its weight version; None if unknown.
        has_told_version: whether it has ever been known. Some engines never tell it.
        doubts: how often it may have been restarted, which made its version unknown.
        breaker: its circuit breaker.
        complaint: why its last probe was bad; None after a good one.
        outdated: whether its weights differ from the weights that the fleet should have.
        engine: the name of its engine; None until it has introduced itself.
        abilities: the features that its engine's adapter may use.
        images: the names of the pictures that it has answered with, if its engine knows pictures by name.
        role: its part of a generation.
        bootstrap_port: where the decode workers find it, if it is a prefill worker of SGLang.
        warning: the faults that the `WorkerCheck`s found.
        kv_events: how far this router is with its KV cache events; None without `--kv-events`.
        stranger: whether something answers there, and not as its engine does: there may be another engine by now, or none.
    """

    __slots__ = (
        *("_bad", "_contact", "_good", "breaker", "complaint", "doubts", "id", "inflight"),
        *("abilities", "engine", "images", "kv_events", "outdated", "state", "stranger", "url", "version", "warning"),
        *("bootstrap_port", "has_told_version", "rank_mismatches", "role", "targets", "told_ranks"),
    )

    def __init__(self, url: str, breaker: Breaker | None = None) -> None:
        """`url` is normalized. By default, the breaker never opens."""
        self.url = url
        self.id = worker_id(url)
        self.state = WorkerState.STARTING
        self.role = WorkerRole.REGULAR
        self.bootstrap_port: int | None = None
        self.inflight = 0
        self.targets: tuple[Target, ...] = (Target(self),)
        self.told_ranks = False
        self.rank_mismatches = 0
        self.version: str | None = None
        self.has_told_version = False
        self.doubts = 0
        self.breaker = breaker or Breaker()
        self.complaint: str | None = None
        self.warning: str | None = None
        self.kv_events: KvFollowing | None = None
        self.outdated = False
        self.engine: str | None = None
        self.abilities: frozenset[str] = frozenset()
        self.images = KnownNames()
        self.stranger = False
        self._good = self._bad = 0
        self._contact = Contact.THERE

    @property
    def ranks(self) -> int | None:
        """The number of its data-parallel ranks; None if it did not say."""
        return len(self.targets) if self.told_ranks else None

    @property
    def routable(self) -> bool:
        return self.state in ROUTABLE and self.breaker.state is BreakerState.CLOSED and not self.outdated

    def probed(self, complaint: str | None, config: HealthConfig, *, absent: bool = False) -> bool:
        """Note the result of a probe, with a `complaint` if it was bad. Return whether the state changed.

        `absent` says that there was no connection. A worker that comes back from that is another process, and one that has
        just come up had none before, so its circuit breaker is reset.
        """
        before, self.complaint = self.state, complaint
        if absent:
            self._contact = Contact.ABSENT
        elif self._contact is Contact.ABSENT:
            self._contact = Contact.BACK
        if complaint is None:
            self._good, self._bad = self._good + 1, 0
            needed = config.success_threshold if self.state is WorkerState.QUARANTINED else 1
            if WorkerState.HEALTHY in TRANSITIONS[self.state] and self._good >= needed:
                self.move_to(WorkerState.HEALTHY)
                if self._contact is Contact.BACK and before is not WorkerState.SUSPECT:
                    self.breaker.forget()
                self._contact = Contact.THERE
        else:
            self._good, self._bad = 0, self._bad + 1
            if self.state is WorkerState.HEALTHY:
                self.move_to(WorkerState.SUSPECT)
            if self.state is WorkerState.SUSPECT and self._bad >= config.failure_threshold:
                self.move_to(WorkerState.QUARANTINED)
        return self.state is not before

    def note_version(self, version: str | None) -> None:
        """Note its weight version; None if that is unknown now."""
        self.version = version
        self.has_told_version |= version is not None

    @property
    def was_away(self) -> bool:
        """Whether its last probe found no process. If one comes back, it is another process, perhaps with other flags."""
        return self._contact is Contact.ABSENT

    @property
    def known_to_hang(self) -> bool:
        """Whether it has failed so many probes that it gets no requests, or would get none if it were not leaving."""
        if self.state is WorkerState.DRAINING:
            return self.complaint is not None
        return self.state is WorkerState.QUARANTINED

    @property
    def worth_a_try(self) -> bool:
        """Whether to try this worker with a request that has no other.

        True for one that has not answered yet, that answered its last probe but not enough of them, or that was absent: the
        request is served, or fails without a loss. False where something else than an engine answers.
        """
        if self.state is WorkerState.QUARANTINED:
            return self.was_away or self.complaint is None
        return self.state is WorkerState.STARTING and not self.stranger

    def split(self, ranks: int) -> tuple[Target, ...]:
        """Have this many ranks from now on. Return the targets that are gone."""
        kept, gone = self.targets[:ranks], self.targets[ranks:]
        self.targets = (*kept, *(Target(self, rank) for rank in range(len(kept), ranks)))
        return gone

    def move_to(self, state: WorkerState) -> None:
        assert state in TRANSITIONS[self.state], f"{self.state} -> {state}"
        self.state = state

    def __repr__(self) -> str:
        return f"<Worker {self.url} {self.state.value} inflight={self.inflight}>"


class Target:
    """One rank of a worker. A worker with one rank has the target 0 alone, and no rank is named to it.

    Attributes:
        worker: the worker.
        rank: its number there, from 0 on.
        name: the worker's URL, with `@` and the rank from rank 1 on. It means the same after a restart.
        id: for sets of targets that must not get a request.
        inflight: the number of requests that it is serving. Only the pool changes it.
    """

    __slots__ = ("id", "inflight", "name", "rank", "worker")

    def __init__(self, worker: Worker, rank: int = 0) -> None:
        self.worker = worker
        self.rank = rank
        self.name = target_name(worker.url, rank)
        self.id = f"{worker.id}@{rank}"
        self.inflight = 0

    @property
    def routable(self) -> bool:
        """Whether it gets new requests: its worker does, and still has this rank."""
        return self.worker.routable and self.rank < len(self.worker.targets)

    def __repr__(self) -> str:
        return f"<Target {self.name} {self.worker.state.value} inflight={self.inflight}>"


def target_name(url: str, rank: int) -> str:
    """Return the name of a rank of the worker at a URL."""
    return f"{url}@{rank}" if rank else url


def worker_id(url: str) -> str:
    """Return a short id that fits in a path. Equal URLs have equal ids, also after a restart."""
    return hashlib.blake2b(url.encode(), digest_size=6).hexdigest()


def dns_name(given: str) -> str:
    """Return `NAME:PORT` in its only spelling. Raise BadRequestError for anything else."""
    wrong = f"bad --worker-dns {given!r}: expected a name with a port, such as workers.train.svc:30001"
    try:
        parts = urlsplit(normalize_url(f"http://{given}"))
    except BadRequestError as error:
        raise BadRequestError(wrong) from error
    if parts.port is None or parts.path:
        raise BadRequestError(wrong)
    return parts.netloc


def normalize_url(url: str) -> str:
    """Return `scheme://host[:port]` in its only spelling. Raise BadRequestError that says what is wrong with the URL."""

    def bad(why: str) -> BadRequestError:
        return BadRequestError(f"bad worker URL {url!r}: {why}; expected something like http://10.0.0.1:30001")

    # urlsplit silently drops tabs and newlines.
    if not url.isascii() or any(character <= " " or character == "\x7f" for character in url):
        raise bad("it has spaces, control or non-ASCII characters")
    if "," in url and url.count("://") > 1:
        raise bad("it is several URLs: separate them with spaces, not commas")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise bad(str(error)) from error
    if parts.scheme not in ("http", "https") or not url.lower().startswith(f"{parts.scheme}://"):
        raise bad("it must begin with http:// or https://")
    if "@" in parts.netloc:
        raise bad("credentials in it are not supported")
    host, colon, _ = parts.netloc.rpartition(":") if port is not None else (parts.netloc.rstrip(":"), "", "")
    if not host:
        raise bad("it has no host")
    if not _HOST.fullmatch(host):
        raise bad(f"{host!r} is not a host name or address")
    if host.rstrip(".").rpartition(".")[2].isdigit() or host.startswith("["):
        try:
            ipaddress.ip_address(host.strip("[]"))
        except ValueError as error:
            raise bad(str(error)) from error
    if port == 0:
        raise bad("port 0 cannot be connected to")
    if parts.path.strip("/") or "?" in url or "#" in url:
        raise bad("it must end after host and port")
    return f"{parts.scheme}://{host.lower()}{colon}{'' if port is None else port}"
