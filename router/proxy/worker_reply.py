"""A worker's reply on its way back: all of it, or a stream of which at least the first event has come.

    begun    the head is here, and the first piece of the body
    ended    all of the body was read
    broken   a read raised
    closed   nothing more can be read; the worker is free, and whoever waits for the end of the reply was told

Whoever gets a reply closes it, however it went. A reply that is closed before its end was left by its client.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol

from msgspec import Raw
from starlette.types import Send

from router.engines.events import FRAME, EventSplitter, event_data
from router.http.disconnect import ClientConnection, DirectSend
from router.http.headers import HeaderList, reply_headers
from router.http.upstream import Headers, Take

Step = Callable[[bytes], bytes]
"""Takes the next piece of a stream, empty at its end, and returns what becomes of it."""


class ReplyState(enum.Enum):
    """How far a reply has come; see the top of this file."""

    BEGUN = "begun"
    ENDED = "ended"
    BROKEN = "broken"


_BEGUN, _ENDED, _BROKEN = ReplyState.BEGUN, ReplyState.ENDED, ReplyState.BROKEN


class Rest(Protocol):
    """The part of a reply that has not come yet."""

    async def read(self) -> bytes:
        """Return the next piece, empty at the end. Raises UpstreamBrokenError."""

    async def flow(self, take: Take) -> None:
        """Hand on pieces as they come, like `UpstreamResponse.flow`. Raises UpstreamBrokenError."""

    def close(self) -> None:
        """Free the worker. A second call has no effect."""


class Editor(Protocol):
    """Changes a reply."""

    def event(self, data: bytes) -> bytes | Raw:
        """Return the payload of one event for the client: `data` itself if nothing changes."""

    def whole(self, status: int, body: bytes) -> bytes:
        """Return the body of a reply that is no stream."""


class Watcher(Protocol):
    """Sees a reply and changes nothing."""

    def event(self, data: bytes) -> None:
        """Take the payload of one event of a stream, `[DONE]` too."""

    def whole(self, body: bytes) -> None:
        """Take the body of a reply that is no stream."""


class Holder(Protocol):
    """Holds pieces of a stream back until what they tell is true."""

    def holds(self) -> bool:
        """Return whether the next piece has to wait."""

    async def held(self, piece: bytes) -> bytes:
        """Wait, and return the piece, or more."""


class EventEditor:
    """Changes the events of a stream. Comments, and bytes after the last whole event, stay as they are."""

    def __init__(
        self, event: Callable[[bytes], bytes | Raw], alike: Callable[[bytes], bytes | None] | None = None
    ) -> None:
        """Make an editor.

        Args:
            event: takes a payload and returns it as the client sees it: the same object if nothing changes.
            alike: takes an event first, as it is sent, and returns it as the client sees it; None if `event` is to take the
                payload. It may be given something else than one event, and returns None for it.
        """
        self._event = event
        self._alike = alike
        self._events = EventSplitter()

    def __call__(self, piece: bytes) -> bytes:
        """Take the next piece of the stream, empty at its end, and return the events that are whole now."""
        alike, events = self._alike, self._events
        if alike is None:
            only = events.only(piece)
            if only is not None:
                edited = self._event(only)
                return piece if edited is only else FRAME % bytes(edited)
        elif not events.rest and (found := alike(piece)) is not None:
            return found
        out = []
        for event in events.feed(piece):
            found = None if alike is None else alike(event)
            out.append(self._edited(event) if found is None else found)
        if not piece:
            out.append(events.flush())
        return out[0] if len(out) == 1 else b"".join(out)

    def _edited(self, event: bytes) -> bytes:
        data = event_data(event)
        shown = data if data is None else self._event(data)
        return event if shown is data or shown is None else FRAME % bytes(shown)


class _Gathered:
    """Changes a reply that is no stream when all of it has come."""

    def __init__(self, whole: Step) -> None:
        self._whole = whole
        self._pieces: list[bytes] = []

    def __call__(self, piece: bytes) -> bytes:
        self._pieces.append(piece)
        return b"" if piece else self._whole(b"".join(self._pieces))


class WorkerReply:
    """See the top of this file.

    Attributes:
        status: the HTTP status.
        stream: whether it consists of events.
        body: what had come when the reply was returned; all of it if it is `complete`.
        worker, routed: the URL of the worker, and why it was chosen; empty if no worker had the request.
        complete: whether all of it has come.
        state: how far it has come.
        added: headers that the client gets besides.
        settle: awaited when it was closed, by whoever waits for its end.
        holder: holds pieces of a stream back before they are read.
    """

    def __init__(
        self,
        status: int,
        headers: Headers,
        body: bytes,
        *,
        stream: bool = False,
        worker: str = "",
        routed: str = "",
        rest: Rest | None = None,
    ) -> None:
        """`headers`: as the worker sent them. `rest`: what follows on `body`; None if nothing does."""
        self.status = status
        self.stream = stream
        self.body = body
        self.worker = worker
        self.routed = routed
        self.state = _BEGUN
        self.added: HeaderList = []
        self.settle: Callable[[], Awaitable[object]] | None = None
        self.holder: Holder | None = None
        self.complete = rest is None
        self._headers = headers
        self._rest = rest
        self._given = False
        self._held = b""  # a piece that flowed as far as `holder`
        self._refused = b""  # a piece that flowed as far as the client
        self._steps: list[Step] = []
        self._closing: list[Callable[[WorkerReply], None]] = []

    def __repr__(self) -> str:
        return f"<WorkerReply {self.status} of {self.worker or 'the router'}: {self.state.value}>"

    def headers(self) -> HeaderList:
        """Return the headers for the client."""
        if not self.worker:
            return [*self._headers, *self.added]
        found = reply_headers(self._headers, self.worker)
        found.append((b"x-router-worker", self.worker.encode("ascii")))
        found.append((b"x-router-reason", self.routed.encode("latin-1", "replace")))
        found += self.added
        return found

    def edit(self, editor: Editor) -> None:
        """Have an editor change all of it."""
        if self.stream:
            self.add_step(EventEditor(editor.event))
        elif self.complete:
            self.body = editor.whole(self.status, self.body)
        else:
            self.add_step(_Gathered(partial(editor.whole, self.status)))

    def watch(self, watcher: Watcher) -> None:
        """Have a watcher see all of it."""
        if self.stream:

            def seen(data: bytes) -> bytes:
                watcher.event(data)
                return data

            self.add_step(EventEditor(seen))
        elif self.complete:
            watcher.whole(self.body)

    def add_step(self, step: Step) -> None:
        """Have a step take each piece, behind those that are there."""
        self._steps.append(step)

    async def read(self) -> bytes:
        """Return the next piece, empty at the end. Raises UpstreamBrokenError, and what the steps raise."""
        if self._given and self.state is not _BEGUN:
            return b""
        if refused := self._refused:
            self._refused = b""
            return refused
        try:
            if held := self._held:
                assert self.holder is not None
                self._held = b""
                return await self.holder.held(held)
            while True:
                if not self._given:
                    self._given, piece = True, self.body
                    if not piece and self._rest is not None:
                        continue
                else:
                    piece = b"" if self._rest is None else await self._rest.read()
                last = not piece
                for step in self._steps:
                    piece = step(piece) if piece or not last else b""
                    if last:  # behind what the step before it had kept
                        piece += step(b"")
                if self.holder is not None and self.holder.holds():
                    piece = await self.holder.held(piece)
                if last or (self.complete and not self.stream):
                    self.state = _ENDED
                if piece or last:
                    return piece
        except Exception:
            self.state = _BROKEN
            raise

    async def flow(self, take: Take, *, refuses: bool = False) -> None:
        """Hand each piece of a stream to `take` in the call in which it comes, as long as that takes more.

        It may return at any time. `read` goes on from there, and alone tells the end. Raises as `read`, and what `take` raises.
        `refuses`: whether a piece is still to be read for which `take` returns False.
        """
        if self._rest is None or not self._given or self._held or self._refused or self.state is not _BEGUN:
            return
        fault: Exception | None = None

        def taken(piece: bytes) -> bool:
            nonlocal fault
            try:
                for step in self._steps:
                    piece = step(piece)
                if self.holder is not None and self.holder.holds():
                    self._held = piece
                    return not piece
            except Exception as error:  # noqa: BLE001 - raised below
                self.state, fault = _BROKEN, error
                return False
            try:
                if not piece or take(piece):
                    return True
                if refuses:
                    self._refused = piece
            except Exception as error:  # noqa: BLE001 - raised below
                fault = error
            return False

        try:
            await self._rest.flow(taken)
        except Exception:
            self.state = _BROKEN
            raise
        if fault is not None:
            raise fault

    async def flow_to(self, send: Send) -> None:
        """Write pieces of a stream to a client as they come, if `send` has a way for that, until one has to go as a message.

        `read` returns that one. The reply to the client has begun. Raises as `flow`.
        """
        if self.stream and isinstance(send, DirectSend):
            await self.flow(send.write, refuses=True)

    async def first_event(self) -> bytes:
        """Return the payload of the first event, which may come behind comments; empty if there is none. All stays to read."""
        events, piece = EventSplitter(), self.body
        while piece:
            for event in events.feed(piece):
                if (data := event_data(event)) is not None:
                    return data
            piece = b"" if self._rest is None else await self._rest.read()
            self.body += piece
        return b""

    async def gather(self) -> None:
        """Read it to its end, and keep what came to be read again. Raises what `read` raises."""
        pieces = []
        while piece := await self.read():
            pieces.append(piece)
        if self._rest is not None:
            self._rest.close()
        self.body, self.complete = b"".join(pieces), True
        self._rest, self._given, self._steps, self.holder = None, False, [], None

    def when_closed(self, call: Callable[[WorkerReply], None]) -> None:
        """Call this once, when it is closed: the last one that came first."""
        self._closing.append(call)

    def close(self) -> None:
        """End it. A second call has no effect."""
        if self._rest is not None:
            self._rest.close()
        while self._closing:
            self._closing.pop()(self)

    async def aclose(self) -> None:
        """End it, and wait until its end is settled, before its client goes on."""
        self.close()
        if self.settle is not None:
            await self.settle()

    async def answer(self, send: Send, client: ClientConnection) -> None:
        """Send it to its client. Raises what `read` raises."""
        headers = self.headers()
        if self.complete and not self.stream and self.body:  # without a body, the server knows what its status wants
            headers.append((b"content-length", b"%d" % len(self.body)))
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        piece = await self.read()
        if piece and self.complete and not self.stream:
            last = piece
        else:
            while piece:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                await self.flow_to(send)
                piece = await self.read()
            last = b""
        client.stop_watching()
        await send({"type": "http.response.body", "body": last, "more_body": False})
