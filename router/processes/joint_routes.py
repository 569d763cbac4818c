"""The routes that answer for all processes, whichever of them is asked.

Each function that joins answers gets JSON objects, its own process's first.

This layer stands inside the check of keys: a caller that may see one process may see all. A question to another process does
not pass through its layer, and does not count as a request there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.errors import RouterError
from router.http.request_state import Caller, with_state
from router.http.responses import send_json
from router.policies.homes import ConversationHomes
from router.processes.joint_metrics import families_of
from router.processes.messages import Family, QueryResult
from router.workers.worker import KvState

_VERSIONS = {"asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "scheme": "http"}


Json = dict[str, Any]
Join = Callable[[Sequence[Json]], Json]

_BREAKERS = ("closed", "half_open", "open")
_KV_STATES = [state.value for state in KvState]
"""The worst one first."""

_ALIKE = frozenset({"weight_version", "weight_versions", "records", "roots", "logs", "error"})
"""Fields that are the same for all processes: the fleet's versions, and the size of their store."""


class OtherProcesses(Protocol):
    """The way to the other processes. (A process makes its routes, so these know `ParentLink` only by its methods.)

    Attributes:
        number: of this process.
        instance: the mark of the probes of all of them.
        homes: the workers of the conversations that all of them serve.
    """

    number: int
    instance: bytes
    homes: ConversationHomes

    def answer_with(self, answers: JointRoutes) -> None:
        """Let others see this process: its metrics, and its own answers to GETs."""

    async def scrape(self) -> bytes | None:
        """Return the metrics of all processes as Prometheus text; None if the parent does not answer."""

    async def look(self, path: str, query: bytes) -> list[QueryResult]:
        """Return the answers of the other processes to a GET, without processes that hang."""


class ParentSilentError(RouterError):
    """The parent, which knows all processes, does not answer."""

    status = 503
    type = "parent_silent"


class JointRoutes:
    """Asks the other processes, where an answer of this one alone would mislead."""

    def __init__(self, app: ASGIApp, others: OtherProcesses, registry: CollectorRegistry) -> None:
        self._app = app
        self._others = others
        self._registry = registry
        others.answer_with(self)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        join = join_for(scope["path"]) if scope["type"] == "http" and scope["method"] == "GET" else None
        if join is not None:
            own = await self._own(scope, receive)
            joint = await self._joined(own, scope, join) if own.status == 200 else own
            await send_json(send, joint.status, joint.body)
        elif scope["type"] == "http" and scope["method"] == "GET" and scope["path"] == "/metrics":
            await self._metrics(send)
        else:
            await self._app(scope, receive, send)

    def families(self) -> list[Family]:
        """Return the metrics of this process."""
        return families_of(self._registry)

    async def look(self, path: str, query: bytes) -> tuple[int, bytes]:
        """Answer another process, which has checked the rights of its caller."""
        scope: Scope = {
            **{"type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "root_path": ""},
            **{"query_string": query, "headers": [], "client": None, "server": None, **_VERSIONS},
        }
        try:
            seen = await self._own(with_state(scope, caller=Caller("", admin=True, confined=False)), _nothing)
        except RouterError as error:
            return error.status, msgspec.json.encode(error.body())
        return seen.status, seen.body

    async def _joined(self, own: QueryResult, scope: Scope, join: Join) -> QueryResult:
        others = await self._others.look(scope["path"], scope["query_string"])
        if scope["path"] == "/health":  # the next request may come to a process that sees no worker
            for one in others:
                if one.status != 200:
                    return one
        answers = [one for one in (own, *others) if one.status == 200]
        joint = join([_labelled(one) for one in answers])
        numbers = sorted(one.number for one in answers)
        return QueryResult(own.number, 200, msgspec.json.encode({**joint, "processes": numbers}))

    async def _own(self, scope: Scope, receive: Receive) -> QueryResult:
        """Return this process's own answer."""
        status, parts = 500, []

        async def keep(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                parts.append(message.get("body", b""))

        await self._app(scope, receive, keep)
        return QueryResult(self._others.number, status, b"".join(parts))

    async def _metrics(self, send: Send) -> None:
        text = await self._others.scrape()
        if text is None:
            raise ParentSilentError("the metrics of all processes are not to be had: their parent does not answer")
        headers = [
            (b"content-type", CONTENT_TYPE_LATEST.encode()),
            (b"content-length", b"%d" % len(text)),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": text})


def _labelled(seen: QueryResult) -> Json:
    """Return an answer, with the number of its process at each request in it."""
    answer: Json = msgspec.json.decode(seen.body)
    for request in answer.get("requests", ()):
        request["process"] = seen.number
    return answer


async def _nothing() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


def join_for(path: str) -> Join | None:
    """Return how answers to a GET of this path are joined; None for a path that any process answers alone."""
    if path.startswith("/workers/"):
        return worker
    return _JOINS.get(path)


def worker(answers: Sequence[Json]) -> Json:
    """Describe one worker: its loads at all processes, and otherwise the worst of the processes' descriptions."""
    least = min(answers, key=lambda one: bool(one["is_healthy"]))
    breaker = max((one["circuit_breaker"] for one in answers), key=_BREAKERS.index)
    found = {**least, "circuit_breaker": breaker, "targets": _targets(answers)}
    found |= {name: sum(one[name] for one in answers) for name in ("load", "rank_mismatches")}
    followed = [one["kv_events"] for one in answers if one.get("kv_events") is not None]
    if followed:
        found["kv_events"] = min(followed, key=lambda one: _KV_STATES.index(one["state"]))
    return found


def _targets(answers: Sequence[Json]) -> list[Json]:
    loads: Counter[int] = Counter()
    for answer in answers:
        for target in answer["targets"]:
            loads[target["rank"]] += target["load"]
    return [{"rank": rank, "load": load} for rank, load in sorted(loads.items())]


def workers(answers: Sequence[Json]) -> Json:
    found: dict[str, list[Json]] = {}
    for answer in answers:
        for one in answer["workers"]:
            found.setdefault(one["id"], []).append(one)
    return {**answers[0], "workers": [worker(same) for same in found.values()], "total": len(found)}


def health(answers: Sequence[Json]) -> Json:
    """Answer with the fewest workers that a process sees: it may be the one that gets the next request."""
    return {**answers[0], "workers": min(answer["workers"] for answer in answers)}


def requests(answers: Sequence[Json]) -> Json:
    found = [one for answer in answers for one in answer["requests"]]
    found.sort(key=lambda one: str(one["begun_at"]))
    return {**answers[0], "requests": found, "total": len(found)}


def tree_stats(answers: Sequence[Json]) -> Json:
    """Add up what each process holds and has counted; a conversation that several hold counts for each."""
    joined = _summed(answers)
    stores = [answer["store"] for answer in answers if "store" in answer]
    if stores:
        sizes = [store["bytes"] for store in stores if "bytes" in store]
        joined["store"] = {**_summed(stores), **({"bytes": max(sizes)} if sizes else {})}
    return joined


def _summed(answers: Sequence[Json]) -> Json:
    """Add up all numbers, and those in dictionaries by their names.

    What is true of one is true of all; everything else is taken from the first that has it.
    """
    found: Json = {}
    for answer in answers:
        for name, value in answer.items():
            known = found.get(name)
            if known is None or name in _ALIKE:
                found.setdefault(name, value)
            elif isinstance(value, dict):
                found[name] = _summed([known, value])
            elif isinstance(value, bool):
                found[name] = known or value
            elif isinstance(value, int | float):
                found[name] = known + value
    return found


_JOINS: dict[str, Join] = {
    "/workers": workers,
    "/health": health,
    "/debug/requests": requests,
    "/radix_tree/stats": tree_stats,
}
