"""A plain HTTP client for tests that talk to a server from outside: one connection per request, nothing hidden."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Answer:
    """Status, headers (lower case), and the whole body; of one that broke off (if that is asked for) what came of it."""

    status: int
    headers: dict[str, str]
    content: bytes
    broken: bool = False

    def json(self) -> Any:
        return json.loads(self.content)


@contextmanager
def _exchange(
    url: str, body: Any, headers: Mapping[str, str] | None, timeout: float
) -> Iterator[http.client.HTTPResponse]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)
    try:
        content = None if body is None else json.dumps(body).encode()
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        sent = {"content-type": "application/json", **(headers or {})}
        connection.request("GET" if content is None else "POST", target, content, sent)
        yield connection.getresponse()
    finally:
        connection.close()


def call(
    url: str,
    body: Any = None,
    *,
    headers: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    may_break: bool = False,
) -> Answer:
    """GET without a body, POST of JSON with one. Raises IncompleteRead for an answer that breaks off, unless it may."""
    with _exchange(url, body, headers, timeout) as response:
        found = {name.lower(): value for name, value in response.getheaders()}
        try:
            return Answer(response.status, found, response.read())
        except http.client.IncompleteRead as error:
            if not may_break:
                raise
            return Answer(response.status, found, error.partial, broken=True)


def stream(
    url: str, body: Any, *, headers: Mapping[str, str] | None = None, timeout: float = 120.0
) -> Iterator[dict[str, Any]]:
    """The events of a server-sent stream as they come.

    Raises:
        ConnectionError: it ended without `[DONE]`.
    """
    with _exchange(url, body, headers, timeout) as response:
        if response.status != 200:
            raise ConnectionError(f"{response.status}: {response.read()[:500]!r}")
        for line in response:
            if line.strip() == b"data: [DONE]":
                return
            if line.startswith(b"data: "):
                yield json.loads(line[6:])
    raise ConnectionError("the stream ended without [DONE]")
