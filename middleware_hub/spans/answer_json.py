"""Answers with a list entry for each token, as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec import Raw

Lists = dict[tuple[str, ...], bytes]
"""Long lists of request ids as JSON, each once: thousands of equal texts with thousands of samples would take gigabytes."""

_LONG: Final = 100
_PIECE: Final = 50_000
"""Entries of a list that are encoded at once."""


def encoded(answer: dict[str, Any]) -> bytes:
    """Return an answer as JSON. Long lists are encoded in pieces: one long call holds up the event loop even from a thread."""
    return msgspec.json.encode({key: _by_pieces(value) for key, value in answer.items()})


def in_pieces(answer: dict[str, Any], lists: Lists | None, more: Sequence[bytes] = ()) -> list[bytes]:
    """Return an answer as pieces of JSON, of which others that list the same replies have the last one in common.

    `more`: pieces of further fields, with a comma before each field.
    """
    names = tuple(answer["request_ids"])
    if lists is None or len(names) < _LONG:
        return [encoded(answer)[:-1], *more, b"}"] if more else [encoded(answer)]
    if names not in lists:
        lists[names] = b',"request_ids":%b}' % msgspec.json.encode(names)
    rest = {key: value for key, value in answer.items() if key != "request_ids"}
    return [encoded(rest)[:-1], *more, lists[names]]


def _by_pieces(value: Any) -> Any:
    if isinstance(value, list) and value and isinstance(value[0], dict) and "tokens" in value[0]:
        return [Raw(encoded(one)) for one in value]
    if not isinstance(value, list) or len(value) <= _PIECE:
        return value
    pieces = [msgspec.json.encode(value[at : at + _PIECE])[1:-1] for at in range(0, len(value), _PIECE)]
    return Raw(b"[%b]" % b",".join(pieces))
