"""A process that appends conversations with pictures, forgets every second one, and says so, for tests that kill it.

    python -m tests.middleware_hub.store.media_appender ADDRESS NAME

It prints the digest of a picture that is to stay once the store has acknowledged the record that names it.
"""

from __future__ import annotations

import asyncio
import sys
from hashlib import sha256

from msgspec.structs import replace

from middleware_hub.store.media import MediaFile
from middleware_hub.store.opening import open_store
from middleware_hub.store.protocol import Batch
from middleware_hub.store.records import identified
from tests.middleware_hub.store.world import World


async def main(address: str, name: str) -> None:
    store = open_store(address)
    await store.open("toy")
    print("open", flush=True)

    async def talk(number: int) -> None:
        world, at = World(), 0
        while True:
            at += 1
            content = f"{name} {number} {at} ".encode() * 4_000
            digest = f"sha256:{sha256(content).hexdigest()}"
            turn = world.turn(None, f"{name} {number} asks {at}", "y" * 9, namespace=("a", "", ""), own_context=True)
            assert turn.context is not None
            context = identified(replace(turn.context, media=((0, 1, digest),)))
            reply = replace(turn.reply, parent=context.id, base=context.id, root=context.root)
            file = MediaFile("a", digest, "image/png", 1, 1, True, len(content), content)
            await store.append(Batch([context, reply], {reply.id: turn.path}, media=[file]))
            if at % 2:
                await store.forget_roots([context.root])
            else:
                print("kept", digest, flush=True)

    await asyncio.gather(*(talk(number) for number in range(3)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
