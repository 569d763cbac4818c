"""The fields of `POST /sessions` with which a session completes its requests.

What no turn could use is refused when the session is made: an agent that is given a session cannot mend it.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, Final

from msgspec import Raw

from middleware_hub.chat.keys import NAMED
from middleware_hub.dialects.fields import ADAPTER, INTEGER, RAW_OBJECT, STRING, STRINGS, Fields, Kind
from middleware_hub.dialects.sampling import LARGEST, finish, read_sampling, sampling_names, schema_text
from middleware_hub.dialects.template_variables import read_kwargs
from middleware_hub.sessions.request_defaults import RequestDefaults
from router.errors import BadRequestError

_SCHEMA: Kind[str | dict[str, Any]] = Kind(str | dict[str, Any], "a JSON schema, as an object or its text")
_LIMITS: Final = ("max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of one limit; the last one that is there counts."""
_BUDGET: Final = "response_budget"
_INTERVAL: Final = "stream_interval"
_BESIDE: Final = frozenset(
    {"lora_path", "extra_key", "priority", "chat_template_kwargs", "match", "model", "pin", "ttl_s"}
)
"""Fields of a session that clients look for in `sampling_params`."""


def read_defaults(fields: Fields) -> tuple[RequestDefaults, int | None]:
    """Take the defaults of a session's requests, and the response budget. Raises BadRequestError."""
    given = fields.take("sampling_params", RAW_OBJECT) or {}
    sampling, inside = _in_sampling(given)
    interval = fields.take_within(_INTERVAL, 1, LARGEST)
    if interval is not None:
        sampling[_INTERVAL] = interval
    budget = fields.take(_BUDGET, INTEGER)
    budget = inside if budget is None else budget
    if budget is not None and budget < 1:
        raise BadRequestError(f"`{_BUDGET}` must be at least 1 token, not {budget}", param=_BUDGET)
    pinned = fields.take("pin", STRINGS)
    defaults = RequestDefaults(
        sampling_params=sampling,
        pin=_pinned(pinned or (), given, sampling),
        model=fields.take("model", STRING) or None,
        lora_path=fields.take("lora_path", ADAPTER) or None,
        extra_key=fields.take("extra_key", STRING),
        priority=fields.take("priority", INTEGER),
        chat_template_kwargs=read_kwargs(fields),
        match=_match(fields),
    )
    return defaults, budget


def _match(fields: Fields) -> str | None:
    wanted = fields.take("match", STRING)
    if wanted is not None and wanted not in NAMED:
        named = ", ".join(f'"{name}"' for name in NAMED)
        raise BadRequestError(
            f"`match` must be one of {named}, not {wanted[:40]!r}: a function of your own is given with --session-match",
            param="match",
        )
    return wanted


def refuse_others(fields: Fields, known: Iterable[str]) -> None:
    """Raise BadRequestError if a field is left that a session does not have."""
    for name in fields.left():
        raise BadRequestError(f"a session has no field `{name}`{_meant(name, known)}", param=name)


def _in_sampling(given: dict[str, Raw]) -> tuple[dict[str, Any], int | None]:
    """Return `sampling_params` with SGLang's names, and the response budget among them. Raises BadRequestError."""
    try:
        return _read(given)
    except BadRequestError as error:
        param = error.details.get("param")
        where = "sampling_params" if param is None else f"sampling_params.{param}"
        raise BadRequestError(f"`sampling_params`: {error}", param=where) from error


def _read(given: dict[str, Raw]) -> tuple[dict[str, Any], int | None]:
    fields = Fields(given)
    for name in fields.present(_BESIDE):
        raise BadRequestError(f"`{name}` is a field of the session: give it beside `sampling_params`", param=name)
    if fields.take("n", INTEGER) not in (None, 1):
        raise BadRequestError("`n` must be 1: ask for more in a request", param="n")
    limit = None
    for name in _LIMITS:
        found = fields.take_within(name, 1, LARGEST)
        limit = limit if found is None else found
    budget = fields.take(_BUDGET, INTEGER)
    sampling = read_sampling(fields)
    for name in ("json_schema", "structural_tag"):
        schema = fields.take(name, _SCHEMA)
        if schema:
            sampling[name] = schema if isinstance(schema, str) else schema_text(name, schema)
    interval = fields.take_within(_INTERVAL, 1, LARGEST)
    if interval is not None:
        sampling[_INTERVAL] = interval
    known = (*sampling_names(), *_LIMITS, "json_schema", "structural_tag", _INTERVAL, _BUDGET)
    for name in fields.left():
        raise BadRequestError(f"there is no parameter `{name}`{_meant(name, known)}", param=name)
    return finish(sampling, limit), budget


def _pinned(names: Iterable[str], given: dict[str, Raw], sampling: dict[str, Any]) -> tuple[str, ...]:
    """Return the names in `sampling` that are pinned; clients may use the names that they gave."""
    found: dict[str, None] = {}
    for name in names:
        own = [name] if name in sampling else []
        if not own and name in given:
            own = list(_read({name: given[name]})[0])
            if name == _BUDGET:
                continue  # no turn can set it
        if not own:
            raise BadRequestError(
                f"`pin` names {name!r}, which is not among the `sampling_params`: give its value there", param="pin"
            )
        found.update(dict.fromkeys(own))
    return tuple(found)


def _meant(name: str, known: Iterable[str]) -> str:
    close = get_close_matches(name, list(known), 1)
    return f": do you mean `{close[0]}`?" if close else ""
