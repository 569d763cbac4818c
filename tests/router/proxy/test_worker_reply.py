"""A reply is taken apart in one way, wherever its bytes are cut, and however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count, pairwise
from typing import TypeVar

import pytest
from starlette.types import Message

from router.http.disconnect import ClientConnection, ClientMessages, DirectSend, ServedClient
from router.http.upstream import Take, UpstreamBrokenError
from router.proxy.worker_reply import ReplyState, WorkerReply

EVENTS = [b'{"text": "one"}', '{"text": "zwölf"}'.encode(), b"[DONE]"]
STREAM = b": a comment\n\n" + b"".join(b"data: %b\n\n" % data for data in EVENTS) + b"a rest"
EDITED = b": a comment\n\n" + b"".join(b"data: %b\n\n" % data.upper() for data in EVENTS) + b"a rest"
WHOLE = b'{"text": "all of it"}'
T = TypeVar("T")


def at_once(waiting: Awaitable[T]) -> T:
    """Nothing here waits, so no event loop is needed."""
    with pytest.raises(StopIteration) as end:
        waiting.__await__().__next__()
    found: T = end.value.value
    return found


class Pieces:
    """The rest of a reply; without an end it breaks off."""

    flows = True

    def __init__(self, pieces: list[bytes], *, breaks: bool = False) -> None:
        self.pieces = pieces
        self.breaks = breaks
        self.closed = 0

    async def read(self) -> bytes:
        if not self.pieces and self.breaks:
            raise UpstreamBrokenError("it broke off")
        return self.pieces.pop(0) if self.pieces else b""

    async def flow(self, take: Take) -> None:
        while self.flows and self.pieces and take(self.pieces.pop(0)):
            pass

    def close(self) -> None:
        self.closed += 1


def cut(body: bytes, *cuts: int, stream: bool = True, breaks: bool = False) -> tuple[WorkerReply, Pieces]:
    """A reply whose body is cut at these places."""
    first, *rest = [body[begin:end] for begin, end in pairwise([0, *cuts, len(body)])]
    pieces = Pieces(rest, breaks=breaks)
    return WorkerReply(200, [(b"content-type", b"x")], first, stream=stream, rest=pieces), pieces


class Capitals:
    """An editor and a watcher that notes what it sees."""

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self.wholes: list[bytes] = []

    def event(self, data: bytes) -> bytes:
        self.events.append(data)
        return data.upper()

    def whole(self, status: int, body: bytes) -> bytes:
        self.wholes.append(body)
        return body.upper() + b"!"


class Watching:
    def __init__(self) -> None:
        self.events: list[bytes] = []
        self.wholes: list[bytes] = []

    def event(self, data: bytes) -> None:
        self.events.append(data)

    def whole(self, body: bytes) -> None:
        self.wholes.append(body)


def read(reply: WorkerReply) -> list[bytes]:
    found = []
    while piece := at_once(reply.read()):
        found.append(piece)
    return found


@pytest.mark.parametrize("place", range(1, len(STREAM)))
def test_a_stream_cut_at_every_byte(place: int) -> None:
    """Events are whole for the editor, for the watcher, and for the client."""
    editor, watcher = Capitals(), Watching()
    reply, _ = cut(STREAM, place)
    reply.watch(watcher)
    reply.edit(editor)
    assert b"".join(read(reply)) == EDITED
    assert editor.events == watcher.events == EVENTS
    assert reply.state is ReplyState.ENDED


def test_a_stream_of_single_bytes_goes_on_event_by_event() -> None:
    """Nothing is given before an event is whole, and then at once."""
    reply, _ = cut(STREAM, *range(1, len(STREAM)))
    reply.watch(Watching())
    assert read(reply) == [b": a comment\n\n", *[b"data: %b\n\n" % data for data in EVENTS], b"a rest"]


def test_two_editors_of_a_stream_see_it_one_after_the_other() -> None:
    first, second = Capitals(), Capitals()
    reply, _ = cut(STREAM, 20, 50)
    reply.edit(first)
    reply.edit(second)
    assert b"".join(read(reply)) == EDITED
    assert second.events == [data.upper() for data in EVENTS]


@pytest.mark.parametrize("cuts", [(), (3, 9)])
def test_what_is_no_stream_is_edited_whole(cuts: tuple[int, ...]) -> None:
    """In one piece, or when its last piece has come."""
    editor = Capitals()
    reply, _ = cut(WHOLE, *cuts, stream=False)
    if not cuts:
        reply = WorkerReply(200, [], WHOLE)
    reply.edit(editor)
    assert b"".join(read(reply)) == WHOLE.upper() + b"!"
    assert editor.wholes == [WHOLE]


def test_a_reply_that_breaks_off_has_no_end() -> None:
    """What was whole until then was seen, and the reader is told."""
    editor = Capitals()
    reply, _ = cut(STREAM[:40], 20, breaks=True)
    reply.edit(editor)
    with pytest.raises(UpstreamBrokenError):
        read(reply)
    assert editor.events == EVENTS[:1]
    assert reply.state is ReplyState.BROKEN


def test_a_reply_is_closed_once_and_the_last_that_asked_is_told_first() -> None:
    told: list[str] = []
    reply, pieces = cut(STREAM, 20)
    reply.when_closed(lambda one: told.append(f"first, {one.state.value}"))
    reply.when_closed(lambda one: told.append("last"))
    reply.close()
    reply.close()
    assert told == ["last", "first, begun"], "its client left it"
    assert pieces.closed, "the worker is free"


def test_a_gathered_reply_can_be_read_again() -> None:
    editor = Capitals()
    reply, pieces = cut(STREAM, 20, 50)
    reply.edit(editor)
    at_once(reply.gather())
    assert pieces.closed
    assert (reply.complete, reply.state) == (True, ReplyState.ENDED), "nobody has left it"
    assert read(reply) == [EDITED]
    assert editor.events == EVENTS, "it is edited once"


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_that_was_sent_has_ended(stream: bool, gathered: bool) -> None:
    """Its generation is not aborted: a reply that is closed before its end was left by its client."""
    reply, _ = cut(STREAM, 20, stream=stream)
    if gathered:
        at_once(reply.gather())
    answered(reply)
    assert reply.state is ReplyState.ENDED
    whole = WorkerReply(200, [], WHOLE)
    answered(whole)
    assert whole.state is ReplyState.ENDED


@pytest.mark.parametrize("place", range(1, len(STREAM)))
def test_the_first_event_is_found_behind_comments_and_stays_to_be_read(place: int) -> None:
    reply, _ = cut(STREAM, place)
    assert at_once(reply.first_event()) == EVENTS[0]
    assert b"".join(read(reply)) == STREAM


def test_a_stream_of_comments_has_no_first_event() -> None:
    reply, _ = cut(b": one\n\n: two\n\n", 7)
    assert at_once(reply.first_event()) == b""


async def _never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


def answered(reply: WorkerReply) -> list[Message]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def main() -> None:
        async with ClientConnection(ClientMessages(_never, ServedClient())) as client:
            await reply.answer(send, client)

    asyncio.run(main())
    return sent


def test_a_whole_reply_is_one_message_with_its_length() -> None:
    start, body = answered(WorkerReply(200, [], WHOLE))
    assert (b"content-length", b"%d" % len(WHOLE)) in start["headers"]
    assert (body["body"], body["more_body"]) == (WHOLE, False)


def test_an_empty_reply_is_one_message_too() -> None:
    start, body = answered(WorkerReply(204, [], b""))
    assert (start["status"], body["body"], body["more_body"]) == (204, b"", False)


def test_a_stream_goes_on_piece_by_piece() -> None:
    reply, _ = cut(STREAM, 20, 50)
    start, *pieces = answered(reply)
    assert not [pair for pair in start["headers"] if pair[0] == b"content-length"]
    assert [piece["more_body"] for piece in pieces] == [True] * 3 + [False]
    assert b"".join(piece["body"] for piece in pieces) == STREAM


def test_a_piece_may_be_held_until_something_else_is_done() -> None:
    held: list[bytes] = []

    class Brackets:
        def holds(self) -> bool:
            return True

        async def held(self, piece: bytes) -> bytes:
            held.append(piece)
            return piece and b"[" + piece + b"]"

    reply, _ = cut(b"abcd", 2)
    reply.holder = Brackets()
    assert read(reply) == [b"[ab]", b"[cd]"]
    assert held == [b"ab", b"cd", b""]


# Pieces that flow -------------------------------------------------------------------------------------------------------------


def flowing(reply: WorkerReply, wants: Callable[[], bool] = lambda: True) -> tuple[list[bytes], list[bytes]]:
    """What comes of a reply by `flow`, and all that comes of it, in order."""
    flowed: list[bytes] = []
    came: list[bytes] = []

    def take(piece: bytes) -> bool:
        flowed.append(piece)
        came.append(piece)
        return wants()

    while piece := at_once(reply.read()):
        came.append(piece)
        at_once(reply.flow(take))
    return flowed, came


@pytest.mark.parametrize("often", [1, 2, 1000])
@pytest.mark.parametrize("place", range(1, len(STREAM) - 1))
def test_a_stream_that_flows_is_edited_like_one_that_is_read(place: int, often: int) -> None:
    editor, watcher = Capitals(), Watching()
    reply, _ = cut(STREAM, place, place + 1)
    reply.watch(watcher)
    reply.edit(editor)
    taken = count(1)
    _, came = flowing(reply, lambda: next(taken) % often != 0)
    assert b"".join(came) == EDITED
    assert editor.events == watcher.events == EVENTS
    assert reply.state is ReplyState.ENDED


def test_a_piece_that_has_to_wait_does_not_flow() -> None:
    class AtTwo:
        """Holds what comes from the second piece on, which is edited before it waits, and only once."""

        def holds(self) -> bool:
            return len(seen) > 1

        async def held(self, piece: bytes) -> bytes:
            return b"[" + piece + b"]" if piece else b""

    seen: list[bytes] = []

    def step(piece: bytes) -> bytes:
        seen.append(piece)
        return piece.upper()

    reply, rest = cut(b"abcdef", 1, 2)
    reply.add_step(step)
    reply.holder = AtTwo()
    at_once(reply.read())
    for _ in range(2):  # the second time there is one that waits
        at_once(reply.flow(lambda _: True))
        assert rest.pieces == [b"cdef"]

    seen.clear()
    reply, _ = cut(b"abcdef", 1, 2, 3, 4)
    reply.add_step(step)
    reply.holder = AtTwo()
    flowed, came = flowing(reply)
    assert flowed == []
    assert came == [b"A", b"[B]", b"[C]", b"[D]", b"[EF]"]
    assert b"".join(seen) == b"abcdef"


def test_a_step_that_fails_while_a_stream_flows_breaks_it() -> None:
    def step(piece: bytes) -> bytes:
        if piece == b"c":
            raise ZeroDivisionError
        return piece

    reply, _ = cut(b"abcd", 1, 2, 3)
    reply.add_step(step)
    with pytest.raises(ZeroDivisionError):
        flowing(reply)
    assert reply.state is ReplyState.BROKEN


def test_a_taker_that_fails_does_not_break_the_reply() -> None:
    """Its client is at fault, not the worker."""
    reply, _ = cut(b"abcd", 1, 2, 3)

    def take(_: bytes) -> bool:
        raise ZeroDivisionError

    assert at_once(reply.read()) == b"a"
    with pytest.raises(ZeroDivisionError):
        at_once(reply.flow(take))
    assert reply.state is ReplyState.BEGUN
    assert read(reply) == [b"c", b"d"]


def test_nothing_flows_before_what_has_come() -> None:
    reply, _ = cut(STREAM, 20)
    taken: list[bytes] = []
    at_once(reply.flow(lambda piece: not taken.append(piece)))  # type: ignore[func-returns-value]
    assert taken == []
    assert b"".join(read(reply)) == STREAM


def test_a_client_gets_what_flows_past_its_messages() -> None:
    """Unless a middleware is around its `send`, or the client takes no more: then messages bring the pieces, in order."""
    for room, wrapped in [(0, False), (2, False), (99, False), (99, True)]:
        messages: list[Message] = []
        body: list[bytes] = []

        async def send(message: Message, messages: list[Message] = messages, body: list[bytes] = body) -> None:
            messages.append(message)
            body.append(message.get("body", b""))

        written: list[bytes] = []

        def write(piece: bytes, written: list[bytes] = written, body: list[bytes] = body, room: int = room) -> bool:
            if len(written) % (room + 1) == room:
                written.append(b"")
                return False
            written.append(piece)
            body.append(piece)
            return True

        client = ServedClient()
        client.write = write
        direct = DirectSend(send, client)

        async def around(message: Message, direct: DirectSend = direct) -> None:
            await direct(message)

        async def answer(direct: DirectSend = direct, wrapped: bool = wrapped) -> None:
            reply, _ = cut(STREAM, *range(10, 60, 5))
            async with ClientConnection(ClientMessages(_never, ServedClient())) as connection:
                await reply.answer(around if wrapped else direct, connection)

        asyncio.run(answer())
        assert b"".join(body) == STREAM
        assert messages[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
        assert bool([piece for piece in written if piece]) is (room > 0 and not wrapped)
