"""Reading JSON only as far as needed.

Objects are decoded into their keys and raw values, so what is passed on is byte for byte what came, except for fields that are
taken out or put in. No float is parsed and printed again on its way through.
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
_NESTED = re.compile(rb"\s*\[\s*\[")

JSON_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding raises for bytes that are not JSON, not UTF-8, or nested too deeply."""


def parse_object(body: bytes | Raw, what: str = "the request body") -> dict[str, Raw]:
    """Return the keys and raw values of a JSON object. Raise BadRequestError with the place and the reason."""
    try:
        return decode_object(body)
    except JSON_ERRORS as error:
        raise BadRequestError(f"{what} must be a JSON object: {error}") from error


def is_null(raw: Raw | None) -> bool:
    """Whether a field is absent or null."""
    return raw is None or bytes(raw) == NULL


def is_list(raw: Raw | bytes | None) -> bool:
    """Whether a value looks like a list."""
    return raw is not None and _LIST.match(raw) is not None


def is_nested(raw: Raw | bytes | None) -> bool:
    """Whether a value looks like a list whose first item is a list."""
    return raw is not None and _NESTED.match(raw) is not None


def typed(fields: dict[str, Raw], key: str, kind: Any, expected: str) -> Any:
    """Return a field as a value of this type; None if it is absent or null. Raise BadRequestError."""
    raw = fields.get(key)
    if raw is None or is_null(raw):
        return None
    if is_list(raw):
        check_items(raw, MAX_ITEMS, f"`{key}` has more items")
    return decoded(raw, key, kind, expected)


def decoded(raw: Raw, key: str, kind: Any, expected: str) -> Any:
    """Return the value of the field `key` as this type. Raise BadRequestError."""
    try:
        return _decoder(kind).decode(raw)
    except JSON_ERRORS as error:
        raise BadRequestError(f"`{key}` must be {expected}: {error}") from error


@lru_cache(maxsize=64)
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """Return a cached decoder: making one takes longer than decoding most fields."""
    return msgspec.json.Decoder(kind)
