"""The address of a store in Redis."""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

from router.errors import BadRequestError

FORMS: Final = (
    "redis://HOST:PORT/DB",
    "rediss://HOST:PORT/DB",
    "redis+sentinel://HOST:PORT,HOST:PORT/NAME/DB",
    "redis+cluster://HOST:PORT,HOST:PORT",
)
_PORTS: Final = {"redis": 6379, "redis+sentinel": 26379, "redis+cluster": 6379}
PREFIX: Final = "tito:"
"""The default prefix of the keys."""
_TRUE: Final = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


@dataclass(frozen=True, slots=True)
class Login:
    """The user that we are for a server. It never shows its password."""

    user: str | None = None
    password: str | None = None

    def __repr__(self) -> str:
        return f"<Login {self.user or 'default'}{'' if self.password is None else ' with a password'}>"


@dataclass(frozen=True, slots=True)
class Tls:
    """How a connection is encrypted: the options of redis-py's `rediss://`."""

    ca_certs: str | None = None
    certfile: str | None = None
    keyfile: str | None = None
    cert_reqs: str = "required"
    check_hostname: bool = True

    def context(self) -> ssl.SSLContext:
        """Return these options as an `SSLContext`. Raises BadRequestError for a file that cannot be read."""
        try:
            context = ssl.create_default_context(cafile=self.ca_certs)
            if self.certfile is not None:
                context.load_cert_chain(self.certfile, self.keyfile)
        except (OSError, ssl.SSLError) as error:
            files = ", ".join(name for name in (self.ca_certs, self.certfile, self.keyfile) if name)
            raise BadRequestError(f"the certificates of the store cannot be read ({files}): {error}") from error
        context.check_hostname = self.check_hostname and self.cert_reqs == "required"
        if self.cert_reqs == "none":
            context.verify_mode = ssl.CERT_NONE
        elif self.cert_reqs == "optional":
            context.verify_mode = ssl.CERT_OPTIONAL
        return context


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a store.

    Attributes:
        kind: `redis`, `redis+sentinel` or `redis+cluster`.
        hosts: of the server, of the Sentinels, or of some nodes of the cluster.
        shown: the address without its password.
        name: of the master, as the Sentinels know it.
        replicas: how many replicas have an append before it is acknowledged.
        timeout, connect_timeout: seconds that an answer, and a connection, may take.
    """

    kind: str
    hosts: tuple[tuple[str, int], ...]
    shown: str
    name: str = ""
    db: int = 0
    prefix: str = PREFIX
    login: Login = Login()
    sentinel_login: Login = Login()
    tls: Tls | None = None
    timeout: float = 4.0
    connect_timeout: float = 2.0
    replicas: int = 0


def shown(address: str) -> str:
    """Return the address of a store for display: without a password."""
    if not address.startswith("redis"):
        return address
    return re.sub(r"//.*@", "//***@", address).partition("?")[0]


def parse(address: str, prefix: str = PREFIX) -> Address:
    """Return an address that is written in one of the `FORMS`. Raises BadRequestError, which shows no password."""
    try:
        return _parse(address, shown(address), prefix)
    except ValueError as error:
        raise BadRequestError(f"--store {shown(address)}: {error}; write one of {', '.join(FORMS)}") from None


def _parse(address: str, safe: str, prefix: str) -> Address:
    scheme, _, rest = address.partition("://")
    kind = "redis" if scheme == "rediss" else scheme
    if kind not in _PORTS:
        raise ValueError("this is no address of a Redis")
    found = re.fullmatch(r"([^/?]*)(.*)", rest, re.DOTALL)
    assert found is not None
    authority, _, host_list = found[1].rpartition("@")
    parts = urlsplit(f"x://h{found[2]}")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    path = [unquote(part) for part in parts.path.split("/") if part]
    name = ""
    if kind == "redis+sentinel":
        if not path:
            raise ValueError("the name of the master is missing")
        name = path.pop(0)
    db = _whole(options.pop("db", path.pop(0) if path else "0"), "the number of a database")
    if path:
        raise ValueError("there is too much after the host")
    if kind == "redis+cluster" and "replicas" in options:
        raise ValueError("replicas are not waited for in a cluster")
    if kind == "redis+cluster" and db:
        raise ValueError("a cluster has database 0 only")
    tls = _tls(options) if scheme == "rediss" or options.pop("ssl", "") in ("1", "true", "yes") else None
    made = Address(
        kind,
        tuple(_host(one, _PORTS[kind]) for one in host_list.split(",")),
        safe,
        name,
        db,
        _prefix(options.pop("prefix", prefix)),
        _login(authority, options),
        Login(options.pop("sentinel_username", None), options.pop("sentinel_password", None)),
        tls,
        _seconds(options.pop("socket_timeout", "4"), "socket_timeout"),
        _seconds(options.pop("socket_connect_timeout", "2"), "socket_connect_timeout"),
        _whole(options.pop("replicas", "0"), "the number of replicas"),
    )
    if options:
        known = [name for name in sorted(options) if re.fullmatch("[a-z_]{1,30}", name)]
        raise ValueError(f"unknown option {', '.join(known)}")
    return made


def _host(text: str, port: int) -> tuple[str, int]:
    found = re.fullmatch(r"(\[[^\]]+\]|[^:\[\]]*)(?::(\d{1,5}))?", text)
    if found is None or not found[1]:
        # This text may be part of a password: it is not shown.
        raise ValueError("a host is written HOST or HOST:PORT, and @ / ? # in a password as %40 %2F %3F %23")
    if found[2] and not 0 < int(found[2]) < 65_536:
        raise ValueError("a port is a number from 1 to 65535")
    return found[1].strip("[]"), int(found[2] or port)


def _login(authority: str, options: dict[str, str]) -> Login:
    user, _, password = authority.partition(":")
    return Login(unquote(user) or options.pop("username", None), unquote(password) or options.pop("password", None))


def _tls(options: dict[str, str]) -> Tls:
    check = options.pop("ssl_check_hostname", "true").lower()
    required = options.pop("ssl_cert_reqs", "required")
    if check not in _TRUE or required not in ("required", "optional", "none"):
        raise ValueError("ssl_check_hostname is true or false, ssl_cert_reqs is required, optional or none")
    files: Mapping[str, str | None] = {
        name: options.pop(f"ssl_{name}", None) for name in ("ca_certs", "certfile", "keyfile")
    }
    return Tls(**files, cert_reqs=required, check_hostname=_TRUE[check])


def _whole(text: str, what: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ValueError(f"{what} is a number such as 0 or 12")
    return int(text)


def _seconds(text: str, what: str) -> float:
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]+)?", text) or not float(text):
        raise ValueError(f"{what} is a number of seconds, above 0")
    return float(text)


def _prefix(text: str) -> str:
    if not text or set(text) & set("{}*?[]\\") or not text.isprintable():
        raise ValueError("a prefix of keys has at least one character, and none of {}*?[]\\")
    return text
