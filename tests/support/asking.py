"""A client that may do what clients do: wait for its reply, read a stream event by event, leave at any moment.

The request is sent at once and nothing is read before it is asked for, so a test goes through the moments of a generation
one by one, without threads.
"""

from __future__ import annotations

import http.client
import json
import socket
import struct
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from tests.support.client import Answer
from tests.support.oracle import versions_of
from tests.support.stack import Stack
from worker.engine.records import GenerationRecord
from worker.worker import EmbeddedWorker


class Asking:
    """One request on its way."""

    def __init__(
        self, url: str, body: Any, *, headers: Mapping[str, str] | None = None, path: str = "/generate"
    ) -> None:
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
        sent = {"content-type": "application/json", **(headers or {})}
        self._connection.request("POST", path, json.dumps(body).encode(), sent)
        self._response: http.client.HTTPResponse | None = None

    @property
    def response(self) -> http.client.HTTPResponse:
        """Waits for the head of the reply."""
        if self._response is None:
            self._response = self._connection.getresponse()
        return self._response

    def answer(self) -> Answer:
        """Wait for the whole reply."""
        found = {name.lower(): value for name, value in self.response.getheaders()}
        answer = Answer(self.response.status, found, self.response.read())
        self.close()
        return answer

    def event(self) -> dict[str, Any] | None:
        """Wait for the next event of a stream; None for [DONE]. ConnectionError if it ends otherwise."""
        while line := self.response.readline():
            if line.strip() == b"data: [DONE]":
                return None
            if line.startswith(b"data: "):
                found: dict[str, Any] = json.loads(line[6:])
                return found
        raise ConnectionError("the stream ended without [DONE]")

    def events(self) -> list[dict[str, Any]]:
        """All that are left."""
        found = []
        while (event := self.event()) is not None:
            found.append(event)
        return found

    def leave(self, *, rudely: bool = False) -> None:
        """Close the connection, or reset it."""
        if rudely and self._connection.sock is not None:
            self._connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self) -> None:
        """End it, however far it has come."""
        if self._response is not None:
            self._response.close()
        self._connection.close()


def until(condition: Callable[[], object], what: str | Callable[[], object] = "", seconds: float = 60.0) -> None:
    """Ask again and again, for what can only be seen from outside. `what` may be a function that says what it is then."""
    deadline, pause = time.monotonic() + seconds, 0.0005
    while not condition():
        assert time.monotonic() < deadline, f"not after {seconds:g} s: {what() if callable(what) else what}"
        time.sleep(pause)  # what answers may need this processor
        pause = min(2 * pause, 0.02)


def settle(served: Stack) -> None:
    """All gates open, nothing paused; then, after a moment, nothing must be in flight anywhere."""
    for worker in (*served.workers, *served.prefills):
        worker.release()
    until(served.idle, served.inflight)


def in_no_workers_hands(served: Stack) -> bool:
    """Whether nothing is being generated: what has no reply all the same waits to be sent again."""
    return not any(worker["load"] for worker in served.get("/workers").json()["workers"])


def counted(served: Stack, name: str) -> dict[str, int]:
    """A counter of /metrics, by its labels; only those that were counted up."""
    found = {}
    for line in served.get("/metrics").content.decode().splitlines():
        if line.startswith(name + "{"):
            label, value = line.rsplit(" ", 1)
            if float(value):
                found[label.removeprefix(name)] = int(float(value))
    return found


def outcomes(served: Stack) -> dict[str, int]:
    """What became of replies, and how many of each."""
    return counted(served, "tito_radix_replies_total")


def calls(worker: EmbeddedWorker, path: str) -> list[Any]:
    """The bodies of all calls of a path that a worker has got."""
    return [call.body for call in worker.calls if call.path == path]


def assert_kept(found: dict[str, Any], record: GenerationRecord) -> None:
    """A retrieval gives a reply id for id, with its logprobs and versions, as the worker made it."""
    start = len(record.input_ids)
    assert found["tokens"] == record.input_ids + record.output_ids
    assert found["loss_mask"][start:] == [1] * len(record.output_ids)
    assert found["rollout_logp"][start:] == record.logprobs
    assert [version for at, version in versions_of(found["weight_versions"]) if at >= start] == record.versions
    assert found["exact"], found["reasons"]


def said_once(before: str, last: str) -> str:
    """The text of a stream of deltas that was retracted and aborted: its last event is all of it, behind a last delta."""
    return before + last[: (len(last) - len(before)) // 2]
