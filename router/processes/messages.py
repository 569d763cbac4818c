"""The messages between the parent and its processes, over a socket pair that no other process can reach."""

from __future__ import annotations

import msgspec


class Sample(msgspec.Struct, array_like=True):
    """A value of a metric, with its whole name (`..._bucket`) and its labels."""

    name: str
    labels: dict[str, str]
    value: float


class Family(msgspec.Struct, array_like=True):
    """A metric with all its samples; `kind` is `counter`, `gauge` or `histogram`."""

    name: str
    kind: str
    text: str
    samples: list[Sample]


class Ready(msgspec.Struct, tag=True):
    """A process has started, and could serve."""


class Failed(msgspec.Struct, tag=True):
    """A process cannot start, for a reason that it shares with all the others."""

    message: str


class Start(msgspec.Struct, tag=True):
    """Accept connections. The answer is `Ready`: it does."""


class Heartbeat(msgspec.Struct, tag=True):
    """Report that you are there, and what you have counted."""


class HeartbeatReply(msgspec.Struct, tag=True):
    """The answer to a `Heartbeat`."""

    families: list[Family]


class Scrape(msgspec.Struct, tag=True):
    """What have all processes counted together?"""


class Scraped(msgspec.Struct, tag=True):
    """The answer to a `Scrape`, as Prometheus text."""

    text: bytes


class ProcessQuery(msgspec.Struct, tag=True):
    """What do you answer to this GET? From a process to the parent: what do all the others answer?"""

    path: str
    query: bytes


class QueryResult(msgspec.Struct, tag=True):
    """The answer of one process to a `ProcessQuery`."""

    number: int
    status: int
    body: bytes


class QueryResults(msgspec.Struct, tag=True):
    """The answers of those processes that answered in time."""

    answers: list[QueryResult]


Message = (
    Ready | Failed | Start | Heartbeat | HeartbeatReply | Scrape | Scraped | ProcessQuery | QueryResult | QueryResults
)
