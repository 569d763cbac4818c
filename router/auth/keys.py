"""The keys that let requests in, and the tenant that each key names."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable

from router.auth.session_keys import PREFIX
from router.errors import BadRequestError
from router.http.request_state import Caller

_NAMED = re.compile(r"(?:([A-Za-z0-9_.-]+):)?(.*)", re.DOTALL)
_WRITABLE = re.compile(r"[!-~]+")


class ApiKeys:
    """`--api-key [TENANT:]KEY` and `--admin-key KEY`.

    Only digests are kept. They have one length, so a comparison always takes the same time.
    """

    def __init__(self, api_keys: Iterable[str] = (), admin_keys: Iterable[str] = ()) -> None:
        """Raises BadRequestError for a key that no header can carry, and for a key with two meanings."""
        self._tenants: dict[bytes, str] = {}
        for given in api_keys:
            name, key = _split(given)
            digest = _digest(key.encode())
            if self._tenants.setdefault(digest, name) != name:
                raise BadRequestError(f"--api-key: tenants {self._tenants[digest]!r} and {name!r} have the same key")
        self._admins = tuple(dict.fromkeys(_digest(_checked("--admin-key", key).encode()) for key in admin_keys))
        both = [self._tenants[digest] for digest in self._admins if digest in self._tenants]
        if both:
            raise BadRequestError(
                f"--admin-key: an admin key is also the key of tenant {both[0]!r}: give it one of its own"
            )

    def __bool__(self) -> bool:
        return bool(self._tenants or self._admins)

    @property
    def tenants(self) -> tuple[str, ...]:
        """The names of the tenants, each once."""
        return tuple(dict.fromkeys(self._tenants.values()))

    @property
    def owners(self) -> tuple[str, ...]:
        """The tenants of all who may make a session: admins, and clients of a router that asks for no key, have no name."""
        return (*(("",) if self._admins or not self._tenants else ()), *self.tenants)

    @property
    def have_admin(self) -> bool:
        """Whether a change of the fleet needs an admin key."""
        return bool(self._admins)

    @property
    def several(self) -> bool:
        """Whether there is more than one tenant; the admin counts as one."""
        return len(self.tenants) + self.have_admin > 1

    def identify(self, key: bytes) -> Caller | None:
        """Return the owner of a key, or None. All keys are compared, so the time says nothing about the key."""
        digest = _digest(key)
        admin = sum(hmac.compare_digest(digest, known) for known in self._admins)
        names = [name for known, name in self._tenants.items() if hmac.compare_digest(digest, known)]
        if admin:
            return Caller()
        return Caller(names[0], admin=not self.have_admin, confined=self.several) if names else None

    def anonymous(self) -> Caller | None:
        """Return the caller without a key where only admins have keys; None where tenants have keys."""
        return None if self._tenants else Caller(admin=False, confined=True)


def _split(given: str) -> tuple[str, str]:
    """Return the tenant and the key. A key without a tenant is a tenant of its own, named by a digest that hides the key."""
    matched = _NAMED.fullmatch(given)
    assert matched is not None
    name, key = matched[1], _checked("--api-key", matched[2])
    return name or "key-" + hashlib.blake2b(key.encode(), digest_size=4).hexdigest(), key


def _checked(flag: str, key: str) -> str:
    if not _WRITABLE.fullmatch(key):
        raise BadRequestError(f"{flag} must not be empty, and has no spaces and nothing but ASCII in it")
    if key.startswith(PREFIX):
        raise BadRequestError(f"{flag}: keys that begin with {PREFIX} are those of sessions")
    return key


def _digest(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=32).digest()
