"""An index that follows a real worker's cache, held turn by turn against the worker's own word."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple

from router.engines.form.kv_events import KvSource
from router.kv_cache.block_hashes import content_hashes
from router.kv_cache.index import KvIndex
from router.kv_cache.subscriptions import KvSubscriptions
from tests.router.kv_cache.recount import check


class Generated(NamedTuple):
    """The ids of a prompt and of what was sampled behind it, and how many of the prompt's the worker had cached."""

    chain: list[int]
    cached: int


class Follower:
    """An index that follows the worker, and the worker's client.

    `page` is the number of ids in a block, and `generate` samples so many tokens behind a prompt.
    """

    def __init__(self, url: str, page: int, generate: Callable[[list[int], int], Awaitable[Generated]]) -> None:
        self.url = url
        self.generate = generate
        self.index = KvIndex()
        self.subscriptions = KvSubscriptions(self.index)
        self._page = page

    def cached(self, ids: list[int]) -> int:
        """Blocks of these ids in the worker's cache, by the index."""
        check(self.index)
        return self.index.overlaps(ids).get(self.url, 0)

    async def until_cached(self, ids: list[int], blocks: int) -> None:
        async with asyncio.timeout(10):
            while self.cached(ids) != blocks:  # noqa: ASYNC110 - another process tells; there is nothing to wait on
                await asyncio.sleep(0.005)

    async def until_tracked(self) -> None:
        async with asyncio.timeout(10):
            while not self.index.tracked(self.url):  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.005)

    async def turn(self, ids: list[int], count: int) -> list[int]:
        """Generate, and hold the index's word against the worker's.

        A request is never served from the cache to its last token: its logits are wanted.
        """
        expected = self.cached(ids[:-1]) * self._page
        chain, cached = await self.generate(ids, count)
        assert cached == expected
        # Sampled last, never computed upon.
        async with asyncio.timeout(10):
            while self.stored(chain[:-1]) != (len(chain) - 1) // self._page:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.005)
        return chain

    def stored(self, ids: list[int]) -> int:
        """Blocks of these ids that the worker told of, of layers with full attention: its last word on a turn."""
        indexer = self.index._indexers.get(self._page)
        return 0 if indexer is None else max(indexer.find_matches(content_hashes(ids, self._page)).values(), default=0)


@contextlib.asynccontextmanager
async def followed(
    url: str, source: KvSource, page: int, generate: Callable[[list[int], int], Awaitable[Generated]]
) -> AsyncIterator[Follower]:
    """Follow the worker at `url` for a block, from when its cache is known."""
    made = Follower(url, page, generate)
    try:
        made.subscriptions.start(url, source)
        await made.until_tracked()
        yield made
    finally:
        await made.subscriptions.close()
