"""What requests and replies share: JSON taken apart only as far as needed.

Objects are decoded into their keys and raw values, so that what is passed on is byte for byte what came, with fields taken
out or put in. No float is ever parsed and printed again on its way through.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import Raw

from router.errors import BadRequestError
from router.http.json_cost import MAX_ITEMS, check_items

decode_object = msgspec.json.Decoder(dict[str, Raw]).decode
decode_any = msgspec.json.Decoder().decode
NULL = b"null"
_LIST = re.compile(rb"\s*\[")

JSON_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding raises for bytes that are no JSON, no UTF-8, or nested without end."""


def parse_object(body: bytes | Raw, what: str = "the request body") -> dict[str, Raw]:
    """A JSON object as its keys and raw values. Raises BadRequestError with the place and the reason."""
    try:
        return decode_object(body)
    except JSON_ERRORS as error:
        raise BadRequestError(f"{what} must be a JSON object: {error}") from error


def is_null(raw: Raw | None) -> bool:
    """Whether a field is absent or null."""
    return raw is None or bytes(raw) == NULL


def typed(fields: dict[str, Raw], key: str, kind: Any, expected: str) -> Any:
    """One field, typed; None where it is absent or null. Raises BadRequestError."""
    raw = fields.get(key)
    if raw is None or is_null(raw):
        return None
    if _LIST.match(raw):
        check_items(raw, MAX_ITEMS, f"`{key}` has more items")
    return decoded(raw, key, kind, expected)


def decoded(raw: Raw, key: str, kind: Any, expected: str) -> Any:
    """A value of a field `key`, typed. Raises BadRequestError."""
    try:
        return _decoder(kind).decode(raw)
    except JSON_ERRORS as error:
        raise BadRequestError(f"`{key}` must be {expected}: {error}") from error


@lru_cache(maxsize=64)
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """Working out what a type means takes longer than most fields do."""
    return msgspec.json.Decoder(kind)
