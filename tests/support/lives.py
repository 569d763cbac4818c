"""Routers over one store, in this process, which may be stopped and started again."""

from __future__ import annotations

import contextlib
from functools import lru_cache
from pathlib import Path

from middleware_hub.hub import Hub, load
from middleware_hub.store.protocol import Store
from middleware_hub.tokenizer.tokenizer import Tokenizer
from router.app import create_app
from router.config import RadixConfig, RouterConfig, SessionsConfig, StoreConfig, WorkersConfig
from tests.support.serving import serve
from tests.support.stack import Stack
from worker.models.ngram import shipped_tokenizer
from worker.worker import EmbeddedWorker


class Router:
    """One router.

    Args:
        max_tokens, session_tokens: what its tree and its sessions may hold; None for the defaults.
        folder: its tokenizer; None for the one that is shipped.
    """

    def __init__(
        self,
        worker: EmbeddedWorker,
        store: StoreConfig | None,
        max_tokens: int | None = None,
        *,
        session_tokens: int | None = None,
        folder: Path | None = None,
    ) -> None:
        self._folder = folder or shipped_tokenizer()
        self._config = RouterConfig(
            workers=WorkersConfig(urls=(worker.url,)),
            radix=RadixConfig(tokenizer_path=str(self._folder), max_tokens=max_tokens),
            store=store or StoreConfig(),
            sessions=SessionsConfig(verify_rate=0.0, max_tokens=session_tokens),
        )
        self._worker = worker
        self._entered = contextlib.ExitStack()
        self.start()

    def start(self) -> None:
        self.hub = Hub(tokenizer_of(self._folder), self._config.store)
        url = self._entered.enter_context(serve(create_app(self._config, shared={Hub: self.hub})))
        self.stack = Stack("qwen", url, [self._worker], None)  # type: ignore[arg-type]  # nothing here spells

    def stop(self) -> None:
        self._entered.close()

    def restart(self) -> None:
        self.stop()
        self.start()

    @property
    def store(self) -> Store:
        assert self.hub.store is not None
        return self.hub.store


@lru_cache(maxsize=4)
def tokenizer_of(folder: Path) -> Tokenizer:
    """Return the tokenizer of a folder, one for each process: to load it takes long."""
    return load(RadixConfig(tokenizer_path=str(folder)))
