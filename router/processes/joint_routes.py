"""The routes that answer for all processes, whichever of them is asked.

This layer stands inside the check of keys: a caller that may see one process may see all. A question to another process does
not pass through its layer, and does not count as a request there.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.errors import RouterError
from router.http.request_record import Caller, RequestRecord
from router.http.request_state import first_state, with_state
from router.http.responses import send_json
from router.processes.joint_answers import Join, Json, join_for
from router.processes.joint_metrics import families_of
from router.processes.messages import Family, QueryResult

_VERSIONS = {"asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "scheme": "http"}


class Answers(Protocol):
    """What a process can report about itself."""

    def families(self) -> list[Family]:
        """Return the metrics of the process."""

    async def look(self, path: str, query: bytes) -> tuple[int, bytes]:
        """Return the status and body of its own answer to a GET."""


class OtherProcesses(Protocol):
    """The way to the other processes; `parent_link` implements it.

    Attributes:
        number: of this process.
        instance: the mark of the probes of all of them.
    """

    number: int
    instance: bytes

    def answer_with(self, answers: Answers) -> None:
        """Let others see this process."""

    async def scrape(self) -> bytes | None:
        """Return the metrics of all processes as Prometheus text; None if the parent does not answer."""

    async def look(self, path: str, query: bytes) -> list[QueryResult]:
        """Return what the other processes answer to a GET; those that hang are left out."""


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
        return families_of(self._registry)

    async def look(self, path: str, query: bytes) -> tuple[int, bytes]:
        """Answer another process. What it may see was decided there."""
        record = RequestRecord("", "GET", path)
        scope: Scope = {
            **{"type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "root_path": ""},
            **{"query_string": query, "headers": [], "client": None, "server": None, **_VERSIONS},
        }
        scope["state"] = first_state(scope, record)
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
