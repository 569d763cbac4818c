"""The names by which a worker knows pictures that it has answered with: it is not sent their bytes again.

A worker may have forgotten any of them, for its own cache is full at times. It says so then, and the adapter sends the bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

_MOST: Final = 1024
"""Names to remember of a worker, 150 bytes each."""


class KnownNames:
    """Names of pictures. Over the limit, the least recently used are forgotten."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._names: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def note(self, names: Iterable[str]) -> None:
        """Remember that the worker has answered with these pictures."""
        for name in names:
            self._names[name] = None
            self._names.move_to_end(name)
        while len(self._names) > self._most:
            self._names.popitem(last=False)

    def forget(self, names: Iterable[str] | None = None) -> None:
        """Forget some names; by default all, because the worker may be another process now."""
        if names is None:
            self._names.clear()
            return
        for name in names:
            self._names.pop(name, None)
