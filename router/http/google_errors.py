"""Errors in the form of Google's APIs: a status has a name, and details have types (https://cloud.google.com/apis/design/errors)."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from router.errors import RouterError

_STATUSES: Final = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    405: "UNIMPLEMENTED",
    408: "DEADLINE_EXCEEDED",
    409: "FAILED_PRECONDITION",
    413: "INVALID_ARGUMENT",
    415: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    500: "INTERNAL",
    501: "UNIMPLEMENTED",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
_TYPES: Final = "type.googleapis.com/google.rpc"
_DOMAIN: Final = "tito-router"


def google_error(error: RouterError, message: str | None = None) -> dict[str, Any]:
    """Return `{"error": {"code", "message", "status", "details"}}`.

    Among the details, `ErrorInfo` has what other dialects have beside the message: `code`, else the error's type, as `reason`,
    and the rest as `metadata`. Google's clients read how long to wait in `RetryInfo`, and not in a header.

    Args:
        message: replaces the error's own.
    """
    told = {name: _text(value) for name, value in error.details.items() if value is not None}
    reason = told.pop("code", error.type)
    details = [{"@type": f"{_TYPES}.ErrorInfo", "reason": reason, "domain": _DOMAIN, "metadata": told}]
    for name, value in error.headers:
        if name.lower() == "retry-after" and value.isdigit():
            details.append({"@type": f"{_TYPES}.RetryInfo", "retryDelay": f"{value}s"})
    status = _STATUSES.get(error.status, "UNKNOWN")
    inner = {"code": error.status, "message": message or error.message, "status": status, "details": details}
    return {"error": inner}


def _text(value: object) -> str:
    """Return a detail as metadata has it, which has nothing but texts: JSON, if it is none."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
