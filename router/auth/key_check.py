"""The check of keys, in front of all routes. It also notes the request's tenant."""

from __future__ import annotations

import logging
import re
from urllib.parse import unquote_to_bytes

from starlette.types import Scope

from router.auth.keys import ApiKeys
from router.auth.permissions import Right, meant_path, needed
from router.errors import BadRequestError, ForbiddenError, UnauthorizedError
from router.http.headers import header
from router.http.request_state import Caller, request_state, with_state

logger = logging.getLogger(__name__)

GOOGLES_KEY = b"x-goog-api-key"
_GOOGLES = re.compile(r"/v1(?:alpha|beta)[0-9]*/|/models/.*:[A-Za-z]+$")

ACT_AS = b"x-tenant"
"""The header by which an admin acts as a tenant."""


class KeyCheck:
    """Lets a request in if its key (`Authorization: Bearer`) has the right that its path needs, and notes its tenant."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys
        if keys.tenants:
            logger.info("tenants: %s", ", ".join(keys.tenants))
        if len(keys.tenants) > 1 and not keys.have_admin:
            logger.warning(
                "there are %d tenants and no --admin-key: each of them can pause the fleet, end what others generate, and"
                " add workers that see what others write",
                len(keys.tenants),
            )

    def __call__(self, scope: Scope) -> None:
        """Check one request. Raises UnauthorizedError, ForbiddenError, and BadRequestError for an unknown tenant."""
        right = needed(scope.get("method", "GET"), scope["path"])
        if right is Right.FREE or self._has_session(scope):
            return
        caller = self._caller(scope, right)
        request_state(scope).record.tenant = caller.tenant
        scope.update(with_state(scope, caller=caller))
        scope["headers"] = [pair for pair in scope["headers"] if pair[0] != ACT_AS]  # workers must not see it

    def _has_session(self, scope: Scope) -> bool:
        """Whether a request has the key of a session, which is checked where sessions are."""
        if request_state(scope).caller.session is None:
            return False
        if header(scope, ACT_AS) is not None:
            raise _not_an_admin()
        return True

    def _caller(self, scope: Scope, right: Right) -> Caller:
        given = key_of(scope)
        caller = self._keys.identify(given)
        if caller is None and right is Right.USE:
            caller = self._keys.anonymous()
        if caller is None:
            wrong = "this router needs a key: Authorization: Bearer KEY"
            if given:
                hint = " (of TENANT:KEY, a client sends the KEY)" if b":" in given else ""
                wrong = (
                    f"this router does not know the key of this request{hint}: it has those that it was started with"
                )
            raise UnauthorizedError(f"{wrong}{_advice(scope, right)}", headers=(("www-authenticate", "Bearer"),))
        if right is Right.ADMIN and not caller.admin:
            call = f"{scope.get('method', 'GET')} {scope['path']}"
            raise ForbiddenError(f"{call} wants an admin key (--admin-key){_advice(scope, right)}")
        tenant = header(scope, ACT_AS)
        return caller if tenant is None else self._acting_as(tenant, caller)

    def _acting_as(self, tenant: str, caller: Caller) -> Caller:
        if caller.tenant or not caller.admin:
            raise _not_an_admin()
        if tenant not in self._keys.tenants:
            known = ", ".join(self._keys.tenants) or "none"
            raise BadRequestError(f"x-tenant: there is no tenant {tenant!r}, but: {known}")
        return Caller(tenant, admin=True, confined=True)


def key_of(scope: Scope) -> bytes:
    """Return the key of a request: a bearer token, `x-api-key` as Anthropic's clients send it, or Google's `x-goog-api-key`."""
    scheme, _, given = (header(scope, b"authorization") or "").partition(" ")
    if scheme.lower() == "bearer":
        return given.strip().encode("latin-1")
    given = header(scope, b"x-api-key") or header(scope, GOOGLES_KEY) or ""
    return given.strip().encode("latin-1")


def take_key_out(scope: Scope) -> None:
    """Put a key that stands in the query, as Google's clients may write it (`?key=`), into their header, and nowhere else.

    Queries go on to workers, into logs and traces. Only at paths of Google's API is this a key: elsewhere it is a worker's own
    parameter.
    """
    if not _GOOGLES.search(scope["path"]):
        return
    parts = scope["query_string"].split(b"&")
    keys = [part for part in parts if unquote_to_bytes(part.partition(b"=")[0]) == b"key"]
    if keys:
        scope["query_string"] = b"&".join([part for part in parts if part not in keys])
        if header(scope, GOOGLES_KEY) is None:
            scope["headers"] = [*scope["headers"], (GOOGLES_KEY, unquote_to_bytes(keys[0].partition(b"=")[2]))]


def _not_an_admin() -> ForbiddenError:
    return ForbiddenError("x-tenant wants an admin key (--admin-key)")


def _advice(scope: Scope, right: Right) -> str:
    """Return an advice to add to an error: a misspelt path needs an admin key, as does any path that is not known."""
    meant = meant_path(scope["path"]) if right is Right.ADMIN else None
    return "" if meant is None else f". Did you mean {meant}?"
