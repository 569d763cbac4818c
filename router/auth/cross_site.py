"""Refuses requests that the page of another site makes a browser send: a router without keys trusts all who reach it.

A page may post JSON to any address that its reader's machine reaches, as `text/plain` and so without asking that address. It
cannot read the reply, but it could add a worker, pause the fleet, or generate. Browsers say where such a request comes from
(`Sec-Fetch-Site`, and `Origin` where that is left out, over plain HTTP), and no page can change these headers. Other clients do
not send them. The rule is that of Go's `http.CrossOriginProtection`, and holds as well for a GET that needs an admin's right,
such as that of a worker's `/start_profile`. A request with a key is the bearer's own doing.
"""

from __future__ import annotations

from typing import ClassVar

from starlette.types import Scope

from router.auth.key_check import key_of
from router.auth.keys import ApiKeys
from router.auth.permissions import Right, needed
from router.errors import ForbiddenError
from router.http.headers import header
from router.http.request_state import request_state


class CrossSiteCheck:
    """Lets a browser's request in if a page of this router sent it, or nobody did (a typed address), or it has a key."""

    reads: ClassVar[frozenset[bytes]] = frozenset({b"sec-fetch-site", b"origin"})
    """All clients but browsers send none of them."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    def __call__(self, scope: Scope) -> None:
        """Check one request. Raises ForbiddenError."""
        if request_state(scope).caller.session is not None:  # it needs the right key, which no page has
            return
        if _foreign(scope) and not self._keys.identify(key_of(scope)):
            method, path = scope.get("method", "GET"), scope["path"]
            if method not in ("GET", "HEAD", "OPTIONS") or needed(method, path) is Right.ADMIN:
                raise ForbiddenError(
                    f"a browser sent {method} {path} for a page of another site, whose requests need a key of this router "
                    "(--api-key). If the page is yours, serve it from the address of the router, through a proxy"
                )


def _foreign(scope: Scope) -> bool:
    """Whether a browser says that a page of another site sent the request."""
    site = header(scope, b"sec-fetch-site")
    if site is not None:
        return site not in ("same-origin", "none")
    origin = header(scope, b"origin")
    if origin is None:
        return False
    # A proxy may have put its own name for the router into `host`.
    hosts = header(scope, b"host"), header(scope, b"x-forwarded-host")
    return origin.lower().partition("://")[2] not in [host.lower() for host in hosts if host]
