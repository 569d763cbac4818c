"""The names by which a worker knows pictures that it has answered with: it is not sent their bytes again.

A worker may have forgotten any of them, for its own cache is full at times. It says so then, and the adapter sends the bytes.
A worker without such a cache fails in some other way. If that happens twice in a row, it is sent the bytes always.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

_MOST: Final = 1024
"""Names to remember of a worker, 150 bytes each."""
_PATIENCE: Final = 2
"""Requests in a row that a worker answers only with the bytes, though it did not say that it had forgotten a name."""


class KnownNames:
    """Names of pictures. Over the limit, the least recently used are forgotten."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._names: OrderedDict[str, None] = OrderedDict()
        self._useless = 0

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def note(self, names: Iterable[str]) -> None:
        """Remember that the worker has answered with these pictures."""
        if self._useless >= _PATIENCE:
            return
        for name in names:
            self._names[name] = None
            self._names.move_to_end(name)
        while len(self._names) > self._most:
            self._names.popitem(last=False)

    def useful(self, *, yes: bool) -> None:
        """Note whether a request in which names stood alone was answered, or only the same one with the bytes."""
        self._useless = 0 if yes else self._useless + 1
        if self._useless >= _PATIENCE:
            self._names.clear()

    def forget(self, names: Iterable[str] | None = None) -> None:
        """Forget some names; by default all, because the worker may be another process now."""
        if names is None:
            self._names.clear()
            self._useless = 0
            return
        for name in names:
            self._names.pop(name, None)
