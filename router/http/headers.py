"""Headers of requests and replies, and which of them may pass.

Nothing here needs a framework: a middleware uses the same functions as the proxy.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from email.utils import parsedate_to_datetime
from urllib.parse import quote

from starlette.types import Scope

from router.errors import BadRequestError

HeaderList = list[tuple[bytes, bytes]]

# RFC 9110, 7.6.1, and the older names that are still seen.
_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
# The HTTP client frames the body again and names the worker's host. Our own server has answered `expect`.
_NOT_TO_WORKER = _HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"expect",
    b"accept-encoding",
    b"x-abort-policy",
    b"x-goog-api-key",
}
# Our server writes its own date and framing; the body is already decoded here.
_NOT_TO_CLIENT = _HOP_BY_HOP | {
    b"content-length",
    b"content-encoding",
    b"date",
    b"server",
    b"x-router-worker",
    b"x-router-reason",
}
_ASKED = {
    "x-radix-": ("namespace", "parent", "media"),
    "x-group-": ("id", "size"),
    "x-rollout-": ("id", "end"),
    "x-kv-": ("salt",),
}
"""Our own headers of a request, by their beginning."""
_OURS = tuple(map(str.encode, _ASKED))
_MOST_CHECKED = 64
"""Names of headers that are compared with our own, at a tenth of a millisecond each: a head has room for thousands."""
_NOT_TO_WORKER_BUT_TO_US = _NOT_TO_WORKER | {b"authorization", b"x-api-key"}


def header(scope: Scope, name: bytes) -> str | None:
    """Return the first value of a request header, or None. `name` is in lower case, as ASGI has it."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value).decode("latin-1")
    return None


def _check(name: str) -> None:
    for start, ends in _ASKED.items():
        end = name.removeprefix(start)
        if end not in (name, *ends) and (meant := get_close_matches(end, ends, 1)):
            raise BadRequestError(f"there is no request header {name}: did you mean {start}{meant[0]}?")


def text_of(value: bytes) -> str:
    """Return a name in a header, as bodies write it, too. Clients send non-ASCII names in UTF-8 or in latin-1."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def first_values(headers: HeaderList) -> dict[bytes, bytes]:
    """Return the headers of a request by name, each with its first value.

    Raises BadRequestError for a misspelt header of ours: an evaluation whose namespace has no effect would continue the
    replies of the training, for example. Other names pass, such as those of replies, which a client may send back.
    """
    found = dict(reversed(headers))
    left = _MOST_CHECKED
    for name in reversed(found):
        if left and name.startswith(_OURS):
            left -= 1
            _check(name.decode("latin-1"))
    return found


def request_target(scope: Scope) -> str:
    """Return path and query as the client wrote them, escapes included. Raises BadRequestError if they are not a path."""
    raw: bytes | None = scope.get("raw_path")
    path = quote(scope["path"]) if raw is None else raw.decode("latin-1")
    if not path.startswith("/"):
        # After a worker's URL, anything else would change the host or the port.
        raise BadRequestError(f"the request target must begin with a slash, not {path!r}")
    query: bytes = scope.get("query_string", b"")
    return f"{path}?{query.decode('latin-1')}" if query else path


def request_headers(headers: HeaderList, *, forward_authorization: bool) -> HeaderList:
    """Return the headers of a client's request that go to a worker.

    Compression is declined for the client: a reply has to be readable here, and between machines of one rack it
    costs more than it saves.
    """
    dropped = _NOT_TO_WORKER if forward_authorization else _NOT_TO_WORKER_BUT_TO_US
    kept = _passing(headers, dropped, _OURS)
    kept.append((b"accept-encoding", b"identity"))
    return kept


def as_json(headers: HeaderList) -> HeaderList:
    """Return the headers of a request whose body is JSON now, whatever the client called it."""
    kept = [pair for pair in headers if pair[0] != b"content-type"]
    kept.append((b"content-type", b"application/json"))
    return kept


def reply_headers(headers: Sequence[tuple[bytes, bytes]], worker: str) -> HeaderList:
    """Return the headers of a worker's reply that go to the client, names in lower case.

    `worker`: its URL. A redirection to it becomes one to the same path here, as SGLang redirects `/generate/`: a client that
    follows it must not go past the router.
    """
    passing = _passing(headers, _NOT_TO_CLIENT)
    for at, (name, value) in enumerate(passing):
        if name == b"location" and value.startswith(worker.encode("ascii") + b"/"):
            path = value[len(worker) :]
            if not path.startswith(b"//"):  # alone, that would be a host
                passing[at] = name, path
    return passing


def retry_after(headers: Sequence[tuple[bytes, bytes]]) -> float | None:
    """Return the seconds after which a worker wants the next request; they may be written as a date (RFC 9110, 10.2.3)."""
    for name, value in headers:
        if name.lower() == b"retry-after":
            text = value.decode("latin-1").strip()
            if text.isascii() and text.isdigit():
                return float(text)
            with suppress(ValueError, OverflowError):
                return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    return None


def _passing(
    headers: Sequence[tuple[bytes, bytes]], dropped: frozenset[bytes], dropped_beginnings: tuple[bytes, ...] = ()
) -> HeaderList:
    """Return the headers that are neither dropped nor named by a `connection` header; their names in lower case."""
    kept: HeaderList = []
    named: list[bytes] = []
    for name, value in headers:
        lower = name.lower()
        if lower == b"connection":
            named += [token.strip().lower() for token in value.split(b",")]
        elif lower not in dropped and not lower.startswith(dropped_beginnings):
            kept.append((lower, value))
    return [pair for pair in kept if pair[0] not in named] if named else kept


def has_body(scope: Scope) -> bool:
    """Return whether the request announces a body."""
    if header(scope, b"transfer-encoding") is not None:
        return True
    return (header(scope, b"content-length") or "0").strip("0 ") != ""
