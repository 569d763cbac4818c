"""One worker: its address, its state, and how many requests it is serving.

A worker's life is a walk through `TRANSITIONS`. Only workers in a state of `ROUTABLE` get new requests; a draining
one finishes what it has and is gone with its last request, unless it is added again before that.
"""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from router.errors import BadRequestError


class WorkerState(enum.Enum):
    """Where in its life a worker is."""

    HEALTHY = "healthy"
    DRAINING = "draining"
    GONE = "gone"


TRANSITIONS: Mapping[WorkerState, frozenset[WorkerState]] = {
    WorkerState.HEALTHY: frozenset({WorkerState.DRAINING}),
    WorkerState.DRAINING: frozenset({WorkerState.HEALTHY, WorkerState.GONE}),
    WorkerState.GONE: frozenset(),
}

ROUTABLE = frozenset({WorkerState.HEALTHY})

_HOST = re.compile(r"\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+")


class Worker:
    """An SGLang server. Changed only by the pool that holds it."""

    __slots__ = ("id", "inflight", "state", "url")

    def __init__(self, url: str) -> None:
        """`url` is normalized already."""
        self.url = url
        self.id = worker_id(url)
        self.state = WorkerState.HEALTHY
        self.inflight = 0

    @property
    def routable(self) -> bool:
        """Whether new requests may be sent to it."""
        return self.state in ROUTABLE

    def move_to(self, state: WorkerState) -> None:
        """Take a step of the table."""
        assert state in TRANSITIONS[self.state], f"{self.state} -> {state}"
        self.state = state

    def __repr__(self) -> str:
        return f"<Worker {self.url} {self.state.value} inflight={self.inflight}>"


def worker_id(url: str) -> str:
    """A short id that fits in a path: the same for the same URL, also after a restart."""
    return hashlib.blake2b(url.encode(), digest_size=6).hexdigest()


def normalize_url(url: str) -> str:
    """`scheme://host[:port]` in one spelling, or BadRequestError with what is wrong about it."""

    def bad(why: str) -> BadRequestError:
        return BadRequestError(f"bad worker URL {url!r}: {why}; expected something like http://10.0.0.1:30001")

    # urlsplit silently drops tabs and newlines.
    if not url.isascii() or any(character <= " " or character == "\x7f" for character in url):
        raise bad("it has spaces, control or non-ASCII characters")
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
    if port == 0:
        raise bad("port 0 cannot be connected to")
    if parts.path.strip("/") or "?" in url or "#" in url:
        raise bad("it must end after host and port")
    return f"{parts.scheme}://{host.lower()}{colon}{'' if port is None else port}"
