"""Salts: which requests share what an engine has cached.

An engine's prefix cache keeps what older weights computed. After an update, the next turn of a conversation continues it, with
logprobs that no weights have. Requests with different salts share nothing, so a salt that names a weight version keeps the
versions apart:

    version   the fleet's version when the request is sent: nothing that was computed before an update is read after it
    rollout   the version with which its conversation began: that keeps its cache, and new ones never read older ones' caches

While no version is that of the whole fleet (`FleetVersion.settled`), a request that would have it gets a salt of its own: it
finds nothing, and leaves nothing that others find. A request that waits, or is sent again, gets its salt when it is sent.

A salt holds everything that keeps requests apart, each part with its kind and its length, so that no two of them are alike:
`v` version, `u` unknown version, `o` a salt of its own, `t` tenant, `k` the client's own `extra_key`, `c` its own `cache_salt`.
It is sent as `extra_key`, and as `cache_salt` if the client gave one, or if caches are followed (an SGLang worker's events tell
`cache_salt` only). vLLM takes 128 characters at most, and not all of them: such parts are hashed, and their kinds upper case.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, Final, cast, get_args

import blake3
import msgspec
from msgspec import Raw

from router.config.kv_salt import KvSaltConfig, SaltMode
from router.engines.form.fields import typed
from router.engines.form.worker_request import WorkerRequest
from router.engines.json import JSON_ERRORS, decode_object, is_list, is_null
from router.errors import BadRequestError
from router.workers.fleet_version import FleetVersion

HEADER: Final = b"x-kv-salt"
MOST: Final = 128
"""Characters of a salt that vLLM takes (0.32.0)."""
_LONG: Final = 48
_FORBIDDEN: Final = frozenset("@/\\\0")
"""Characters that vLLM refuses in a salt."""

Versions = str | Sequence[tuple[str, int]]
"""The weight version of a whole reply, or `(version, end)` runs."""
Began = Callable[[], Sequence[str | None]]
"""Returns, for each prompt, the version with which the conversation began that it continues; None for a new one."""


class SaltError(BadRequestError):
    """A request asks for a salt that it cannot have."""

    def __init__(self, message: str, param: str | None = None) -> None:
        """`param`: the field of the request that is wrong, if it is none of its headers."""
        super().__init__(message, code="kv_salt_invalid", param=param)


class _Salt(msgspec.Struct, frozen=True):
    """The part of a salt that the router decides, for one prompt.

    Attributes:
        text: as it stands in the salt.
        kind: `version`, `rollout`, `own`, `unknown`, or `tenant`, if that is all of it.
        version: the oldest version by which its cache may have been computed; None if that is unknown.
    """

    text: str
    kind: str
    version: str | None = None


class KvSalts:
    """Makes the salts of a router.

    Attributes:
        on: whether a request without the header may have one.
    """

    def __init__(
        self,
        config: KvSaltConfig,
        fleet: FleetVersion,
        counts: MutableMapping[tuple[str, ...], float],
        *,
        followed: bool = False,
    ) -> None:
        """Make salts by the version of a fleet.

        Args:
            counts: the prompts that were answered, by the kind of their salts.
            followed: whether the router follows the events of the workers' caches.
        """
        self.on = config.mode != "off" or config.tenants
        self.counts = counts
        self.fleet = fleet
        self.followed = followed
        self._config = config

    def of(
        self, asked: bytes | None, tenant: str, began: Began | None, request: WorkerRequest | None
    ) -> CallSalts | None:
        """Return what makes the salts of a request; None if it has none.

        Args:
            asked: the header of the request.
            began: for `rollout`; None if nothing is known of its conversations.
            request: in its first attempt; None if only a worker can decide what it means.

        Raises SaltError for another header than those of `SaltMode`.
        """
        mode = self._config.mode
        if asked is not None:
            named = asked.decode("latin-1")
            if named not in get_args(SaltMode):
                raise SaltError(f"x-kv-salt must be one of {', '.join(get_args(SaltMode))}, not {named!r}")
            mode = cast(SaltMode, named)
        tenant = tenant if self._config.tenants else ""
        if mode == "off" and not tenant:
            return None
        return CallSalts(self, mode, tenant, began if mode == "rollout" else None, request)


class CallSalts:
    """The salts of one call, from its first attempt to its last."""

    def __init__(
        self, salts: KvSalts, mode: SaltMode, tenant: str, began: Began | None, request: WorkerRequest | None
    ) -> None:
        self._salts = salts
        self._mode = mode
        self._tenant = _part("t", tenant) if tenant else ""
        self._samples = 1 if request is None else request.samples
        self._began: Sequence[str | None] = [] if began is None else began()
        self._sent: dict[int, _Salt] = {}  # by reply: that of its last attempt
        self._pause = 0
        self.key = ""
        """The whole salt of the first prompt as it was sent last, and as the events of caches tell it."""
        self.shared = False
        """Whether other requests may share it."""

    def salted(self, request: WorkerRequest | None, body: bytes, positions: Sequence[int] | None = None) -> bytes:
        """Return the body of an attempt with the salts that it has now.

        Args:
            request: the body as the router understands it, if it does.
            positions: of an attempt that is not the first one, which reply each of its prompts is for.

        Raises SaltError for an `extra_key` or a `cache_salt` with which no salt can be combined.
        """
        fields = _fields(body) if request is None else request.fields
        if fields is None:
            return body  # which the worker refuses
        count = 1 if request is None else request.prompts
        places = range(count) if positions is None else [position // self._samples for position in positions]
        salts = self._made(places)
        for number, salt in enumerate(salts):
            for reply in _replies(number, positions, self._samples):
                self._sent[reply] = salt
        listed = request is not None and request.listed
        keys = _given(fields, "extra_key", count, listed=listed)
        own = _given(fields, "cache_salt", count, listed=listed)
        texts = [_joined(salt.text, self._tenant, ("k", key)) for salt, key in zip(salts, keys, strict=True)]
        out = {**fields, "extra_key": _written(texts)}
        if self._salts.followed or any(own):
            parts = zip(salts, keys, own, strict=True)
            texts = [_joined(salt.text, self._tenant, ("k", key), ("c", given)) for salt, key, given in parts]
            out["cache_salt"] = _written(texts)
        self.key, self.shared = texts[0], salts[0].kind != "own"
        fleet = self._salts.fleet
        self._pause = fleet.pauses if fleet.paused else 0
        if request is None:
            return msgspec.json.encode(out)
        return msgspec.structs.replace(request, fields=out, _printed=b"").body

    def _made(self, places: Sequence[int]) -> list[_Salt]:
        """Return the salts of the prompts at these places of the whole request."""
        fleet, mode = self._salts.fleet, self._mode
        if mode == "off":
            return [_Salt("", "tenant")] * len(places)
        settled, current = fleet.settled, fleet.current
        found = []
        for place in places:
            version = self._began[place] if place < len(self._began) else None
            if version is None and not settled:
                found.append(_Salt(_part("o", secrets.token_hex(16)), "own"))
            elif (named := current if version is None else version) is None:
                found.append(_Salt("u", "unknown"))
            else:
                found.append(_Salt(_part("v", named), mode, named))
        return found

    def version(self, reply: int, versions: Versions) -> str | None:
        """Return the oldest version by which the cache of a reply may have been computed; None if that is unknown.

        Args:
            reply: its number: those of the first prompt come first.
            versions: of its tokens. A prompt with a salt of its own was computed by the weights of its first token.
        """
        salt = self._sent.get(reply)
        if salt is None:
            return None
        if salt.kind == "own":
            return versions if isinstance(versions, str) else versions[0][0]
        return salt.version

    def answered(self, *, aborted: bool) -> None:
        """Note that a worker has begun to answer. If it is not `aborted`, a pause in which the request was sent is over."""
        fleet, counts = self._salts.fleet, self._salts.counts
        for salt in self._sent.values():
            counts[salt.kind,] += 1
        if not aborted and self._pause and self._pause == fleet.pauses:
            fleet.resumed()


def _fields(body: bytes) -> dict[str, Raw] | None:
    try:
        return decode_object(body)
    except JSON_ERRORS:
        return None


def _replies(number: int, positions: Sequence[int] | None, samples: int) -> Sequence[int]:
    """Return the replies that a prompt of an attempt is for."""
    return range(number * samples, (number + 1) * samples) if positions is None else (positions[number],)


def _given(fields: dict[str, Raw], name: str, count: int, *, listed: bool) -> Sequence[str]:
    """Return a field of the client's for each prompt; "" where there is none. Raises SaltError.

    `listed`: whether the request is for several replies, and so may have a list.
    """
    raw = fields.get(name)
    if raw is None or is_null(raw):
        return [""] * count
    expected = "a string, or a list with one for each prompt"
    try:
        if not is_list(raw):
            return [typed(fields, name, str, expected) or ""] * count
        found: list[Any] = typed(fields, name, list[str | None], expected)
    except BadRequestError as error:
        raise SaltError(error.message, param=name) from None
    if not listed or len(found) != count:
        raise SaltError(f"`{name}` is a list of {len(found)}, which does not fit the prompts", param=name)
    return [one or "" for one in found]


def _joined(salt: str, tenant: str, *given: tuple[str, str]) -> str:
    """Return a whole salt."""
    parts = [part for part in (salt, tenant) if part]
    parts += [_part(kind, text) for kind, text in given if text]
    found = ";".join(parts)
    return found if len(found) <= MOST else f"D{_hashed(found)}"


def _part(kind: str, text: str) -> str:
    """Return a part of a salt: its kind, its length and its text, or the hash of one that vLLM would not take."""
    if len(text) > _LONG or not _FORBIDDEN.isdisjoint(text):
        return f"{kind.upper()}{_hashed(text)}"
    return f"{kind}{len(text)}:{text}"


def _hashed(text: str) -> str:
    return blake3.blake3(text.encode("utf-8", "surrogatepass")).hexdigest(16)


def _written(texts: Sequence[str]) -> Raw:
    """Return the field: one salt for all prompts, or a list."""
    return Raw(msgspec.json.encode(texts[0] if len(set(texts)) == 1 else texts))
