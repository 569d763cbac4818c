"""A store whose failures are planted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal

from middleware_hub.store.errors import StoreUnreachableError

Trouble = Literal["none", "raises", "fails after", "hangs"]
ASKING = frozenset({"find", "get", "blobs", "read", "logs", "announced"})


class TroubledStore:
    """Passes everything on to another store, except while it is in trouble.

    Attributes:
        appends, reads: the trouble of both. What "fails after" was done, and nobody hears of it.
        hung: appends that hang until `go` is set; then they are done.
        asked: how often the store behind was reached, by method.
    """

    def __init__(self, store: Any) -> None:
        self.store = store
        self.appends: Trouble = "none"
        self.reads: Trouble = "none"
        self.go = asyncio.Event()
        self.hung = 0
        self.asked: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        real = getattr(self.store, name)
        if name == "append":
            return self._troubled(name, real, lambda: self.appends)
        return self._troubled(name, real, lambda: self.reads) if name in ASKING else real

    def _troubled(self, name: str, real: Any, trouble: Callable[[], Trouble]) -> Any:
        async def call(*args: Any, **more: Any) -> Any:
            self.asked[name] = self.asked.get(name, 0) + 1
            now = trouble()
            if now == "hangs":
                self.hung += 1
                await self.go.wait()
                self.hung -= 1
            elif now == "raises":
                raise StoreUnreachableError("planted")
            found = await real(*args, **more)
            if now == "fails after":
                raise StoreUnreachableError("planted, behind")
            return found

        return call

    def mend(self) -> None:
        self.appends = self.reads = "none"
        self.go.set()
        self.go = asyncio.Event()
