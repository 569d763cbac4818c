"""The beginning of a stream, held back until it is known whether it is one."""

from __future__ import annotations

from starlette.types import Message, Send

from router.engines.sglang.attempt import renamed, was_aborted, was_refused
from router.engines.sglang.stream import EventSplitter, event_data


class Gate:
    """Holds a stream back until its first event is there, and for good if that says nothing but `aborted`.

    With a `name` the events are given that id: to the worker the generation had another one.
    """

    def __init__(self, send: Send, name: str | None, *, again: bool) -> None:
        """`again`: there is an aborted reply already, which is better than none."""
        self._send = send
        self._again = again
        self.refused = False
        self._name = name
        self._events = EventSplitter()
        self._judged = False
        self.held: list[Message] = []
        self.opened = False

    async def send(self, message: Message) -> None:
        """What the application inside calls."""
        if self.opened and self._name is None:
            await self._send(message)
            return
        if message["type"] == "http.response.start":
            kind = dict(message["headers"]).get(b"content-type", b"")
            self.refused = self._again and message["status"] != 200
            if not self.refused and (message["status"] != 200 or not kind.startswith(b"text/event-stream")):
                self._name = None
                self._judged = self.opened = True
        else:
            message = self._looked_at(message)
        self.held.append(message)
        if self.opened:
            held, self.held = self.held, []
            for kept in held:
                await self._send(kept)

    def _looked_at(self, message: Message) -> Message:
        """The message with whole events in it, each under its name."""
        if self.refused:
            return message
        events = list(self._events.feed(message.get("body", b"")))
        over = not message.get("more_body", False)
        if not self._judged and (events or over):
            # The first event may come in many pieces; a stream that ends without one was not aborted.
            self._judged = True
            first = (event_data(events[0]) or b"") if events else b""
            self.refused = self._again and was_refused(first)
            self.opened = not self.refused and not was_aborted(first)
        if over or (self.opened and self._name is None):
            events.append(self._events.flush())
        return {**message, "body": b"".join(self._named(event) for event in events)}

    def _named(self, event: bytes) -> bytes:
        data = None if self._name is None else event_data(event)
        if self._name is None or data is None or not data.startswith(b"{"):
            return event
        return b"data: " + renamed(data, self._name) + b"\n\n"
