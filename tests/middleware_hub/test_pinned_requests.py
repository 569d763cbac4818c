"""A request keeps what it continues for as long as it needs it, and no longer, however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from middleware_hub.hub import Hub
from middleware_hub.radix_tree_middleware import RadixTreeMiddleware
from router.config import RouterConfig
from router.http.upstream import UpstreamBrokenError
from router.plugins import MiddlewareContext
from tests.fuzz.parts import pins
from tests.middleware_hub.sessions.in_process import RADIX, Client, Engine, tokenizer
from tests.support.asgi_backend import AsgiBackend


async def answered(client: Client, engine: Engine) -> None:
    assert (await client.answer())[0] == 200


async def refused(client: Client, engine: Engine) -> None:
    assert (await client.answer())[0] == 400


async def broken(client: Client, engine: Engine) -> None:
    with pytest.raises(UpstreamBrokenError):
        await client.answer()


async def left(client: Client, engine: Engine) -> None:
    await engine.arrived()
    await client.leave()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("how", "ends"),
    [({}, answered), ({"status": 400}, refused), ({"breaks": 1}, broken), ({"hold": 1}, left)],
)
def test_a_request_that_is_over_holds_nothing(
    how: dict[str, Any], ends: Callable[[Client, Engine], Awaitable[None]], stream: bool
) -> None:
    if ends is broken and not stream:
        pytest.skip("a whole reply that breaks off is tried elsewhere")

    async def work() -> None:
        engine, hub = Engine(), Hub(tokenizer())
        context = MiddlewareContext(
            RouterConfig(radix=RADIX), CollectorRegistry(), shared={Hub: hub}, backend=AsgiBackend(engine)
        )
        app = RadixTreeMiddleware(engine, context)
        tree = app.tree

        def ask(text: str) -> Client:
            sampling = {"max_new_tokens": 8}
            return Client(app, "POST", "/generate", {"text": text, "stream": stream, "sampling_params": sampling}, {})

        engine.says("Four.", finish="length")
        await answered(ask("2 + 2 = "), engine)
        engine.says("Five, six and seven.", **how)
        client = ask("2 + 2 = Four. 2 + 3 = ")
        if ends is left:
            await engine.arrived()
            if stream:
                await client.heard(b"data: ")
            assert pins(tree) == 1, "it is in flight"
        await ends(client, engine)
        assert pins(tree) == 0
        sampled = ends is answered or (stream and ends is not refused)
        assert tree.stats.generations == 1 + sampled, "what was streamed is remembered"

    asyncio.run(work())
