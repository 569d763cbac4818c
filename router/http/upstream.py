"""What the HTTP client towards the workers does, and how it fails. `router/http/client` is that client.

Three things can go wrong with a worker. They differ in how far the request got, because that decides what may be done
about it: `ConnectFailedError` (nothing was sent: try anywhere), `ClosedBeforeReplyError` (sent, but not a byte came
back: may be tried again if doing it twice does no harm) and `UpstreamBrokenError` (the reply had begun).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing, suppress
from email.utils import parsedate_to_datetime
from typing import Protocol

Headers = Sequence[tuple[bytes, bytes]]
Body = bytes | None


class UpstreamFailure(Exception):
    """A worker failed. The message says how; the caller knows which worker."""


class ConnectFailedError(UpstreamFailure):
    """There was no connection, so nothing was sent."""


class ClosedBeforeReplyError(UpstreamFailure):
    """The request was sent, at least in part, and the connection ended before any of the reply came.

    `kept`: the connection had served another request. The worker may have closed it as idle in the moment of use.
    """

    def __init__(self, message: str, *, kept: bool = False) -> None:
        super().__init__(message)
        self.kept = kept


class UpstreamBrokenError(UpstreamFailure):
    """The reply had begun and does not end as it should."""


class NotHttpError(UpstreamBrokenError):
    """What came is not HTTP."""


class UpstreamResponse(Protocol):
    """A reply whose head has arrived and whose body is still on its way."""

    status: int
    headers: Headers
    """As the worker sent them, repeated ones too."""

    async def read(self) -> bytes:
        """Return the next piece of the body, empty at the end. Raises UpstreamBrokenError."""

    def close(self) -> None:
        """Release the reply. Before the body's end, this closes the connection, so that the worker notices."""


class Upstream(Protocol):
    """Sends requests to workers."""

    async def send(
        self, method: str, url: str, headers: Headers, body: Body = None, *, fresh: bool = False
    ) -> UpstreamResponse:
        """Send, and wait for the head of the reply. Raises one of the three failures.

        `url` is sent as it is, its escapes untouched. `fresh` asks for a connection that was never used before.
        """


def retry_after(response: UpstreamResponse) -> float | None:
    """Return the seconds after which a worker wants the next request; they may be written as a date (RFC 9110, 10.2.3)."""
    for name, value in response.headers:
        if name.lower() == b"retry-after":
            text = value.decode("latin-1").strip()
            if text.isascii() and text.isdigit():
                return float(text)
            with suppress(ValueError):
                return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    return None


async def fetch(
    upstream: Upstream,
    method: str,
    url: str,
    headers: Headers,
    body: Body = None,
    *,
    fresh: bool = False,
    limit: int = 16 * 1024 * 1024,
) -> tuple[int, bytes]:
    """Return a whole small reply, `(status, body)`. Raises one of the three failures, also for more than `limit` bytes."""
    with closing(await upstream.send(method, url, headers, body, fresh=fresh)) as response:
        content = bytearray()
        while chunk := await response.read():
            content += chunk
            if len(content) > limit:
                raise UpstreamBrokenError(f"the reply is longer than {limit} bytes")
        return response.status, bytes(content)
