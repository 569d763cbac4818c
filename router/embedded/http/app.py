"""The engine as an ASGI application."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from router.embedded.engine.engine import Engine
from router.embedded.engine.records import ControlRecord, Journal
from router.embedded.http.errors import Broken, Deadly, Refused
from router.embedded.http.exchange import PLAIN, Handler, HttpExchange, Receive, Scope, Send, read


class EngineApp:
    """Passes requests to two handlers, and makes their failures into replies.

    Args:
        engine: wakes its waiters after each request.
        journal: takes a record of each request that is not a generation.
        generating: the methods that generate, by path.
        generate: answers these.
        control: answers everything else.
        on_death: called with the reason when a request is one of those that end a worker, which no application can do.
    """

    def __init__(
        self,
        engine: Engine,
        journal: Journal,
        generating: Mapping[str, Sequence[str]],
        generate: Handler,
        control: Handler,
        on_death: Callable[[str], Awaitable[None]],
    ) -> None:
        self._engine = engine
        self._journal = journal
        self._generating = generating
        self._generate = generate
        self._control = control
        self._on_death = on_death

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (raw := await read(receive)) is None:
            return
        exchange = HttpExchange(scope, receive, send, raw)
        try:
            if exchange.method in self._generating.get(exchange.path, ()):
                await self._generate(exchange)
            else:
                record = ControlRecord(exchange.method, exchange.path, exchange.query, exchange.headers, raw)
                self._journal.add_request(record)
                await self._control(exchange)
        except Refused as refused:
            await exchange.answer(400, refused.body())
        except Broken:
            await exchange.answer(500, b"Internal Server Error", PLAIN)
        except Deadly as death:
            await self._on_death(str(death))
        finally:
            self._engine.changed()
