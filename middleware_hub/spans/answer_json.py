"""Answers with a list entry for each token, as JSON."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import Raw

_PIECE: Final = 50_000
"""Entries of a list that are encoded at once."""


def encoded(answer: dict[str, Any]) -> bytes:
    """Return an answer as JSON. Long lists are encoded in pieces: one long call holds up the event loop even from a thread."""
    return msgspec.json.encode({key: _by_pieces(value) for key, value in answer.items()})


def _by_pieces(value: Any) -> Any:
    if isinstance(value, list) and value and isinstance(value[0], dict) and "tokens" in value[0]:
        return [Raw(encoded(one)) for one in value]
    if not isinstance(value, list) or len(value) <= _PIECE:
        return value
    pieces = [msgspec.json.encode(value[at : at + _PIECE])[1:-1] for at in range(0, len(value), _PIECE)]
    return Raw(b"[%b]" % b",".join(pieces))
