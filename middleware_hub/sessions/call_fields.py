"""The parameters of a call to a session: the fields of its body, and its query."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import parse_qs

from msgspec import Raw
from starlette.types import Scope

from router.engines.form.fields import parse_object
from router.errors import BadRequestError

_SWITCH = {"": False, "0": False, "false": False, "1": True, "true": True}


def fields_of(body: bytes) -> dict[str, Raw]:
    """Return the fields of a body; an empty body has none. Raises BadRequestError."""
    return parse_object(body) if body.strip() else {}


def query_of(scope: Scope) -> dict[str, str]:
    """Return the last value of each parameter in the query."""
    return {key: values[-1] for key, values in parse_qs(scope.get("query_string", b"").decode("latin-1")).items()}


def is_on(query: Mapping[str, str], name: str) -> bool:
    """Return whether a switch of the query is on; without it, it is off. Raises BadRequestError for another word."""
    found = _SWITCH.get(query.get(name, "").lower())
    if found is None:
        raise BadRequestError(f"`{name}` must be true or false, not {query[name]!r}")
    return found
