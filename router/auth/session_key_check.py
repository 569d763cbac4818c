"""The check of a session's key: it takes the key out of the request, and sends the request on to its session."""

from __future__ import annotations

from typing import ClassVar

from starlette.types import Scope

from router.auth.permissions import FREE
from router.auth.session_keys import PREFIX, UNKNOWN, SessionKeys, read_key
from router.errors import ForbiddenError, UnauthorizedError
from router.http.request_state import Caller, with_state

_ROOTS = ("/v1/", "/v1beta/", "/v1alpha/", "/messages/", "/models/")
"""How the paths of client libraries begin, also of one whose base URL lacks the `/v1`."""
_WHOLE = frozenset({"/chat/completions", "/responses", "/messages", "/models"})
"""Paths of a base URL without `/v1` that have nothing behind them."""
_PREFIX = PREFIX.encode()


class SessionKeyCheck:
    """Turns the path of a request with the key of a session into the session's: `/v1/messages` into `/sessions/ID/v1/messages`.

    The part that serves sessions checks the secret.
    """

    reads: ClassVar[frozenset[bytes]] = frozenset({b"authorization", b"x-api-key", b"api-key", b"x-goog-api-key"})
    """The headers in which client libraries send a key: OpenAI's, Anthropic's, Azure's, Google's."""

    def __init__(self, keys: SessionKeys) -> None:
        self._keys = keys

    def __call__(self, scope: Scope) -> None:
        """Check one request. Raises UnauthorizedError, ForbiddenError."""
        reads, headers = self.reads, scope["headers"]
        given = {word for name, value in headers if name in reads and (word := _key_in(name, value)) is not None}
        if not given:
            return
        scope["headers"] = [pair for pair in headers if pair[0] not in reads or _key_in(*pair) is None]
        path: str = scope["path"]
        if path in FREE:
            return
        if not self._keys.served:
            raise _unauthorized("this is the key of a session, and this router has no sessions")
        if len(given) > 1:
            raise _unauthorized("this request has the keys of several sessions")
        key = read_key(given.pop().decode("latin-1"))
        if key is None:
            raise _unauthorized(UNKNOWN)
        own = f"/sessions/{key.session_id}"
        if _is_turn(path):
            scope["path"] = own + path
            if (raw := scope.get("raw_path")) is not None:
                scope["raw_path"] = own.encode() + raw
        elif not (path.startswith(own) and _is_turn(path[len(own) :])):
            call = f"{scope.get('method', 'GET')} {path}"
            raise ForbiddenError(
                f"{call}: the key of a session is for its turns (/v1/chat/completions, /v1/responses, /v1/messages, Google's "
                "/v1beta/models) and its models only. The base URL of OpenAI's libraries is http://ROUTER/v1, that of "
                "others http://ROUTER. Other calls need a key of the router, or none if it has none"
            )
        scope.update(with_state(scope, caller=Caller(admin=False, confined=True, session=key)))


def _key_in(name: bytes, value: bytes) -> bytes | None:
    """Return the key of a session that a header has, whatever else is wrong with it; None if it has none."""
    word = value.strip()
    if name == b"authorization":
        word = word.rpartition(b" ")[2]
    return word if word.startswith(_PREFIX) else None


def _is_turn(path: str) -> bool:
    """Return whether a library may add this path to a base URL. Those of a session's controls must not be among them."""
    return path.startswith(_ROOTS) or path.rstrip("/") in _WHOLE


def _unauthorized(why: str) -> UnauthorizedError:
    return UnauthorizedError(why, headers=(("www-authenticate", "Bearer"),))
