"""The router's own routes: workers, health, metrics. Any other path goes to a worker."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.datastructures import QueryParams
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from router.engines.json import JSON_ERRORS, json_fault
from router.errors import BadRequestError, BodyTooLargeError, NotFoundError, RouterError
from router.http.bodies import read_body
from router.http.handlers import Handler, by_method
from router.http.headers import has_body
from router.http.request_state import RequestRecord, Requests, request_state
from router.http.responses import send_json
from router.peers.peers import Heard, Peers
from router.workers.admission import Admission
from router.workers.membership import FleetMembership
from router.workers.pool import WorkerPool
from router.workers.worker import Worker, WorkerRole, WorkerState, normalize_url

MAX_CONTROL_BODY_BYTES = 1024 * 1024
"""A body here names one worker. A smaller `--max-body-bytes` holds here, too."""


class _Rest(PathConvertor):
    """The rest of a path, whatever is in it. Starlette's converter ends at a newline: such a path would go to a worker."""

    regex = "(?s:.*)"


register_url_convertor("rest", _Rest())


class DrainingError(RouterError):
    """The process is about to stop."""

    status = 503
    type = "draining"


@dataclass
class Lifecycle:
    """Whether this process still takes new work."""

    draining: bool = False


class ControlRoutes:
    """The handlers. Each is a pure ASGI application; the error boundary turns what they raise into JSON."""

    def __init__(
        self,
        pool: WorkerPool,
        admission: Admission,
        registry: CollectorRegistry,
        lifecycle: Lifecycle,
        requests: Requests,
        membership: FleetMembership | None = None,
        *,
        max_body_bytes: int = MAX_CONTROL_BODY_BYTES,
    ) -> None:
        self._pool = pool
        self._max_body_bytes = min(max_body_bytes, MAX_CONTROL_BODY_BYTES)
        self._membership = membership or FleetMembership(pool, admission, Peers())
        self._registry = registry
        self._lifecycle = lifecycle
        self._requests = requests
        self.inspector: ASGIApp = _no_inspector
        """Serves all paths below /inspect. They need no key, or show nothing without one, so no worker may be asked."""

    def routes(self) -> list[Route]:
        table: dict[str, dict[str, Handler]] = {
            "/add_worker": {"POST": self.add_worker},
            "/remove_worker": {"POST": self.remove_worker},
            "/list_workers": {"GET": self.list_workers},
            "/workers": {"GET": self.get_workers, "POST": self.post_worker},
            "/workers/{key:rest}": {"GET": self.get_worker, "DELETE": self.delete_worker},
            "/routers": {"GET": self.get_routers},
            "/health": {"GET": self.health},
            "/liveness": {"GET": self.liveness},
            "/readiness": {"GET": self.readiness},
            "/metrics": {"GET": self.metrics},
            "/debug/requests": {"GET": self.in_flight},
        }
        routes = [Route(path, handler) for path, handler in by_method(table).items()]
        return [*routes, *(Route(path, _Late(self)) for path in ("/inspect", "/inspect/{rest:rest}"))]

    async def add_worker(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Register a worker. Registering it again is no error."""
        named = await self._named_worker(scope, receive)
        worker, heard = await self._membership.add(*named)
        url = named.url
        await self._changed(send, worker, heard, url)

    async def remove_worker(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send no more requests to a worker. Those in flight go on."""
        url = normalize_url((await self._named_worker(scope, receive)).url)
        worker, heard = await self._membership.remove(url)
        await self._changed(send, worker, heard, url)

    async def _changed(self, send: Send, worker: Worker, heard: Heard, url: str) -> None:
        told = {**_other_name(url, worker), **self._told(heard)}
        body = {"status": "success", "worker": _describe(worker), "urls": self._urls(), **told}
        await _reply(send, 200, body)

    def _told(self, heard: Heard) -> dict[str, object]:
        """Return what an answer says about the other routers: nothing if there can be no others."""
        return {} if self._membership.peers.kind is None else {"routers": heard.shown()}

    async def list_workers(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the URLs of all workers that are not about to leave. GET /workers adds their state."""
        await self._membership.peers.catch_up()
        await _reply(send, 200, {"urls": self._urls()})

    async def get_workers(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with all workers and their state, in the shape of SGLang's gateway."""
        await self._membership.peers.catch_up()
        workers = [_describe(worker) for worker in self._pool.list()]
        await _reply(send, 200, {"workers": workers, "total": len(workers)})

    async def post_worker(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Register a worker. SGLang's gateway answers 202 because it adds the worker later; here it is added already."""
        named = await self._named_worker(scope, receive)
        worker, heard = await self._membership.add(*named)
        url = named.url
        location = f"/workers/{worker.id}"
        reply = {
            "status": "accepted",
            "worker_id": worker.id,
            "url": worker.url,
            "location": location,
            **_other_name(url, worker),
            **self._told(heard),
        }
        await _reply(send, 202, reply, [(b"location", location.encode())])

    async def get_worker(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._membership.peers.catch_up()
        await _reply(send, 200, _describe(await self._membership.find(scope["path_params"]["key"])))

    async def delete_worker(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Remove a worker as /remove_worker does, by id or URL."""
        worker, heard = await self._membership.remove(scope["path_params"]["key"])
        reply = {"status": "accepted", "worker_id": worker.id, "url": worker.url, **self._told(heard)}
        await _reply(send, 202, reply)

    async def get_routers(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the routers that share the store and are there, this one first; without a store with this one."""
        routers = await self._membership.peers.list()
        await _reply(send, 200, {"routers": routers, "total": len(routers)})

    async def health(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer whether a generation would find a worker."""
        count = len(self._pool.routable)
        if not count:
            raise self._pool.no_worker_error()
        await _reply(send, 200, {"status": "ok", "workers": count})

    async def liveness(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _reply(send, 200, {"status": "alive"})

    async def readiness(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._lifecycle.draining:
            raise DrainingError("the router is stopping: it finishes what is in flight and takes nothing new")
        await _reply(send, 200, {"status": "ready"})

    async def metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with all metrics, those of middlewares included, as Prometheus text."""
        response = Response(generate_latest(self._registry), headers={"content-type": CONTENT_TYPE_LATEST})
        await response(scope, receive, send)

    async def in_flight(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the requests in flight, oldest first, without this one. They show no text and no key."""
        now, this = time.monotonic(), request_state(scope).record
        found = [_describe_request(record, now) for record in self._requests if record is not this]
        await _reply(send, 200, {"requests": found, "total": len(found)})

    async def _named_worker(self, scope: Scope, receive: Receive) -> NamedWorker:
        """Return the worker that a call names: in the query string, else in a JSON object."""
        query = QueryParams(scope["query_string"])
        given: dict[str, object] = dict(query)
        if (given.get("url") or given.get("worker_url")) is None and has_body(scope):
            given = await _body_of(scope, receive, self._max_body_bytes)
        named = given.get("url") or given.get("worker_url")
        if not named:
            raise BadRequestError('no worker URL: give it as ?url=http://HOST:PORT or as {"url": "http://HOST:PORT"}')
        if not isinstance(named, str):
            raise BadRequestError(f"a worker URL is a string, not {named!r}")
        return NamedWorker(named, _role(given.get("worker_type")), _port(given.get("bootstrap_port")))

    def _urls(self) -> list[str]:
        return [worker.url for worker in self._pool.list() if worker.state is not WorkerState.DRAINING]


class _Late:
    """Serves with the inspector, which is made after the routes."""

    def __init__(self, control: ControlRoutes) -> None:
        self._control = control

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._control.inspector(scope, receive, send)


async def _no_inspector(scope: Scope, receive: Receive, send: Send) -> None:
    raise NotFoundError("there is no inspector: the router runs with --inspector off, or remembers nothing")


def _other_name(url: str, worker: Worker) -> dict[str, object]:
    """Return what an answer says where a worker is registered under another URL than this."""
    same = normalize_url(url) == worker.url
    return {} if same else {"message": f"{url} is the worker {worker.url} under another name: it is registered once"}


def _describe(worker: Worker) -> dict[str, object]:
    return {
        "id": worker.id,
        "url": worker.url,
        "worker_type": worker.role.value,
        **({} if worker.bootstrap_port is None else {"bootstrap_port": worker.bootstrap_port}),
        "state": worker.state.value,
        "is_healthy": worker.routable,
        "load": worker.inflight,
        "targets": [{"rank": target.rank, "load": target.inflight} for target in worker.targets],
        "rank_mismatches": worker.rank_mismatches,
        "circuit_breaker": worker.breaker.state.value,
        "weight_version": worker.version,
        "complaint": worker.complaint,
        "warning": worker.warning,
        "kv_events": None if worker.kv_events is None else msgspec.to_builtins(worker.kv_events),
    }


def _describe_request(record: RequestRecord, now: float) -> dict[str, object]:
    return {
        "id": record.id,
        "method": record.method,
        "path": record.path,
        "tenant": record.tenant,
        "phase": record.phase.value,
        "worker": record.worker,
        "attempts": record.attempts,
        "seconds": round(now - record.begun, 3),
        "phase_seconds": round(now - record.since, 3),
        "begun_at": datetime.fromtimestamp(record.begun_at, UTC).isoformat(timespec="milliseconds"),
    }


class NamedWorker(NamedTuple):
    """The worker that a call names, and what the call says of it."""

    url: str
    role: WorkerRole | None
    bootstrap_port: int | None


def _role(given: object) -> WorkerRole | None:
    if given is None:
        return None
    roles = [role.value for role in WorkerRole]
    if given not in roles:
        raise BadRequestError(f"worker_type {given!r} is not supported: it is one of {', '.join(roles)}")
    return WorkerRole(given)


def _port(given: object) -> int | None:
    if given is None:
        return None
    port = int(given) if isinstance(given, str) and given.isdecimal() else given
    if type(port) is not int or not 0 < port < 1 << 16:
        raise BadRequestError(f"bootstrap_port must be a port, a number from 1 to 65535, not {given!r}")
    return port


async def _body_of(scope: Scope, receive: Receive, limit: int) -> dict[str, object]:
    try:
        written = await read_body(scope, receive, limit)
    except BodyTooLargeError:
        raise BodyTooLargeError(f"the body is larger than {limit} bytes: give one URL") from None
    try:
        body = msgspec.json.decode(written)
    except JSON_ERRORS as error:
        raise BadRequestError(f"the body is not JSON: {json_fault(written, error)}") from error
    if not isinstance(body, dict):
        raise BadRequestError('the body is not a JSON object like {"url": "http://HOST:PORT"}')
    return body


async def _reply(send: Send, status: int, body: object, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    await send_json(send, status, msgspec.json.encode(body), headers or ())
