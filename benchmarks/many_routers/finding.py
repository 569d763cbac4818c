"""How long a look-up takes, by what else is in the store: `python -m benchmarks.many_routers.finding`.

All conversations begin with one system prompt of 4,000 characters. A router continues one that it knows; another has seen
nothing, and asks for the same one; a third asks for a text of 100,000 characters that begins with the system prompt. Only
ratios of one run count.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.test_store import Talk, fill, text
from middleware_hub.store.opening import open_store
from middleware_hub.store.paths import TextPath
from middleware_hub.store.protocol import Query, Store
from tests.middleware_hub.store.world import NS, Turn
from tests.support.redis_server import redis_server

SIZES = (10, 1_000, 100_000)
SYSTEM_TOKENS = 1_000
LONG = 100_000
ROUNDS = 200


async def measured(what: Callable[[], Awaitable[Any]]) -> float:
    """Return the median time of some calls, in microseconds."""
    found = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        await what()
        found.append(time.perf_counter() - begun)
    return 1e6 * statistics.median(found)


async def grown(address: str, sizes: tuple[int, ...]) -> list[dict[str, float]]:
    """Return the times of each kind of look-up, at each size of one store."""
    store = open_store(address)
    await store.open("bench")
    talk, dice = Talk(), random.Random(1)
    system = text(talk.random, SYSTEM_TOKENS)
    kept: list[Turn] = []
    there = 0

    def more(count: int) -> Iterator[Turn]:
        for _ in range(count):
            turn = talk.next(None, dice.randrange(5, 100), dice.randrange(5, 50), start=system)
            if len(kept) < 10:
                kept.append(turn)
            yield turn

    found = []
    for size in sizes:
        await fill(store, more(size - there))
        there = size
        found.append(await looked_up(store, kept[5], system, talk))
        found[-1]["bytes a turn"] = (await store.stats()).bytes / size
    await store.close()
    return found


async def looked_up(store: Store, turn: Turn, system: str, talk: Talk) -> dict[str, float]:
    """Return the times of each kind of look-up, in microseconds."""
    state, known = turn.path.state(len(turn.text)), {record.id for record in turn.records}
    asked = turn.text + text(talk.random, 100)
    long = (system + text(talk.random, LONG // 4))[:LONG]

    async def hit() -> None:
        await store.find(Query(TextPath(NS, asked, state), len(turn.text), known))

    async def new() -> None:
        found = await store.find(Query(TextPath(NS, asked)))
        assert turn.reply.id in {record.id for record in found.records}

    async def unseen() -> None:
        await store.find(Query(TextPath(NS, long)))

    return {
        "known here": await measured(hit),
        "new here": await measured(new),
        "100,000 characters": await measured(unseen),
    }


def main() -> None:
    """Measure both stores and print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.many_routers.finding", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    sizes = tuple(parser.parse_args().sizes)
    with tempfile.TemporaryDirectory() as folder, redis_server(Path(folder) / "redis") as redis:
        for name, address in (("sqlite", f"sqlite:{folder}/store/"), ("redis", redis.address)):
            for size, times in zip(sizes, asyncio.run(grown(address, sizes)), strict=True):
                row = "  ".join(f"{what} {value:8.0f}" for what, value in times.items())
                print(f"{name:6} {size:>7,} conversations, us: {row}", flush=True)


if __name__ == "__main__":
    main()
