"""A router in front of workers, all of them processes, seen from outside."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.support.client import Answer, call
from tests.support.programs import Program

PATIENCE = 60.0
"""Seconds for what takes one on a machine that has nothing else to do."""


def until(condition: Callable[[], object], what: str | Callable[[], object], seconds: float = PATIENCE) -> None:
    """Return when something holds that can only be seen by asking other processes.

    Raises AssertionError if it never does, with `what` that was, or what it tells then.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not after {seconds:g} s: {what if isinstance(what, str) else what()}"
        time.sleep(0.02)  # a poll of other processes: there is nothing to wait on


@dataclass(frozen=True)
class Fleet:
    """What a test asks and tells it."""

    router: Program
    workers: Sequence[Program]

    @property
    def url(self) -> str:
        return self.router.url

    def get(self, path: str) -> Answer:
        return call(self.url + path)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """A call that is to succeed."""
        answer = call(self.url + path, body)
        assert answer.status == 200, answer.content
        return answer.json()

    def seen(self) -> dict[str, dict[str, Any]]:
        """GET /workers, by URL."""
        return {worker["url"]: worker for worker in self.get("/workers").json()["workers"]}

    def load(self, worker: Program) -> int:
        found: int = self.seen()[worker.url]["load"]
        return found

    def states(self) -> Counter[str]:
        """How many workers are in which state."""
        return Counter(worker["state"] for worker in self.seen().values())

    def until_state(self, url: str, state: str) -> None:
        until(lambda: self.seen()[url]["state"] == state, f"{url} is {state}")

    def until_open(self, url: str) -> None:
        """Wait until a worker's circuit breaker is open."""
        until(lambda: self.seen()[url]["circuit_breaker"] == "open", f"the breaker of {url} opens")

    @contextmanager
    def joined_by(self, url: str) -> Iterator[None]:
        """With another worker in the pool."""
        self.post("/add_worker", {"url": url})
        self.until_state(url, "healthy")
        try:
            yield
        finally:
            self.post("/remove_worker", {"url": url})

    def phases(self) -> Counter[str]:
        """Of the generations in flight, how many are where."""
        requests = self.get("/debug/requests").json()["requests"]
        return Counter(one["phase"] for one in requests if one["path"] == "/generate")

    def until_idle(self) -> None:
        """Wait until the router has nothing in flight: no request, no lease, nobody in the queue."""
        until(self._idle, "the router is idle")

    def _idle(self) -> bool:
        inflight = self.numbers("tito_router_worker_inflight")
        assert len(inflight) == len(self.seen())
        held = [*inflight.values(), *self.numbers("tito_router_queue_length").values()]
        held += [worker["load"] for worker in self.seen().values()]
        return not any(held) and not self.get("/debug/requests").json()["total"]

    def numbers(self, name: str) -> dict[str, float]:
        """A metric, by its labels as they are written."""
        found = {}
        for line in self.get("/metrics").content.decode().splitlines():
            label, _, value = line.rpartition(" ")
            if label == name or label.startswith(name + "{"):
                found[label.removeprefix(name)] = float(value)
        return found

    def count(self, name: str, **labels: str) -> int:
        """A counter: the sum of all series with these labels."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        series = self.numbers(name).items()
        return int(sum(value for found, value in series if all(one in found for one in wanted)))
