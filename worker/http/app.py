"""The engine as an ASGI application."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from worker.engine.engine import Engine
from worker.engine.records import ControlRecord, Journal
from worker.http.errors import OutOfRange, Refused
from worker.http.exchange import Handler, HttpExchange, Receive, Scope, Send, read


class EngineApp:
    """Passes requests to two handlers, and makes their failures into replies.

    Args:
        engine: wakes its waiters after each request.
        journal: counts the requests to generate, and takes a record of each other one.
        generating: the methods that generate, by path.
        generate: answers these.
        control: answers everything else.
    """

    def __init__(
        self,
        engine: Engine,
        journal: Journal,
        generating: Mapping[str, Sequence[str]],
        generate: Handler,
        control: Handler,
    ) -> None:
        self._engine = engine
        self._journal = journal
        self._generating = generating
        self._generate = generate
        self._control = control

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (raw := await read(receive)) is None:
            return
        exchange = HttpExchange(scope, receive, send, raw)
        try:
            if exchange.method in self._generating.get(exchange.path, ()):
                self._journal.received += 1
                await self._generate(exchange)
            else:
                record = ControlRecord(exchange.method, exchange.path, exchange.query, exchange.headers, raw)
                self._journal.add_request(record)
                await self._control(exchange)
        except Refused as refused:
            if isinstance(refused, OutOfRange):
                self._journal.add_out_of_range(str(refused))
            await exchange.answer(400, refused.body())
        finally:
            self._engine.changed()
