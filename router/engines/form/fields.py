"""Fields of a client's JSON object, read with errors that name the field."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec
from msgspec import Raw

from router.engines.json import JSON_ERRORS, MAX_ITEMS, NULL, decode_object, is_list, json_fault
from router.errors import BadRequestError, BodyTooLargeError


def parse_object(body: bytes | Raw, what: str = "the request body") -> dict[str, Raw]:
    """Return the keys and raw values of a JSON object. Raise BadRequestError with the place and the reason."""
    try:
        return decode_object(body)
    except JSON_ERRORS as error:
        raise BadRequestError(f"{what} must be a JSON object: {json_fault(body, error)}") from error


def typed(fields: dict[str, Raw], key: str, kind: Any, expected: str) -> Any:
    """Return a field as a value of this type; None if it is absent or null. Raise BadRequestError."""
    raw = fields.get(key)
    if raw is None or raw == NULL:
        return None
    if len(memoryview(raw)) > MAX_ITEMS and is_list(raw):
        check_items(raw, MAX_ITEMS, f"`{key}` has more items")
    return decoded(raw, key, kind, expected)


def decoded(raw: Raw, key: str, kind: Any, expected: str) -> Any:
    """Return the value of the field `key` as this type. Raise BadRequestError."""
    try:
        return _decoder(kind).decode(raw)
    except JSON_ERRORS as error:
        raise BadRequestError(f"`{key}` must be {expected}: {json_fault(raw, error)}") from error


def check_items(raw: Raw, most: int, what: str, flag: str = "") -> None:
    """Raise BodyTooLargeError for a list of more than `most` items, none of which holds a comma."""
    if len(memoryview(raw)) > 2 * most and bytes(raw).count(b",") >= most:
        raise BodyTooLargeError(f"{what} than {most}" + (f" ({flag})" if flag else ""))


@lru_cache(maxsize=64)
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """Return a cached decoder: making one takes longer than decoding most fields."""
    return msgspec.json.Decoder(kind)
