"""Where decode workers ask a prefill worker for what it hands over."""

from __future__ import annotations

import asyncio
import contextlib

from worker.engine.engine import EmbeddedEngine
from worker.http.exchange import HttpExchange, Refused

ROOMS = "/disaggregation/rooms"
"""Where a decode worker asks a prefill worker for what it hands over. SGLang's workers have a server of its own for that."""


class RoomHandler:
    """The side of a prefill worker that decode workers ask."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine

    async def __call__(self, exchange: HttpExchange) -> None:
        asked = exchange.json_object()
        room, rank = asked.get("room"), asked.get("rank")
        rooms = self._engine.rooms
        if self._engine.role != "prefill" or not isinstance(room, int):
            raise Refused("it is no prefill worker, or there is no room")
        if rank is not None and rank != room % self._engine.ranks:
            await exchange.answer(500, {"message": f"bootstrap room {room} is not of dp_rank {rank}"})
            return
        rooms.ask(room)
        gone = asyncio.create_task(exchange.disconnected())
        over = asyncio.create_task(self._engine.progress.wait_for(lambda: self._is_over(room)))
        try:
            await asyncio.wait((gone, over), return_when=asyncio.FIRST_COMPLETED)
            leg = rooms.leg(room)
            if leg is None or leg.handover is None or not over.done():
                await exchange.answer(500, {"message": "there is nothing in this room" if leg is None else leg.failure})
                return
            leg.taken()
            await exchange.answer(200, leg.handover)
        finally:
            rooms.asked_no_more(room)
            for task in (gone, over):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(gone, over, return_exceptions=True)

    def _is_over(self, room: int) -> bool:
        leg = self._engine.rooms.leg(room)
        return leg is not None and (leg.handover is not None or leg.failure is not None)
