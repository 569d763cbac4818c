"""From a number to a request: a good one of its route, and so many changes to its body, headers, query, path and method."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote

import msgspec
from starlette.datastructures import QueryParams

from router.errors import BadRequestError
from router.workers.worker import normalize_url
from tests.fuzz.atoms import HEADERS, METHODS, QUERIES
from tests.fuzz.bodies import ANY, ASKED, BODIES, words
from tests.fuzz.case import Case, Headers
from tests.fuzz.mutate import Mutator, atom

Shape = Literal["json", "bytes", "headers", "target", "everything", "nothing"]
SHAPES: tuple[Shape, ...] = ("json", "bytes", "headers", "target", "everything", "nothing")
"""What is changed. `nothing`: a good request, for what comes after a bad one."""

PROXIED = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/models",
    "/echo",
    "/server_info",
    "/",
    "/a/b%2Fc",
)
"""What the application has no route of its own for."""

GROUPED = frozenset({"/generate", "/v1/completions", "/v1/chat/completions", "/v1/messages"})
"""What samples for a group, if its headers name one."""

_TEMPLATE = b"http://127.0.0.1:30001"  # stands for a worker in the bodies
_HEADER_NAMES = tuple(HEADERS)
_ODD_PATHS = (
    *(
        b"/",
        b"//",
        b"/.",
        b"/..",
        b"%00",
        b"%2F",
        b"%2e%2e",
        b"%ff",
        b"%",
        b";a=b",
        b"%0d%0aa:b",
        b"+",
        b"*",
        b"~",
        b"'\"",
    ),
    b"/" + b"x" * 3000,
)
_SOURCES = ("disk", "tensor", "distributed", "ipc", "x", "", "a/b", "%00")


@dataclass(frozen=True)
class Surroundings:
    """What the requests to an application may name.

    Attributes:
        routes: the paths with handlers of their own, with their methods.
        workers: URLs of workers, which may be added; nobody else may.
        keys: that let requests in; none if nobody is asked for one.
    """

    routes: Mapping[str, Sequence[str]]
    workers: Sequence[str]
    keys: Sequence[str] = ()


class Drawing:
    """Requests for one application."""

    def __init__(self, surroundings: Surroundings) -> None:
        self._around = surroundings
        self._bodies = {path: [msgspec.json.encode(body) for body in bodies] for path, bodies in BODIES.items()}
        self._any = [msgspec.json.encode(body) for body in ANY]
        self._mutator = Mutator(words(), [body for bodies in self._bodies.values() for body in bodies])
        self.paths = [*surroundings.routes, *PROXIED]

    def case(self, path: str, shape: Shape, number: int, steps: int | None = None) -> Case | None:
        """The request of a number, with fewer steps if asked; None if it would have the router talk to strangers."""
        rng = random.Random(number)
        steps = self.steps(number) if steps is None else steps
        methods = self._around.routes.get(path, ("POST", "GET"))
        method = rng.choice(methods)
        worker = rng.choice(self._around.workers) if self._around.workers else ""
        target = self._path(path, worker, rng)
        if path in ASKED and method == "GET":
            target += _query(path, rng, steps if shape in ("target", "everything") else 0)
        body = self._body(path, method, worker, shape, rng, steps)
        headers = self._headers(method, rng)
        if path in GROUPED and rng.random() < 0.3:
            headers += ((b"x-group-id", b"g"), (b"x-group-size", b"2"), (b"x-rollout-end", b"true"))
        if shape in ("headers", "everything"):
            headers = _headers(headers, rng, steps)
        if shape in ("target", "everything") and steps:
            method, target = _aimed(method, target, rng)
        case = Case(method, target, headers, body, chunked=rng.random() < 0.05, leaves=rng.random() < 0.02)
        return None if self._names_a_stranger(case) else case

    @staticmethod
    def steps(number: int) -> int:
        """How many changes the request of a number has."""
        return (1, 1, 1, 2, 2, 3, 5)[number % 7]

    def _path(self, path: str, worker: str, rng: random.Random) -> bytes:
        if "{source}" in path:
            path = path.replace("{source}", rng.choice(_SOURCES))
        elif "{" in path:
            # An id, or a URL; of a route that nobody has told about here, anything.
            some = (quote(worker, safe=""), worker, "0" * 12, "x", "", "..", "%00", "a" * 500)
            path = path[: path.index("{")] + rng.choice(some)
        return path.encode()

    def _body(self, path: str, method: str, worker: str, shape: Shape, rng: random.Random, steps: int) -> bytes:
        bodies = self._bodies.get(path, self._any)
        if method in ("GET", "DELETE") and rng.random() < 0.9:
            return b""
        body = rng.choice(bodies).replace(_TEMPLATE, worker.encode())
        if shape in ("json", "everything"):
            body = self._mutator.written(self._mutator.json(msgspec.json.decode(body), rng, steps), rng)
        if shape in ("bytes", "everything"):
            for _ in range(min(steps, 2)):
                body = self._mutator.bytes(body, rng)
        return body

    def _headers(self, method: str, rng: random.Random) -> Headers:
        found: list[tuple[bytes, bytes]] = []
        if method != "GET" and rng.random() < 0.97:
            found.append((b"content-type", b"application/json"))
        if self._around.keys and rng.random() < 0.97:
            found.append((b"authorization", b"Bearer " + rng.choice(self._around.keys).encode()))
        return tuple(found)

    def _names_a_stranger(self, case: Case) -> bool:
        """Whether a worker would be asked that is none of ours: read as the router reads it."""
        if not case.target.startswith((b"/add_worker", b"/workers")):
            return False
        query = QueryParams(case.scope()["query_string"])
        named: list[Any] = [query.get("url"), query.get("worker_url")]
        try:
            body = msgspec.json.decode(case.body)
        except (ValueError, RecursionError):
            body = None
        if isinstance(body, dict):
            named += [body.get("url"), body.get("worker_url")]
        return any(isinstance(url, str) and self._is_strange(url) for url in named)

    def _is_strange(self, url: str) -> bool:
        try:
            return normalize_url(url) not in self._around.workers
        except BadRequestError:
            return False


def _headers(headers: Headers, rng: random.Random, steps: int) -> Headers:
    changed = list(headers)
    for _ in range(steps):
        if changed and rng.random() < 0.15:
            del changed[rng.randrange(len(changed))]
        else:
            name = rng.choice(_HEADER_NAMES)
            # In the place of the one that is there, or beside it.
            if rng.random() < 0.8:
                changed = [pair for pair in changed if pair[0] != name]
            changed.append((name, rng.choice(HEADERS[name]).strip()))
    return tuple(changed)


def _query(path: str, rng: random.Random, steps: int) -> bytes:
    """A query of a path, with so many of its values changed."""
    pairs = [pair.split("=", 1) for pair in rng.choice(ASKED[path]).split("&") if pair]
    for _ in range(steps if pairs else 0):
        pair = rng.choice(pairs)
        value = atom(rng)
        pair[1] = quote(value, errors="surrogatepass") if isinstance(value, str) else str(value)[:2000].replace(" ", "")
        if rng.random() < 0.1:
            pairs.append([pair[0], "1"])
    return b"?" + quote("&".join("=".join(pair) for pair in pairs), safe="%&=,").encode() if pairs else b""


def _aimed(method: str, target: bytes, rng: random.Random) -> tuple[str, bytes]:
    """Another method, a path that is nearly the same, a query."""
    if rng.random() < 0.4:
        method = rng.choice(METHODS)
    if rng.random() < 0.5:
        at = rng.choice((len(target), len(target), rng.randint(1, len(target))))
        target = rng.choice(
            (target[:at] + rng.choice(_ODD_PATHS) + target[at:], target.upper(), target[:at] or b"/", b"/" + target)
        )
    if rng.random() < 0.6:
        query = rng.choice(QUERIES)
        target += b"?" + (quote(query, safe="%&=?+/:@[").encode() if rng.random() < 0.5 else query.replace(b" ", b"+"))
    return method, target
