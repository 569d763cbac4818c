"""A worker's streamed reply, put together from the messages in which it comes, and what it means where it is no reply."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import Message

from middleware_hub.chat import refusals
from router.engines.sglang import EventSplitter, Reply, StreamedReply, event_data
from router.engines.sglang.stream import DONE
from router.errors import RouterError, UpstreamError


class WorkerStream:
    """Takes ASGI messages.

    Args:
        on_start: told of the head of a reply that is none of an error.
        on_event: told of each event that adds to the reply.
    """

    def __init__(self, on_start: Callable[[Message], None], on_event: Callable[[StreamedReply], None]) -> None:
        self.streamed = StreamedReply(added=[])
        self._on_start = on_start
        self._on_event = on_event
        self._events = EventSplitter()
        self._status = 0
        self._refused: list[bytes] = []
        self._error: RouterError | None = None
        """What came as an event, where the stream's own status is 200."""

    async def take(self, message: Message) -> None:
        """The next message."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            if self._status == 200:
                self._on_start(message)
        elif self._status != 200:
            self._refused.append(message.get("body", b""))
        else:
            for event in self._events.feed(message.get("body", b"")):
                data = event_data(event)
                if data is not None and (data.startswith(b"{") or data == DONE):
                    self._feed(data)

    def _feed(self, data: bytes) -> None:
        if self._error is not None:
            return
        try:
            refusals.feed(self.streamed, data)
        except RouterError as error:
            self._error = error
        else:
            if data != DONE:
                self._on_event(self.streamed)

    def reply(self) -> Reply:
        """The whole reply, when all messages have come. Raises RouterError: what the worker said instead, or left out."""
        if self._status != 200:
            raise refusals.refusal(self._status, b"".join(self._refused))
        if self._error is not None:
            raise self._error
        reply = self.streamed.reply()
        if reply is None or not self.streamed.done:
            raise UpstreamError("the worker's stream ended before its end")
        return reply
