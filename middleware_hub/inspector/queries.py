"""The parameters of the inspector's calls, each within its limits."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any
from urllib.parse import parse_qsl, unquote

import msgspec
from starlette.types import Scope

from router.engines.form.limits import PromptLimits
from router.engines.json import JSON_ERRORS, json_fault
from router.errors import BadRequestError

MOST_TEXT = 10_000
"""The most characters of a text to search for."""
MOST_IDS = 1_000
"""The most ids of a sequence to search for."""
MOST_NAME = 1_024
_MOST_QUERY = 64 * 1024
_MOST_ID = 2**31 - 1


class QueryParameters:
    """The query of one call. Each method raises BadRequestError with the parameter that is wrong."""

    def __init__(self, scope: Scope, known: Collection[str]) -> None:
        raw: bytes = scope.get("query_string", b"")
        if len(raw) > _MOST_QUERY:
            raise BadRequestError(f"the query is longer than {_MOST_QUERY} bytes")
        pairs = parse_qsl(raw.decode("latin-1"), keep_blank_values=True, errors="replace")
        self._values = dict(pairs)
        unknown = sorted(self._values.keys() - set(known))
        if unknown:
            raise BadRequestError(
                f"there is no parameter {unknown[0][:80]!r} here, but: {', '.join(sorted(known)) or 'none'}"
            )
        twice = next((name for name in self._values if sum(one == name for one, _ in pairs) > 1), None)
        if twice is not None:
            raise BadRequestError(f"`{twice}` is given twice")

    def text(self, name: str, most: int = MOST_NAME) -> str | None:
        """Return a text; None if it is not given, or empty."""
        value = self._values.get(name)
        if value is not None and len(value) > most:
            raise BadRequestError(f"`{name}` has more than {most} characters")
        return value or None

    def exactly(self, name: str) -> str | None:
        """Return a text that may be empty; None if it is not given."""
        self.text(name)
        return self._values.get(name)

    def required(self, name: str) -> str:
        value = self.text(name)
        if value is None:
            raise BadRequestError(f"`{name}` is missing")
        return value

    def number(self, name: str, default: int, low: int, high: int) -> int:
        value = self._values.get(name, "")
        if not value:
            return default
        try:
            number = int(value) if len(value) < 20 else low - 1
        except ValueError:
            number = low - 1
        if not low <= number <= high:
            raise BadRequestError(f"`{name}` must be a whole number, {low} to {high}, not {value[:40]!r}")
        return number

    def real(self, name: str) -> float | None:
        value = self._values.get(name, "")
        if not value:
            return None
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise BadRequestError(f"`{name}` must be a number, not {value[:40]!r}")
        return number

    def choice(self, name: str, choices: Collection[str]) -> str | None:
        value = self._values.get(name, "")
        if value and value not in choices:
            raise BadRequestError(f"`{name}` must be one of {', '.join(choices)}, not {value[:40]!r}")
        return value or None

    def ids(self, name: str) -> list[int] | None:
        """Return token ids, separated by commas; None if there are none."""
        value = self._values.get(name, "").strip().strip("[]")
        if not value:
            return None
        parts = value.split(",")
        if len(parts) > MOST_IDS:
            raise BadRequestError(f"`{name}` has more than {MOST_IDS} ids")
        found = []
        for part in parts:
            if not part.strip().isascii() or not part.strip().isdigit() or len(part.strip()) > 10:
                raise BadRequestError(f"`{name}` must be token ids, separated by commas, not {part[:40]!r}")
            found.append(int(part))
            if found[-1] > _MOST_ID:
                raise BadRequestError(f"`{name}`: {part[:40]} is no token id")
        return found


class ExplainRequest(msgspec.Struct):
    """The body of `/inspect/api/explain`. `image_data`: the images of the text's placeholders, as in a retrieval."""

    text: str
    image_data: list[str] = []
    namespace: str = ""
    adapter: str = ""


def explain_request(body: bytes, limits: PromptLimits) -> ExplainRequest:
    """Read a body. Raises BadRequestError, TextTooLongError."""
    try:
        found = msgspec.json.decode(body, type=ExplainRequest)
    except JSON_ERRORS as error:
        raise BadRequestError(
            f"the body must be {{'text': a string, 'image_data': a list of strings}}: {json_fault(body, error)}"
        ) from error
    if not found.text:
        raise BadRequestError("`text` is empty")
    limits.check_text(found.text)
    return found


def path_segments(scope: Scope, prefix: str) -> list[str]:
    """Return the parts of a path after a prefix. Each is decoded by itself, because ids may have slashes."""
    raw: Any = scope.get("raw_path")
    path = scope["path"] if raw is None else raw.decode("latin-1").partition("?")[0]
    return [unquote(part) for part in path[len(prefix) :].split("/") if part]
