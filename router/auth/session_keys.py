"""The keys of agent sessions: a client that can set nothing but an address and a key names its session by the key.

    sk-tito-SECRET.SESSION      SECRET: 256 random bits, as 43 characters

Such a key opens the turns of its session and nothing else. `SessionKeyCheck` reads it in front of all routes, takes it out of
the headers, so that no log and no worker sees it, and turns the path into that of the session. What serves sessions compares
the secret, of which only a digest is kept: it alone knows whether there is such a session, and whose it is.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence
from typing import Final

from router.http.request_state import SessionKey

PREFIX: Final = "sk-tito-"
UNKNOWN: Final = "this router knows no session of this key: it was deleted, has expired, or never was"
_SECRET_BYTES: Final = 32
_WRITTEN = re.compile(rf"{PREFIX}([A-Za-z0-9_-]{{43}})\.([A-Za-z0-9._~-]{{1,128}})")


class SessionKeys:
    """What the check of keys and the part that serves sessions share.

    Attributes:
        tenants: whose sessions a key may be of.
        served: whether the router has sessions. The part that serves them sets it.
    """

    def __init__(self, tenants: Sequence[str] = ("",)) -> None:
        self.tenants = tenants
        self.served = False


def new_key(session_id: str) -> SessionKey:
    """Return a key of a session that nobody can guess."""
    return SessionKey(session_id, secrets.token_urlsafe(_SECRET_BYTES))


def written(key: SessionKey) -> str:
    """Return a key as clients send it."""
    return f"{PREFIX}{key.secret}.{key.session_id}"


def read_key(text: str) -> SessionKey | None:
    """Return what `written` wrote; None for any other text."""
    matched = _WRITTEN.fullmatch(text)
    return None if matched is None else SessionKey(matched[2], matched[1])


def digest_of(key: SessionKey) -> bytes:
    """Return what is kept of a key."""
    return hashlib.blake2b(key.secret.encode(), digest_size=32).digest()


def opens(key: SessionKey, digest: bytes) -> bool:
    """Return whether this is the key of a digest that was kept; an empty digest has none."""
    return bool(digest) and hmac.compare_digest(digest_of(key), digest)
