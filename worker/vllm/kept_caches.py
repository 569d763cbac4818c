"""Caches of prompts that a vLLM worker keeps for another one, as its NIXL connector does.

A request with `do_remote_decode` keeps the cache of its prompt, and its reply says where it is. A request with that in its
`kv_transfer_params` reads it, which frees it. What nobody reads is freed when its lease ends.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

from worker.http.exchange import HttpExchange
from worker.http.peer import ask

READ = "/kv_transfer/read"
"""Where another worker reads a cache. vLLM's workers have a side channel for that."""


class KeptCaches:
    """The caches that a worker keeps for others, each with the time when its lease ends. Nothing moves here."""

    def __init__(self, *, on: bool, seconds: float) -> None:
        """`on`: whether the worker has a connector. `seconds`: the length of a lease."""
        self._on = on
        self._seconds = seconds
        self._kept: dict[str, float] = {}
        self._engine_id = uuid.uuid4().hex

    def __len__(self) -> int:
        now = time.monotonic()
        self._kept = {name: end for name, end in self._kept.items() if end > now}
        return len(self._kept)

    def forget(self) -> None:
        """Free all of them, as the death of a process does."""
        self._kept.clear()

    def keep(self, name: str, wanted: Mapping[str, Any] | None, exchange: HttpExchange) -> dict[str, Any] | None:
        """Return how another worker finds the cache of this request, if it is to keep one."""
        if not self._on or not (wanted or {}).get("do_remote_decode"):
            return None
        self._kept[name] = time.monotonic() + self._seconds
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1, 2, 3]],
            "remote_engine_id": self._engine_id,
            "remote_request_id": name,
            "remote_host": exchange.server[0],
            "remote_port": exchange.server[1],
            "tp_size": 1,
        }

    async def read(self, wanted: Mapping[str, Any] | None) -> None:
        """Read the cache that a request names, if it names one. Raises PeerError."""
        if self._on and wanted and wanted.get("do_remote_prefill"):
            asked = {"remote_request_id": wanted.get("remote_request_id")}
            await ask(str(wanted.get("remote_host")), int(wanted.get("remote_port") or 0), READ, asked, 5.0)

    async def given(self, exchange: HttpExchange) -> None:
        """Answer another worker that reads a cache, and free it."""
        if not len(self) or self._kept.pop(str(exchange.json_object().get("remote_request_id")), None) is None:
            await exchange.answer(404, {"detail": "it is not kept, or not any more"})
            return
        await exchange.answer(200, {})
