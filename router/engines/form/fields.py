"""Fields of a client's JSON object, read with errors that name the field."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec
from msgspec import Raw

from router.engines.form.limits import PromptLimits
from router.engines.json import JSON_ERRORS, MAX_ITEMS, NULL, decode_object, is_list, is_nested, is_null, json_fault
from router.engines.json_cost import check_weight
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
    """Raise BodyTooLargeError for a list of more than `most` items. No item may hold a comma."""
    if len(memoryview(raw)) > 2 * most and bytes(raw).count(b",") >= most:
        raise BodyTooLargeError(f"{what} than {most}" + (f" ({flag})" if flag else ""))


@lru_cache(maxsize=64)
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """Return a cached decoder: making one takes longer than decoding most fields."""
    return msgspec.json.Decoder(kind)


# Prompts. Those of a list are decoded one by one: a large batch at once would block the event loop. -----------------------

_TEXTS = "a string, or a list of strings"
_IDS = "a list of token ids, or a list of such lists"


def read_texts(fields: dict[str, Raw], key: str, limits: PromptLimits) -> tuple[list[str] | None, bool]:
    """Return the texts of a field that is a string or a list of strings, and whether it is a list; None if it is absent.

    Raises BadRequestError, TextTooLongError.
    """
    raw = fields.get(key)
    if raw is None or raw == NULL:
        return None, False
    if not is_list(raw):
        return [_text(raw, key, limits)], False
    check_weight(bytes(raw))
    return [_text(one, key, limits) for one in decoded(raw, key, list[Raw], _TEXTS)], True


def read_ids(fields: dict[str, Raw], key: str, limits: PromptLimits) -> tuple[list[list[int]] | None, bool]:
    """Return the prompts of a field that is a list of ids or a list of such lists, and whether it is the latter.

    They are None if the field is absent. Raises BadRequestError, BodyTooLargeError.
    """
    raw = fields.get(key)
    if raw is None or is_null(raw):
        return None, False
    if not is_nested(raw):
        return [_ids(raw, key, limits)], False
    limits.check_replies(bytes(raw).count(b"[") - 1)
    return [_ids(one, key, limits) for one in decoded(raw, key, list[Raw], _IDS)], True


def _text(raw: Raw, key: str, limits: PromptLimits) -> str:
    long = len(memoryview(raw)) > limits.characters  # no text has more characters than its JSON has bytes
    if long:
        limits.check_raw_text(raw)
    text: str = decoded(raw, key, str, _TEXTS)
    if long:
        limits.check_text(text)
    return text


def _ids(raw: Raw, key: str, limits: PromptLimits) -> list[int]:
    check_items(raw, limits.tokens, f"`{key}` has a prompt of more tokens", "--max-text-tokens")
    ids: list[int] = decoded(raw, key, list[int], _IDS)
    return ids
