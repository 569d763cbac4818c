"""The parts that the middlewares of one router share: tokenizer, clock of weight versions, judge, tree and store."""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Final, Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from middleware_hub.media.family import Family
from middleware_hub.media.family_files import load_family
from middleware_hub.media.media import Media
from middleware_hub.media.shelf import Shelf
from middleware_hub.media.stock import Stock
from middleware_hub.media.worker_check import decoding_check, sight_check
from middleware_hub.persistence.memory import Memory
from middleware_hub.persistence.saving import Saving
from middleware_hub.persistence.store_channel import StoreChannel
from middleware_hub.persistence.weight_versions import VersionLog
from middleware_hub.radix.judge import RECORDED, Judge, Verdict
from middleware_hub.radix.tree import RadixTree
from middleware_hub.spans.versions import VersionClock
from middleware_hub.store.errors import StoreError
from middleware_hub.store.guarded import GuardedStore
from middleware_hub.store.opening import open_store, patience
from middleware_hub.store.protocol import Store
from middleware_hub.store.records import Serials
from middleware_hub.store.redis.address import shown
from middleware_hub.store.spool.folder import SpoolFolder, identity
from middleware_hub.templates.source import joined
from middleware_hub.tokenizer.tokenizer import Tokenizer
from middleware_hub.tokenizer.worker_check import tokenizer_check
from middleware_hub.trajectories.groups import Groups
from middleware_hub.trajectories.samples import SampleTrajectories
from router.config import RouterConfig
from router.config.media import MediaConfig
from router.config.radix import RadixConfig
from router.config.store import StoreConfig
from router.engines.form.limits import PromptLimits
from router.engines.form.worker_request import WorkerRequest
from router.engines.json_cost import LIGHT
from router.errors import BadRequestError
from router.http.offload import offload
from router.plugins import MiddlewareContext
from router.proxy.generate_call import Backend, GenerateCall
from router.proxy.worker_reply import WorkerReply

logger = logging.getLogger(__name__)

_COUNT_SECONDS: Final = 0.2
"""How long the start waits until the conversations of the store are counted."""


class Recorded(Protocol):
    """Generates, and records the replies; see `RadixTreeMiddleware.generate`."""

    async def __call__(self, call: GenerateCall, *, verdicts: list[Verdict] | None, unheard: bool) -> WorkerReply: ...


class Hub:
    """The hub of one application. Its tokenizer may be shared with other applications.

    Raises BadRequestError for an impossible `--store`.

    Attributes:
        store: outlives this process, and is open while requests are served (`live`); None without `--store`.
        saving: appends to it, or to a file that waits for it; None without `--store`.
        channel: the channel to the other routers that have the same store.
        serials: the order of recording.
        versions: writes the order of weight versions into the store; None without `--store`.
        shelf: the images that are held in memory.
        stock: these, and those of the store.
        tree: the tree that remembers texts; None if no middleware has opened one.
        memory: fills that tree from the store, and writes down what it records; None without one of the two.
        groups: the groups of replies and sessions.
        media: what is known of pictures; None if the model reads none.
        sessions: lays out sessions; None if none are served.
        backend: generates from ids.
        recorded: generates from texts as well, and remembers them; None if no middleware does.
    """

    backend: Backend

    def __init__(
        self, tokenizer: Tokenizer, store: StoreConfig | None = None, media: MediaConfig | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.clock = VersionClock()
        self.serials = Serials()
        self.store: GuardedStore | None = None
        self.saving: Saving | None = None
        self.channel: StoreChannel | None = None
        self.versions: VersionLog | None = None
        self._store_config = store
        if store is not None and store.url is not None:
            opened = open_store(store.url, durability=store.durability, prefix=store.prefix)
            self.store = GuardedStore(opened, patience=patience(store.url))
            self.saving = Saving(self.store, refuse=store.failure == "refuse")
            self.channel = StoreChannel(self.store, store.url.partition(":")[0].partition("+")[0])
            self.versions = VersionLog(self.store, self.clock, self.judge.workers)
        self.shelf = Shelf((media or MediaConfig()).budget)
        self.stock = Stock(self.shelf, store=self.store)
        self.media: Media | None = None
        self.tree: RadixTree | None = None
        self.memory: Memory | None = None
        self.groups = Groups(self.saving)
        self.sessions: SampleTrajectories | None = None
        self.recorded: Recorded | None = None
        self._living = False
        self._counting: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, context: MiddlewareContext) -> Hub:
        """Return the hub of this application. The first call makes it.

        Raises BadRequestError without a usable `--tokenizer-path`.
        """
        found, config = context.shared.get(cls), context.config
        if not isinstance(found, Hub):
            found = context.shared[cls] = cls(load(config.radix), config.store, config.media)
            found.see(media_of(config, found.stock))
        if context.backend is not None:
            found.backend = context.backend
        if context.version is not None:
            context.version.reported = lambda: found.clock.current
            context.version.shown = found.judge.workers.latest
        if found.media is not None:
            found.media.engine = context.engine
        if not context.worker_checks:
            context.worker_checks.append(tokenizer_check(found.tokenizer, str(context.config.radix.tokenizer_path)))
            if found.media is not None:
                context.worker_checks.append(decoding_check(found.media))
            else:
                context.worker_checks.append(sight_check(str(context.config.radix.tokenizer_path)))
        if context.peers is not None and found.channel is not None:
            context.peers.join(found.channel)
            context.peers.presence.settings["--add-special-tokens"] = str(found.tokenizer.bos)
        return found

    async def generate(
        self, call: GenerateCall, *, verdicts: list[Verdict] | None = None, unheard: bool = False
    ) -> WorkerReply:
        """Return the reply to a call, recorded if a middleware remembers texts; see `Recorded`."""
        if self.recorded is not None:
            return await self.recorded(call, verdicts=verdicts, unheard=unheard)
        if call.request is None:
            call.request = await offload(len(call.body) > LIGHT, WorkerRequest.parse, call.body)
        return await self.backend.generate(call)

    async def live(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a lifespan with `app`: the store is open from before its startup until everything else has shut down.

        Every middleware that uses the hub calls this; the outermost one opens and closes.

        Raises:
            StoreError: the store cannot be opened, or belongs to another tokenizer. Nothing has started.
        """
        if self.store is None or self._living:
            await app(scope, receive, send)
            return

        async def closing(message: Message) -> None:
            # Before the server is told that all has shut down, because it may exit then.
            if message["type"].startswith("lifespan.shutdown."):
                await self._close()
            await send(message)

        self._living = True
        try:
            await self._open(self.store)
            await app(scope, receive, closing)
        finally:
            self._living = False
            await self._close()

    async def _open(self, store: GuardedStore) -> None:
        fingerprint, config = self.tokenizer.fingerprint, self._store_config
        await store.open(fingerprint)
        if self.saving is not None and config is not None and config.url is not None:
            logger.info("the store is %s", shown(config.url))
            name = identity(config.url, config.prefix)
            self._counting = asyncio.create_task(_count(store, name))
            await asyncio.wait((self._counting,), timeout=_COUNT_SECONDS)
            folder = SpoolFolder(config.spool, name, fingerprint, config.spool_max_bytes)
            await self.saving.open(folder, self._another)
            # It may have much to read, and nothing waits for it.
            threading.Thread(target=folder.warn_of_others, name="spool-others", daemon=True).start()
        if self.versions is not None:
            await self.versions.read()
        if self.memory is not None:
            await self.memory.open()

    async def _another(self) -> Store:
        """Make a second object for the store, and open it. Raises StoreError."""
        config = self._store_config
        assert config is not None
        assert config.url is not None
        store = open_store(config.url, durability=config.durability, prefix=config.prefix)
        await store.open(self.tokenizer.fingerprint)
        return store

    async def _close(self) -> None:
        """Write everything that waits, and close the store. A second call has no effect."""
        if self._counting is not None:
            self._counting.cancel()
        if self.memory is not None:
            await self.memory.close()
        if self.saving is not None:
            await self.saving.close()
        if self.store is not None:
            await self.store.close()

    def see(self, media: Media | None) -> None:
        """Know how the model sees, before anything is served.

        A placeholder that the tokenizer spells otherwise is another model's: then images are not recorded.
        """
        if media is not None:
            family, spell = media.family, self.tokenizer.vocabulary.spell
            if not 0 <= family.placeholder_id < self.tokenizer.vocabulary.size or (
                spell([family.placeholder_id]) != family.placeholder
            ):
                logger.warning(
                    "images are not recorded: the tokenizer does not spell the token %d of config.json as %s",
                    family.placeholder_id,
                    family.placeholder,
                )
                media = None
            else:
                media.spell = spell
        self.media = media
        if self.saving is not None:  # asked once, not for each batch
            self.saving.beside = None if media is None else self.stock.beside

    @cached_property
    def judge(self) -> Judge:
        """The judge of all replies: what it learns of one worker's weights counts for every middleware."""
        return Judge(self.tokenizer.vocabulary, self.clock)

    def open_tree(self, config: RadixConfig) -> RadixTree:
        """Make the tree that remembers texts, for the middleware that serves it and for every middleware that reads it."""
        self.tree = RadixTree(
            self.tokenizer.vocabulary,
            max_tokens=config.token_budget,
            keep_versions=config.keep_versions,
            unretrieved_versions=config.unretrieved_versions,
            clock=self.clock,
            stored=self.store is not None,
            shelf=self.shelf,
        )
        return self.tree

    def chat_template(self, path: str | None) -> str | None:
        """Return the template in a file (`--chat-template`), or the tokenizer's own, or None. Raises BadRequestError."""
        if path is not None:
            try:
                return Path(path).read_text("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise BadRequestError(f"--chat-template {path}: {error}") from error
        found = self.tokenizer.chat_template
        return joined(found) if isinstance(found, dict) else found


async def _count(store: Store, name: str) -> None:
    """Log how many conversations there are: a misspelt address is that of another store, which is empty."""
    with suppress(StoreError):
        roots = (await store.stats()).roots
        logger.info("conversations in %s: %d%s", name, roots, "" if roots else " (it is empty)")


def media_of(config: RouterConfig, stock: Stock) -> Media | None:
    """Return what is known of pictures; None if the model of `--tokenizer-path` reads none, or reads them in unknown ways.

    Raises BadRequestError for files that cannot be read.
    """
    family = load_family(str(config.radix.tokenizer_path))
    if not isinstance(family, Family):
        if family is not None:
            logger.warning("images are not recorded: %s", family.reason)
        return None
    found = config.media
    return Media(
        family,
        stock,
        max_image_bytes=found.max_image_bytes,
        max_request_bytes=found.max_request_bytes,
        ban_placeholders=found.ban_placeholders,
    )


def load(config: RadixConfig) -> Tokenizer:
    """Return the tokenizer as configured. Raises BadRequestError."""
    if config.tokenizer_path is None:
        raise BadRequestError("--tokenizer-path is missing: give the model's folder or hub id (or --middleware none)")
    return Tokenizer.load(
        config.tokenizer_path,
        trust_remote_code=config.trust_remote_code,
        add_special_tokens=config.add_special_tokens,
        encodes_by=config.tokenizer_backend,
        limits=PromptLimits(tokens=config.max_text_tokens),
    )


def unrecorded(send: Send, reason: str) -> Send:
    """Return a `send` for a request that is passed on unchanged: its reply gains a header that says why it is not recorded."""

    async def send_with_reason(message: Message) -> None:
        if message["type"] == "http.response.start":
            others = [pair for pair in message["headers"] if pair[0] != RECORDED]
            extra = (RECORDED, f"no; {reason}".encode("latin-1", "replace"))
            message = {**message, "headers": [*others, extra]}
        await send(message)

    return send_with_reason
