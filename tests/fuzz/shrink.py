"""Smaller requests that may do the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec
from msgspec import Raw

from tests.fuzz.case import Case


def smaller(case: Case) -> Iterator[Case]:
    """A request with one thing less, for each thing that can be left out of it."""
    for at in range(len(case.headers)):
        yield replace(case, headers=case.headers[:at] + case.headers[at + 1 :])
    path, _, query = case.target.partition(b"?")
    if query:
        yield replace(case, target=path)
    for flag in ("chunked", "leaves"):
        if getattr(case, flag):
            yield replace(case, **{flag: False})
    for body in _bodies(case.body):
        yield replace(case, body=body)


def _bodies(body: bytes, depth: int = 0) -> Iterator[bytes]:
    """JSON with a key less, somewhere near its top."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, Raw])
    except (ValueError, RecursionError):
        return
    for key, value in fields.items():
        yield msgspec.json.encode({name: other for name, other in fields.items() if name != key})
        if depth < 2:
            for inner in _bodies(bytes(value), depth + 1):
                yield msgspec.json.encode({**fields, key: Raw(inner)})
