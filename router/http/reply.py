"""A reply on its way back, split into events in one place for all code that watches or changes it.

An ASGI application answers with one `http.response.start` and then `http.response.body` messages, which end anywhere in the
text of server-sent events. `WatchedReply` and `EditedReply` replace `send`. They distinguish a stream from a reply in
one piece and find the events; a watcher or an editor is a small object that sees heads, payloads and whole bodies.
"""

from __future__ import annotations

from typing import Protocol

from msgspec import Raw
from starlette.types import Message, Send

from router.engines.events import EventSplitter, event_data
from router.http.reply_body import is_event_stream


async def send_whole(send: Send, start: Message, body: bytes) -> None:
    """Send a reply in one piece, with the right `content-length` in place of the one in `start`."""
    headers = [pair for pair in start["headers"] if pair[0] != b"content-length"]
    headers.append((b"content-length", b"%d" % len(body)))
    await send({**start, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


class CollectedReply:
    """Keeps a reply instead of sending it.

    Attributes:
        start: the `http.response.start` message.
        body: all that has come of the body.
    """

    start: Message
    body = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.start = message
        elif message["type"] == "http.response.body":
            chunk = message.get("body", b"")
            self.body = self.body + chunk if self.body else chunk


class Watcher(Protocol):
    """Sees a reply and changes nothing."""

    def head(self, start: Message) -> None:
        """Take the `http.response.start` message."""

    def event(self, data: bytes) -> None:
        """Take the payload of one event of a stream (status 200), `[DONE]` too."""

    def end(self, body: bytes) -> None:
        """Take the end: the whole body of a reply in one piece; for a stream, the bytes after its last whole event."""


class WatchedReply:
    """Shows a reply to a watcher, each message before it is sent on. Without `send` nothing is sent on."""

    def __init__(self, watcher: Watcher, send: Send | None = None) -> None:
        self._watcher = watcher
        self._send = send
        self._events: EventSplitter | None = None
        self._pieces: list[bytes] = []

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if message["status"] == 200 and is_event_stream(message["headers"]):
                self._events = EventSplitter()
            self._watcher.head(message)
        elif message["type"] == "http.response.body":
            self._body(message.get("body", b""), last=not message.get("more_body", False))
        if self._send is not None:
            await self._send(message)

    def _body(self, chunk: bytes, *, last: bool) -> None:
        if self._events is None:
            self._pieces.append(chunk)
        else:
            for event in self._events.feed(chunk):
                data = event_data(event)
                if data is not None:
                    self._watcher.event(data)
        if last:
            self._watcher.end(b"".join(self._pieces) if self._events is None else self._events.flush())


class Editor(Protocol):
    """Changes a reply."""

    def head(self, start: Message, *, stream: bool) -> Message | None:
        """Return the head for the client, or None to decide about a reply in one piece when all of it has come.

        `stream`: events follow (status 200). Otherwise, after a head that was returned, the pieces of the body pass unchanged.
        """

    def event(self, data: bytes) -> bytes | Raw:
        """Return the payload of one event for the client: `data` itself if nothing changes."""

    async def whole(self, start: Message, body: bytes) -> tuple[Message, bytes]:
        """Return the head and the body of a reply in one piece. The adapter corrects `content-length`."""


class EditedReply:
    """Sends a reply as its editor wants it: a stream event by event, anything else in one piece.

    Other events than `data:`, and bytes after the last whole event, pass unchanged.
    """

    def __init__(self, editor: Editor, send: Send) -> None:
        self._editor = editor
        self._send = send
        self._start: Message | None = None
        self._pieces: list[bytes] = []
        self._events: EventSplitter | None = None
        self._passing = False

    def pass_on(self) -> None:
        """Pass the rest of a stream on unchanged, without looking for events in it."""
        self._passing = True

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            stream = message["status"] == 200 and is_event_stream(message["headers"])
            self._events = EventSplitter() if stream else None
            head = self._editor.head(message, stream=stream)
            if head is None:
                self._start = message
            else:
                self._passing = self._passing or not stream
                await self._send(head)
        elif self._passing or message["type"] != "http.response.body":
            await self._send(message)
        elif self._events is not None:
            await self._stream(self._events, message.get("body", b""), more=message.get("more_body", False))
        else:
            self._pieces.append(message.get("body", b""))
            if not message.get("more_body", False):
                assert self._start is not None
                start, body = await self._editor.whole(self._start, b"".join(self._pieces))
                await send_whole(self._send, start, body)

    async def _stream(self, events: EventSplitter, chunk: bytes, *, more: bool) -> None:
        out = []
        for event in events.feed(chunk):
            data = None if self._passing else event_data(event)
            shown = data if data is None else self._editor.event(data)
            out.append(event if shown is data or shown is None else b"data: %b\n\n" % bytes(shown))
        if self._passing or not more:
            out.append(events.flush())
        body = b"".join(out)
        if body or not more:
            await self._send({"type": "http.response.body", "body": body, "more_body": more})
