"""Reading JSON only as far as needed.

Objects are decoded into their keys and raw values, so what is passed on is byte for byte what came, except for fields that are
taken out or put in. No float is parsed and printed again on its way through.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Raw

decode_object = msgspec.json.Decoder(dict[str, Raw]).decode
decode_any = msgspec.json.Decoder().decode
NULL = Raw(b"null")

MAX_ITEMS = 500_000
"""Commas. Lists of token ids have more; they have a limit of their own and are parsed one by one."""

_LIST = re.compile(rb"\s*\[")
_NESTED = re.compile(rb"\s*\[\s*\[")

JSON_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding raises for bytes that are not JSON, not UTF-8, or nested too deeply."""


def is_null(raw: Raw | None) -> bool:
    """Return whether a field is absent or null."""
    return raw is None or raw == NULL


def is_list(raw: Raw | bytes | None) -> bool:
    """Return whether a value looks like a list."""
    return raw is not None and _LIST.match(raw) is not None


def is_nested(raw: Raw | bytes | None) -> bool:
    """Return whether a value looks like a list whose first item is a list."""
    return raw is not None and _NESTED.match(raw) is not None
