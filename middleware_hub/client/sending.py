"""The common parts of `AsyncClient` and `Client`: addresses, headers, and retries.

The HTTP library is aiohttp, also for the blocking `Client`. httpx can do both by itself, but its pool checks all connections
for each request: with 150 conversations at once a request took 55 ms of processor time.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any, TypedDict, Unpack

import aiohttp

from middleware_hub.client.errors import IncompleteStreamError, UnreachableError
from middleware_hub.client.options import check_options
from middleware_hub.client.wire import REFUSED, Call, Retries, may_go_again

BROKEN = (aiohttp.ClientError, OSError, TimeoutError)
"""The errors of aiohttp if a connection cannot be made, or breaks."""
_NEVER_SENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)


class ClientOptions(TypedDict, total=False):
    """How a client talks to its routers.

    Attributes:
        api_key: one of the router's keys; by default that in the variable `TITO_API_KEY`, if there is one.
        namespace: `x-radix-namespace`: keeps texts apart, for example an evaluation's.
        retries: how often a request is sent again, if that is allowed.
        connect_timeout: seconds until a router that does not answer at all counts as unreachable. Nothing else has a time limit
            here: a generation takes as long as it takes, and the router has limits.
    """

    api_key: str | None
    namespace: str | None
    retries: Retries | None
    connect_timeout: float


class Sending:
    """The base of both clients: the routers' addresses, the headers, and the decision what is sent again.

    Args:
        urls: of one router, or of several that share a store. The first is asked until it cannot be reached or refuses to take
            requests, then the next one, and so on in a circle.
        options: see `ClientOptions`.
    """

    def __init__(self, urls: str | Sequence[str], **options: Unpack[ClientOptions]) -> None:
        check_options(options, ClientOptions)
        self.urls = tuple(url.strip().rstrip("/") for url in ([urls] if isinstance(urls, str) else urls))
        if not self.urls or not all(url.startswith(("http://", "https://")) for url in self.urls):
            raise ValueError(f"a router's address begins with http:// or https://, not {urls!r}")
        self.retries = options.get("retries") or Retries()
        self._at = 0
        key = options.get("api_key") or os.environ.get("TITO_API_KEY")
        self._headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        if namespace := options.get("namespace"):
            self._headers["x-radix-namespace"] = namespace
        self._connect_timeout = options.get("connect_timeout", 10.0)

    @property
    def url(self) -> str:
        """Return the address that is asked now."""
        return self.urls[self._at]

    def _request(self, call: Call) -> dict[str, Any]:
        headers = {**self._headers, **call.headers}
        return {"method": call.method, "url": self.url + call.path, "data": call.content(), "headers": headers}

    def go_on(
        self, call: Call, attempt: int, asked: str, status: int | None, error: Exception | None, least: float = 0.0
    ) -> float | None:
        """Decide what follows a failure: return the seconds to wait before the next attempt, or None if there is none.

        Args:
            asked: the address that failed. Of many requests that fail there at once, the first one goes on to the next
                address, and the others follow: if each moved on by one, they would come back to the failed address.
            status: that of an answer; None if there was none.
            least: the seconds that routers have asked to wait since the last wait.

        Raises UnreachableError for an exception without a further attempt.
        """
        if status is not None:
            harmless = may_go_again(call, status)
        else:
            harmless = call.again or isinstance(error, _NEVER_SENT) or (call.samples and self.retries.resample)
        if (error is not None or status in REFUSED) and asked == self.url:
            self._at = (self._at + 1) % len(self.urls)
        if harmless and attempt < self.retries.attempts:
            # Try every router once before a wait.
            rounds = attempt // len(self.urls)
            return 0.0 if not rounds else _spread(self.retries.wait(rounds, least))
        if error is None:
            return None
        raise self._unreachable(call, attempt, error) from error

    def _unreachable(self, call: Call, attempt: int, error: Exception) -> UnreachableError:
        where = ", ".join(self.urls)
        if isinstance(error, _NEVER_SENT):
            return UnreachableError(
                f"no router answers at {where} after {attempt} attempts ({str(error) or error!r}): is it running, and does "
                "--host let this machine in?"
            )
        broke = f"the connection broke before {call.method} {call.path} was answered ({error!r})"
        if call.again or not call.samples or self.retries.resample:
            return UnreachableError(f"{broke}; attempts: {attempt}")
        return UnreachableError(
            f"{broke}. A reply may have been sampled, so the client did not repeat the request: send it again to sample "
            "another reply"
        )


def retry_after(answer: aiohttp.ClientResponse) -> float:
    """Return the seconds that an answer asks to wait. A date, which no router and no load balancer sends, counts as 0."""
    said = answer.headers.get("retry-after", "")
    return float(said) if said.isascii() and said.isdecimal() else 0.0


def _spread(seconds: float) -> float:
    """Return these seconds, or up to half as much again: clients refused at the same time do not return at the same time."""
    return seconds * random.uniform(1.0, 1.5)


def broken_stream() -> IncompleteStreamError:
    return IncompleteStreamError(
        "the stream ended before its last event: what came is recorded, and a text that goes on from it continues its tokens"
    )
