"""Make docs/openapi.json, a description of every route in OpenAPI 3.1, from the tables of the routes.

Usage: python -m scripts.make_openapi [--check]

Paths and methods come from the routes themselves, the keys that they need from `router/auth/permissions.py`, the fields of
bodies from the structs that read them, and the rest from `scripts/openapi_calls.py`, which has to have a row for each route.
`--check` changes nothing and exits with 1 if the file differs from the code.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import NODEFAULT, Raw, Struct
from prometheus_client import CollectorRegistry

from middleware_hub import routes as hub
from router.auth.permissions import Right, needed
from router.config import HealthConfig
from router.engines.table import fleet_paths
from router.generate.fleet import Fleet
from router.http.handlers import ByMethod
from router.http.request_state import Requests
from router.http.upstream import AiohttpUpstream
from router.policies import create_policy
from router.routes import ControlRoutes, Lifecycle
from router.workers.admission import Admission
from router.workers.health import HealthChecks
from router.workers.pool import WorkerPool
from router.workers.probe import Prober
from scripts.openapi_calls import CALLS, HEADERS, READS, TOLD, Call, fleet_call

Json = dict[str, Any]
PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "openapi.json"

EVERYWHERE: Final = (431, 503, 508)
"""Headers that are too large; too many connections, no worker, a router that stops; a request that came back to its sender."""

_MEANING: Final[Mapping[int, str]] = {
    400: "The request cannot be served as it is written",
    401: "A key is required, and the request has none, or a wrong one",
    403: "The key does not allow this call; or a page of another site sent it",
    404: "There is nothing of this name",
    405: "This method is not taken here",
    408: "The body, or a worker with room, did not come in time",
    409: "The state of what is asked for does not allow it",
    413: "The body, or a text in it, is too large",
    415: "The body is compressed in a way that the router does not unpack",
    429: "No room: all workers are full and the queue is, or sessions hold all that they may",
    431: "The headers are too large",
    500: "The function of `--session-match` failed",
    502: "The workers that were tried gave no reply",
    503: "No worker is available, the store cannot be asked, or the router is about to stop",
    504: "No worker gave a reply in time",
    508: "A request of this router came back to it",
}


# Routes -----------------------------------------------------------------------------------------------------------------


def operations() -> Iterator[tuple[str, str, Call]]:
    """Yield method, path and description of every route of the router and of the hub. Raises KeyError for one without a row."""
    fleet = _fleet()
    for path, methods in {**_own(), **fleet, **_tables()}.items():
        for method in methods:
            told = CALLS.get((method, path)) if path in fleet else CALLS[method, path]
            yield method, path, told or fleet_call(path)


def _pool() -> tuple[WorkerPool, AiohttpUpstream]:
    return WorkerPool(create_policy("random")), AiohttpUpstream(connect_timeout=1.0)


def _own() -> dict[str, list[str]]:
    pool, upstream = _pool()
    prober = Prober(upstream, seconds=1.0)
    admission = Admission(pool, prober, HealthChecks(pool, prober, HealthConfig()))
    routes = ControlRoutes(pool, admission, CollectorRegistry(), Lifecycle(), Requests()).routes()
    # The paths of the inspector have no methods here: the hub's table has them.
    return {
        one.path.replace("{key:rest}", "{id}"): list(one.app.handlers)
        for one in routes
        if isinstance(one.app, ByMethod)
    }


def _fleet() -> dict[str, list[str]]:
    pool, upstream = _pool()
    fleet = Fleet(pool, upstream, max_body_bytes=1, forward_authorization=False, paths=fleet_paths())
    return {one.path: list(one.app.handlers) for one in fleet.routes() if isinstance(one.app, ByMethod)}


def _tables() -> dict[str, list[str]]:
    tables = [table for name, table in vars(hub).items() if name.isupper() and isinstance(table, dict)]
    return {path: list(methods) for table in tables for path, methods in table.items()}


def is_long(path: str, name: str) -> bool:
    """Return whether a name in the braces of a path stands for more than one segment: it may have slashes in it."""
    return name in ("model", "file") or path == "/workers/{id}"  # whose id may be its URL


# One operation ----------------------------------------------------------------------------------------------------------


def _operation(method: str, path: str, call: Call, right: Right) -> Json:
    found: Json = {
        "operationId": _identifier(method, path),
        "summary": call.does,
        "tags": [_tag(path)],
        **({"security": []} if right is Right.FREE else {}),
        "parameters": [*_in_path(path), *_in_query(call), *_in_headers(call)],
    }
    if call.takes is not None:
        schema = {"$ref": f"#/components/schemas/{call.takes.__name__}"}
        found["requestBody"] = {"content": {"application/json": {"schema": schema}}, "required": not call.optional}
    found["responses"] = dict(sorted(_responses(path, call, right).items()))
    return found


def _identifier(method: str, path: str) -> str:
    return "_".join([method.lower(), *re.findall(r"\w+", path)])


def _tag(path: str) -> str:
    first = path.split("/")[1]
    for tag, firsts in {
        "Sessions": ("sessions",),
        "Texts": ("generate", "retrieve_from_text", "radix_tree", "media"),
        "Chats": ("v1", "v1beta"),
        "Groups": ("trajectories",),
        "Inspector": ("inspect",),
        "Workers": ("add_worker", "remove_worker", "list_workers", "workers", "routers"),
        "Health": ("health", "liveness", "readiness", "metrics", "debug"),
    }.items():
        if first in firsts and not path.endswith("load_lora_adapter"):
            return tag
    return "All workers"


def _in_path(path: str) -> Iterator[Json]:
    for name in re.findall(r"\{(\w+)\}", path):
        long = {"description": "May have slashes in it"} if is_long(path, name) else {}
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}, **long}


def _in_query(call: Call) -> Iterator[Json]:
    for name, kind in call.query.items():
        required = {"required": True} if name in call.needs else {}
        yield {"name": name, "in": "query", "schema": msgspec.json.schema(kind), **required}


def _in_headers(call: Call) -> Iterator[Json]:
    for name in call.headers:
        yield {"$ref": f"#/components/parameters/{name}"}


def _responses(path: str, call: Call, right: Right) -> dict[str, Json]:
    content = {kind: {"schema": {} if kind == "application/json" else {"type": "string"}} for kind in call.content}
    found: dict[str, Json] = {}
    for status in call.status if isinstance(call.status, tuple) else (call.status,):
        said = {"content": content} if status != HTTPStatus.NO_CONTENT else {}
        found[str(status)] = {"description": HTTPStatus(status).phrase, "headers": _headers(call.tells), **said}
    errors = {*EVERYWHERE, *call.errors}
    if call.takes is not None:
        errors.update(READS)
    if right is not Right.FREE:
        errors.update((400, 401, 403))  # the first for the `x-tenant` of an admin
    for status in errors:
        found[str(status)] = {"$ref": f"#/components/responses/{_shape(path)}{status}"}
    if call.workers:
        found["default"] = {"$ref": "#/components/responses/Worker"}
    return found


def _headers(names: Iterable[str]) -> Json:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in ("x-request-id", *names)}


def _shared_responses(paths: Json) -> Json:
    """Return the answers that operations of `paths` refer to: errors of each shape, and what a worker says."""
    found: Json = {
        "Worker": {
            "description": "A worker's own answer, with its status and its body",
            "headers": _headers(["x-router-worker"]),
        }
    }
    for shape in _ERRORS:
        told = {"application/json": {"schema": {"$ref": f"#/components/schemas/{shape.__name__}"}}}
        for status, meaning in _MEANING.items():
            found[f"{shape.__name__}{status}"] = {"description": meaning, "headers": _headers(()), "content": told}
    operations = [one for methods in paths.values() for one in methods.values()]
    named = {answer.get("$ref", "").rpartition("/")[2] for one in operations for answer in one["responses"].values()}
    return {name: answer for name, answer in found.items() if name in named}


def _shape(path: str) -> str:
    if "/v1/messages" in path:
        return "AnthropicError"
    return "GoogleError" if "/v1beta/" in path else "Error"


# Schemas ----------------------------------------------------------------------------------------------------------------


def _schemas(bodies: list[type[Struct]]) -> Json:
    ref = "#/components/schemas/{name}"
    _, found = msgspec.json.schema_components([*map(_plain, bodies), *_ERRORS], ref_template=ref)
    for body in bodies:
        schema = found[body.__name__]
        told = inspect.cleandoc(body.__doc__ or "")  # Python 3.13 keeps no indentation, the others do
        schema["description"] = told.partition("\n")[0]
        for names, words in _ATTRIBUTE.findall(told.partition("Attributes:\n")[2]):
            for name in names.split(", "):
                if name in schema["properties"]:
                    schema["properties"][name]["description"] = " ".join(words.split())
    return dict(sorted(found.items()))


_ATTRIBUTE: Final = re.compile(r"^ {4}([\w, ]+): (.+(?:\n {8}.+)*)", re.MULTILINE)
"""An attribute, or several, in a docstring."""
_OURS: Final = frozenset({"ignored"})
"""Fields of structs that a request does not have."""


def _plain(body: type[Struct]) -> type[Struct]:
    """Return a struct whose fields have a schema: a raw part of the JSON may be anything."""
    fields: list[Any] = []
    for field in msgspec.structs.fields(body):
        kind, default = (Any, None) if field.type is Raw else (field.type, field.default)
        if field.encode_name in _OURS:
            continue
        if default is NODEFAULT and field.default_factory is not NODEFAULT:
            default = msgspec.field(default_factory=field.default_factory)
        fields.append((field.encode_name, kind) if default is NODEFAULT else (field.encode_name, kind, default))
    strict = body.__struct_config__.forbid_unknown_fields
    return msgspec.defstruct(body.__name__, fields, forbid_unknown_fields=strict, kw_only=True)


class Fault(Struct):
    """What was wrong. `code` is the status, or a word."""

    message: str
    type: str
    code: int | str
    param: str | None = None


class Error(Struct):
    """An error of the router. Some types have further fields beside `code`. A call to all workers has their answers."""

    error: Fault


class AnthropicFault(Struct):
    """What was wrong, by Anthropic's names of types."""

    type: str
    message: str


class AnthropicError(Struct, tag_field="type", tag="error"):
    """An error in Anthropic's dialect."""

    error: AnthropicFault


class GoogleFault(Struct):
    """What was wrong, by Google's names of statuses."""

    code: int
    message: str
    status: str
    details: list[Json]


class GoogleError(Struct):
    """An error in Google's dialect."""

    error: GoogleFault


_ERRORS: Final = [Error, AnthropicError, GoogleError]


# The whole --------------------------------------------------------------------------------------------------------------


def description() -> Json:
    """Return the description of all routes."""
    paths: dict[str, Json] = {}
    bodies: dict[str, type[Struct]] = {}
    for method, path, call in operations():
        right = needed(method, path)
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, call, right)
        if call.takes is not None:
            assert bodies.setdefault(call.takes.__name__, call.takes) is call.takes, call.takes
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "tito-router",
            "version": "1",
            "description": "A router in front of SGLang or vLLM workers that keeps every sampled token for training. Any path "
            "that is not here goes to one worker unchanged. A HEAD is served wherever a GET is.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "http://127.0.0.1:30000"}],
        "security": [{}, {"bearer": []}, {"x-api-key": []}, {"x-goog-api-key": []}],
        "paths": dict(sorted(paths.items())),
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                "x-goog-api-key": {"type": "apiKey", "in": "header", "name": "x-goog-api-key"},
            },
            "parameters": {
                name: {"name": name, "in": "header", "description": words, "schema": msgspec.json.schema(kind)}
                for name, (kind, words) in HEADERS.items()
            },
            "headers": {
                name: {"description": words, "schema": msgspec.json.schema(kind)}
                for name, (kind, words) in TOLD.items()
            },
            "responses": _shared_responses(paths),
            "schemas": _schemas(list(bodies.values())),
        },
    }


def made() -> bytes:
    """Return the file."""
    return msgspec.json.format(msgspec.json.encode(description()), indent=1) + b"\n"


def main() -> None:
    options = argparse.ArgumentParser(description="Make docs/openapi.json.")
    options.add_argument("--check", action="store_true", help="change nothing; exit with 1 if the file is out of date")
    check = options.parse_args().check
    fresh = made()
    if check:
        same = PAGE.exists() and PAGE.read_bytes() == fresh
        sys.exit(None if same else "docs/openapi.json differs from the code: run `make openapi`")
    PAGE.write_bytes(fresh)


if __name__ == "__main__":
    main()
