"""A store is closed soon, whatever other processes do with its file: else a router that is told to stop is killed for it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from middleware_hub.store.errors import StoreError
from middleware_hub.store.opening import open_store
from middleware_hub.store.sqlite.file import connect, place_of


@pytest.mark.slow
def test_closing_does_not_wait_for_a_process_that_holds_the_file(tmp_path: Path) -> None:
    """As one that was stopped in mid-write: what had been asked for waited 20 s for it, one after the other."""

    async def work() -> None:
        store = open_store(f"sqlite:{tmp_path}", durability="process", prefix="")
        await store.open("some tokenizer")
        other = connect(place_of(str(tmp_path)))
        other.execute("BEGIN IMMEDIATE")
        try:
            asked = [asyncio.ensure_future(store.trim(f"log {number}", 1)) for number in range(8)]
            await asyncio.sleep(0)
            async with asyncio.timeout(15):
                await store.close()
            for one in asked:
                with suppress(StoreError):
                    await one
        finally:
            other.close()

    asyncio.run(work())
