"""Which adapter a request's `model` names, as the chat endpoint of the workers' engine reads it.

`/v1/models` lists the served model and, with that as their `parent`, the adapters that are loaded.

    SGLang   `BASE:ADAPTER` (`_parse_model_parameter` in `sglang/srt/entrypoints/openai/serving_base.py`, 0.5.23); its adapters
             are listed, too, and a listed name alone names one here
    vLLM     the adapter's name as it is listed (`vllm/entrypoints/openai/models/serving.py`, 0.32)

A worker is asked when it becomes healthy. It is asked again for each name that is not listed, because adapters are loaded while
it runs, perhaps by a call to another router. The same name is not asked for again for a while, because agents send any name.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import Final

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from middleware_hub.hub import Hub
from router.engines.engine import EngineCall
from router.engines.json import JSON_ERRORS
from router.errors import RouterError, UpstreamError
from router.http.request_state import request_state
from router.http.upstream import UpstreamBrokenError
from router.proxy.worker_reply import WorkerReply
from router.workers.worker import WorkerCheck

logger = logging.getLogger(__name__)

_PATH: Final = "/v1/models"
_AGAIN_SECONDS: Final = 5.0
"""The time between two questions for one name that is not listed."""
_FAILED_SECONDS: Final = 1.0
"""The same if no worker answered."""
_MOST_NAMES: Final = 1000
"""Names whose last question is remembered."""
_PATIENCE_SECONDS: Final = 1.0
_VLLM: Final = "vllm"


class _Card(msgspec.Struct):
    id: str
    parent: str | None = None
    owned_by: str | None = None


class _Listing(msgspec.Struct):
    data: list[_Card]


_decode = msgspec.json.Decoder(_Listing).decode


class ServedModels:
    """See the top of this file; the backend of the hub asks a worker."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._bases: set[str] = set()
        self._adapters: set[str] = set()
        self._vllm = self._sglang = False
        self._unlisted: dict[int, float] = {}  # by the hash of a name: when it is asked for again
        self._loaded = -math.inf
        self._asking: asyncio.Task[None] | None = None
        self._begun = self._done = 0  # questions
        self._last = -math.inf  # when the last one was sent
        self._answers = False  # to it
        self.check = WorkerCheck(EngineCall("GET", _PATH), self._learn)

    def must_ask(self, *models: str | None) -> bool:
        """Whether `ask` may change the result of `adapter_of` for one of these names."""
        now = time.monotonic()
        for model in models:
            again = self._unlisted.get(hash(model), now)
            if model and again <= now and self._is_new(model):
                return True
        return False

    def _is_new(self, model: str) -> bool:
        return not self._bases or (model not in self._bases and self.adapter_of(model) is None)

    def adapter_of(self, model: str) -> str | None:
        """Return the name of the adapter that `model` names; None if it names none."""
        if model in self._bases:
            return None
        if model in self._adapters:
            return model
        if ":" not in model or (self._vllm and not self._sglang):
            return None
        base = max((one for one in self._bases if model.startswith(f"{one}:")), key=len, default=None)
        adapter = model.split(":", 1)[1] if base is None else model[len(base) + 1 :]
        return adapter.strip() or None

    def _learn(self, listing: bytes) -> None:
        """Note the models and adapters that a worker lists. There is nothing to warn of."""
        try:
            found = _decode(listing).data
        except JSON_ERRORS:
            return
        for card in found:
            (self._bases if card.parent is None else self._adapters).add(card.id)
            self._vllm = self._vllm or card.owned_by == _VLLM
            self._sglang = self._sglang or card.owned_by != _VLLM

    async def loading(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a call that loads an adapter: a worker is asked again for names that are not known."""
        try:
            await app(scope, receive, send)
        finally:
            self._loaded = time.monotonic()
            self._unlisted.clear()

    async def ask(self, scope: Scope, *models: str | None) -> None:
        """Ask a worker what it serves, for the client whose request `scope` is, which names these models.

        Requests that come meanwhile wait together for the next question: the present one may be older than an adapter.
        """
        wanted = self._begun + 1
        while self._done < wanted:
            if self._asking is None or self._asking.done():  # to await one that is done would not let the loop go on
                self._asking = asyncio.create_task(self._answered(scope))
            await asyncio.shield(self._asking)
        if self._last <= self._loaded:
            return
        if len(self._unlisted) > _MOST_NAMES:
            self._unlisted.clear()
        pause = _AGAIN_SECONDS if self._answers else min(_FAILED_SECONDS, _AGAIN_SECONDS)
        self._unlisted |= {hash(model): self._last + pause for model in models if model and self._is_new(model)}

    async def listing(self, scope: Scope) -> bytes:
        """Return what a worker lists. Raises RouterError."""
        try:
            reply = await self._reply(scope)
        except (UpstreamBrokenError, TimeoutError) as error:
            raise UpstreamError(f"no worker says which models it serves: {error}") from error
        if reply.status != 200:
            raise UpstreamError(f"the worker does not say which models it serves: it answered {reply.status}")
        return bytes(reply.body)

    async def _answered(self, scope: Scope) -> None:
        self._begun += 1
        self._last, self._answers = time.monotonic(), False
        try:
            reply = await self._reply(scope)
            if reply.status == 200:
                self._answers = True
                self._learn(reply.body)
        except (RouterError, UpstreamBrokenError, TimeoutError) as error:
            logger.info("no worker says which models it serves: %s", error)
        finally:
            self._done = self._begun

    async def _reply(self, scope: Scope) -> WorkerReply:
        headers = [pair for pair in scope["headers"] if pair[0] == b"authorization"]
        async with asyncio.timeout(_PATIENCE_SECONDS):
            reply = await self._hub.backend.get(_PATH, headers, request_state(scope).caller)
            try:
                await reply.gather()
            finally:
                reply.close()
        return reply
