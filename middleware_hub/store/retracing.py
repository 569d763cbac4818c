"""The places of records, computed from what is stored: to check them, and to remove them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from middleware_hub.store.paths import BLOCK, STEP, PathState, Place, TextPath
from middleware_hub.store.records import SpanRecord, places_of

_MOST_KEPT: Final = 50_000


class _End(NamedTuple):
    """The end of a record's whole text."""

    state: PathState | None
    rest: str
    """The text after the block end of `state`."""
    length: int
    tokens: int


class Retracer:
    """Computes the paths of records, base by base, and keeps the ends of the last ones.

    `load` returns a record by its id, or None if it is missing or cannot be read.
    """

    def __init__(self, load: Callable[[bytes], SpanRecord | None]) -> None:
        self._load = load
        self._ends: dict[bytes, _End] = {}

    def tokens(self, record: bytes) -> int | None:
        """Return how many tokens a record has; None if it cannot be read."""
        found = self._end(record)
        return None if found is None else found.tokens

    def length(self, record: bytes) -> int | None:
        """Return how many characters its whole text has; None if it cannot be read."""
        found = self._end(record)
        return None if found is None else found.length

    def places(self, record: SpanRecord) -> list[Place] | None:
        """Return where a record has to be entered; None if its links cannot be read."""
        path = self._path(record)
        if path is None:
            return None
        return places_of(record, path)

    def _path(self, record: SpanRecord) -> TextPath | None:
        state: PathState | None = None
        before, base, text = "", record.base, record.text
        if record.left_from is not None and base is not None and base != record.line:
            context = self._load(base)  # the path has to be known from its beginning
            if context is None:
                return None
            base, text = context.base, context.text + text
        if base is not None:
            end = self._end(base)
            if end is None or end.length != record.text_end - len(text):
                return None
            state = end.state
            before = "\0" * (0 if state is None else BLOCK * state.blocks) + end.rest
        path = TextPath(record.namespace, before + text, state)
        whole = BLOCK * (path.last // STEP * STEP)
        while len(self._ends) >= _MOST_KEPT:
            del self._ends[next(iter(self._ends))]
        self._ends[record.id] = _End(path.state(whole), path.text[whole:], record.text_end, record.count)
        return path

    def _end(self, record: bytes) -> _End | None:
        chain: list[SpanRecord] = []
        wanted: bytes | None = record
        while wanted is not None and wanted not in self._ends:
            found = self._load(wanted)
            if found is None:
                return None
            chain.append(found)
            wanted = found.base
        for link in reversed(chain):
            if self._path(link) is None:
                return None
        return self._ends.get(record)
