"""A process that appends turns and says so, for tests that kill it or let several of them share a store.

    python -m tests.middleware_hub.store.appender ADDRESS NAME TURNS

It prints the id of each reply in hex once the store acknowledged it, and for every third turn an event.
"""

from __future__ import annotations

import asyncio
import sys

from middleware_hub.store.opening import open_store
from middleware_hub.store.protocol import Batch
from middleware_hub.store.records import Event
from tests.middleware_hub.store.world import Turn, World


async def main(address: str, name: str, turns: int) -> None:
    store = open_store(address)
    await store.open("toy")
    print("open", flush=True)

    async def talk(number: int) -> None:
        world = World()
        line: Turn | None = None
        for at in range(turns):
            line = world.turn(line, f"{name} {number} asks {at} " * 9, f"{name} is told {at} " * 9)
            events = [Event("shared", "turn", f"{name} {number} {at}".encode())]
            await store.append(Batch(line.records, {line.reply.id: line.path}, events=events))
            print(line.reply.id.hex(), number, at, flush=True)

    await asyncio.gather(*(talk(number) for number in range(4)))
    await store.close()
    print("done", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
