"""Many rows in one step.

Each step of a statement releases Python's lock and has to get it back, which takes up to 5 ms beside a busy event loop. So
rows go into SQLite, and ids come out of it, by statements for 1, 2, 4, ... rows at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, Final, NamedTuple

import apsw
import msgspec

_MOST: Final = 256
_EXACT: Final = 16
"""Up to this many rows have a statement for exactly their number."""

THERE: Final = "EXISTS (SELECT 1 FROM roots WHERE roots.root = r.root)"
"""The condition that a row `r` of `records` is not about to be forgotten (see `forgetting`)."""

Row = tuple[Any, ...]


class Located(NamedTuple):
    """The place of a record in the file."""

    n: int
    root: int


def padded(values: Sequence[Any], most: int = _MOST) -> Iterator[list[Any]]:
    """Yield the values in lists whose length is a power of two, filled with None."""
    for at in range(0, len(values), most):
        part = list(values[at : at + most])
        yield part + [None] * ((1 << (len(part) - 1).bit_length()) - len(part))


def marks(count: int) -> str:
    return ",".join("?" * count)


def insert(
    connection: apsw.Connection, into: str, rows: Sequence[Row], *, verb: str = "INSERT", then: str = ""
) -> None:
    """Insert rows by `{verb} INTO {into} VALUES ... {then}`, in as few steps as possible."""
    at, left = 0, len(rows)
    while left:
        size = left if left <= _EXACT else min(_MOST, 1 << (left.bit_length() - 1))
        some = rows[at : at + size]
        connection.execute(_insertion(verb, into, len(some[0]), size, then), list(chain.from_iterable(some)))
        at += size
        left -= size


@lru_cache(256)
def _insertion(verb: str, into: str, columns: int, rows: int, then: str) -> str:
    return f"{verb} INTO {into} VALUES {','.join([f'({marks(columns)})'] * rows)} {then}"


_locations = msgspec.json.Decoder(list[tuple[str, int, int]])


def locate(connection: apsw.Connection, ids: Iterable[bytes]) -> dict[bytes, Located]:
    """Return the places of records, in one step."""
    found: dict[bytes, Located] = {}
    for some in padded(list(ids)):
        sql = (
            "SELECT json_group_array(json_array(hex(id), n, root)) FROM records r "
            f"WHERE id IN ({marks(len(some))}) AND {THERE}"
        )
        rows = connection.execute(sql, some).get
        found.update({bytes.fromhex(i): Located(n, root) for i, n, root in _locations.decode(rows)})
    return found
