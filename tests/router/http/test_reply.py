"""A reply is taken apart in one way, wherever its bytes are cut, and however it ends."""

from __future__ import annotations

import asyncio
import contextlib
from itertools import pairwise

import pytest
from starlette.types import Message

from router.http.reply import EditedReply, WatchedReply
from router.http.reply_body import is_event_stream

EVENTS = [b'{"text": "one"}', '{"text": "zwölf"}'.encode(), b"[DONE]"]
STREAM = b": a comment\n\n" + b"".join(b"data: %b\n\n" % data for data in EVENTS) + b"a rest"
WHOLE = b'{"text": "all of it"}'
SSE = (b"content-type", b"text/event-stream; charset=utf-8")


def reply(body: bytes, *cuts: int, status: int = 200, stream: bool = True) -> list[Message]:
    """The messages of a reply, its body cut at these places."""
    places = [0, *cuts, len(body)]
    headers = [SSE] if stream else [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    messages: list[Message] = [{"type": "http.response.start", "status": status, "headers": headers}]
    for begin, end in pairwise(places):
        messages.append({"type": "http.response.body", "body": body[begin:end], "more_body": end < len(body)})
    return messages


class Client:
    """Notes what it is sent; breaks off after `most` messages."""

    def __init__(self, most: int = 1000) -> None:
        self.messages: list[Message] = []
        self.most = most

    async def send(self, message: Message) -> None:
        if len(self.messages) >= self.most:
            raise OSError("the client is gone")
        self.messages.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)


class Notes:
    """A watcher and an editor: notes all, and writes in capital letters unless `changes` says no."""

    def __init__(self, *, changes: bool = True, waits: bool = True) -> None:
        self.changes = changes
        self.waits = waits
        self.heads: list[Message] = []
        self.events: list[bytes] = []
        self.ends: list[bytes] = []

    def head(self, start: Message, *, stream: bool = True) -> Message | None:
        self.heads.append(start)
        return start if stream or not self.waits else None

    def event(self, data: bytes) -> bytes:
        self.events.append(data)
        return data.upper() if self.changes else data

    async def whole(self, start: Message, body: bytes) -> tuple[Message, bytes]:
        self.ends.append(body)
        return start, body.upper() + b"!"


class Watching:
    """The same without a say in it."""

    def __init__(self) -> None:
        self.notes = Notes()
        self.rest: list[bytes] = []

    def head(self, start: Message) -> None:
        self.notes.head(start)

    def event(self, data: bytes) -> None:
        self.notes.event(data)

    def end(self, body: bytes) -> None:
        self.rest.append(body)


async def play(send: EditedReply | WatchedReply, messages: list[Message]) -> None:
    for message in messages:
        await send.send(message)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([SSE], True),
        ([(b"Content-Type", b"text/event-stream")], True),
        ([], False),
        ([(b"content-type", b"application/json"), (b"x", b"text/event-stream")], False),
    ],
)
def test_a_stream_is_known_by_its_content_type(headers: list[tuple[bytes, bytes]], expected: bool) -> None:
    assert is_event_stream(headers) is expected


@pytest.mark.parametrize("cut", range(1, len(STREAM)))
def test_a_stream_cut_at_every_byte(cut: int) -> None:
    """Events are whole for the editor, for the watcher, and for the client."""
    edited, watched, to, through = Notes(), Watching(), Client(), Client()

    async def main() -> None:
        await play(EditedReply(edited, to.send), reply(STREAM, cut))
        await play(WatchedReply(watched, through.send), reply(STREAM, cut))

    asyncio.run(main())
    assert edited.events == watched.notes.events == EVENTS
    assert to.body == b": a comment\n\n" + b"".join(b"data: %b\n\n" % data.upper() for data in EVENTS) + b"a rest"
    assert through.messages == reply(STREAM, cut)
    assert watched.rest == [b"a rest"]
    assert [message["more_body"] for message in to.messages[1:]][-1] is False


def test_a_stream_of_single_bytes_goes_on_event_by_event() -> None:
    """Nothing is sent before an event is whole, and then at once."""
    editor, client = Notes(changes=False), Client()
    asyncio.run(play(EditedReply(editor, client.send), reply(STREAM, *range(1, len(STREAM)))))
    assert client.body == STREAM
    assert [message["body"] for message in client.messages[2:-1]] == [b"data: %b\n\n" % data for data in EVENTS]


def test_a_stream_may_pass_from_some_event_on() -> None:
    class First(Notes):
        def event(self, data: bytes) -> bytes:
            adapter.pass_on()
            return super().event(data)

    editor, client = First(), Client()
    adapter = EditedReply(editor, client.send)
    asyncio.run(play(adapter, reply(STREAM, 5, 40, 50)))
    assert editor.events == EVENTS[:1]
    assert client.body == STREAM.replace(EVENTS[0], EVENTS[0].upper())


@pytest.mark.parametrize(("status", "stream"), [(200, False), (400, False), (503, True)])
def test_what_is_no_stream_is_edited_whole(status: int, stream: bool) -> None:
    """Also an error with the content type of a stream; its length is put right."""
    editor, watcher, client = Notes(), Watching(), Client()

    async def main() -> None:
        await play(EditedReply(editor, client.send), reply(WHOLE, 3, 9, status=status, stream=stream))
        await play(WatchedReply(watcher), reply(WHOLE, 3, 9, status=status, stream=stream))

    asyncio.run(main())
    assert editor.ends == watcher.rest == [WHOLE]
    assert editor.events == watcher.notes.events == []
    assert [message["type"] for message in client.messages] == ["http.response.start", "http.response.body"]
    assert client.body == WHOLE.upper() + b"!"
    lengths = [value for name, value in client.messages[0]["headers"] if name == b"content-length"]
    assert lengths == [b"%d" % len(client.body)]


def test_an_editor_may_let_a_body_pass_in_pieces() -> None:
    editor, client = Notes(waits=False), Client()
    asyncio.run(play(EditedReply(editor, client.send), reply(WHOLE, 3, 9, stream=False)))
    assert client.messages == reply(WHOLE, 3, 9, stream=False)


@pytest.mark.parametrize("stream", [True, False])
def test_a_reply_that_breaks_off_has_no_end(stream: bool) -> None:
    """Dropped by the worker: what was whole until then was seen, and the client is sent no last message."""
    editor, watcher, client = Notes(), Watching(), Client()
    broken = reply(STREAM, 40, stream=stream)[:-1]

    async def main() -> None:
        await play(EditedReply(editor, client.send), broken)
        await play(WatchedReply(watcher), broken)

    asyncio.run(main())
    assert editor.events == watcher.notes.events == (EVENTS[:1] if stream else [])
    assert editor.ends == watcher.rest == []
    assert all(message.get("more_body", True) for message in client.messages)


def test_a_client_that_is_gone_ends_it() -> None:
    """Dropped by the client: its error reaches whoever sends, behind the event that was recorded."""
    editor, client = Notes(), Client(most=1)
    with pytest.raises(OSError, match="gone"):
        asyncio.run(play(EditedReply(editor, client.send), reply(STREAM, 40)))
    assert editor.events == EVENTS[:1]


def test_a_reply_that_is_cancelled_while_its_editor_works() -> None:
    """The editor's work ends, and nothing is sent."""
    client = Client()

    class Slow(Notes):
        async def whole(self, start: Message, body: bytes) -> tuple[Message, bytes]:
            await asyncio.Event().wait()
            raise AssertionError

    async def main() -> None:
        adapter = EditedReply(Slow(), client.send)
        task = asyncio.create_task(play(adapter, reply(WHOLE, stream=False)))
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()

    asyncio.run(main())
    assert client.messages == []
