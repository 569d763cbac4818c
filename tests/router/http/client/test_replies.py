"""Replies as bytes: in any pieces, cut off anywhere, with something behind them, and what is no reply at all."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.http.client.connection import MAX_HEAD_BYTES, MAX_HEADER_BYTES, READ_BUFFER_BYTES, WorkerConnection
from router.http.upstream import ClosedBeforeReplyError, NotHttpError, UpstreamBrokenError, UpstreamResponse


class Transport(asyncio.Transport):
    """Takes what is written, and notes what else is asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = self.paused = False
        self.unsent = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return self.closed

    def abort(self) -> None:
        self.closed = True

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def get_write_buffer_size(self) -> int:
        return self.unsent


@contextlib.asynccontextmanager
async def asked(
    method: str = "POST",
) -> AsyncIterator[tuple[WorkerConnection, Transport, asyncio.Task[UpstreamResponse], list[WorkerConnection]]]:
    """A connection on which a request is sent: the task that waits for its head, and where the connection goes when free."""
    free: list[WorkerConnection] = []
    connection, transport = WorkerConnection(free.append), Transport()
    connection.connection_made(transport)

    async def send() -> UpstreamResponse:
        return await connection.send(b"%b / HTTP/1.1\r\n\r\n" % method.encode(), None, bodiless=method == "HEAD")

    task = asyncio.create_task(send())
    await asyncio.sleep(0)
    yield connection, transport, task, free
    task.cancel()
    await asyncio.wait((task,))


async def all_of(reply: UpstreamResponse) -> bytes:
    body = b""
    while piece := await reply.read():
        body += piece
    return body


SIZED = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\nX-Two: a\r\nx-two: b\r\n\r\nsome body"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nsome\r\n5\r\n body\r\n0\r\nx-late: 1\r\n\r\n"
INTERIM = b"HTTP/1.1 100 Continue\r\nx-early: 1\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + SIZED
LASTING = b"HTTP/1.1 200 OK\r\nx: y\r\n\r\nsome body"
OLD = b"HTTP/1.0 200 OK\r\ncontent-length: 9\r\n\r\nsome body"
CLOSING = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 9\r\n\r\nsome body"

REPLIES = {
    "with its length": (SIZED, True),
    "in chunks with a trailer": (CHUNKED, True),
    "behind interim ones": (INTERIM, True),
    "up to the end of the connection": (LASTING, False),
    "of HTTP/1.0": (OLD, False),
    "that closes": (CLOSING, False),
}


@pytest.mark.parametrize(("raw", "kept"), REPLIES.values(), ids=list(REPLIES))
@given(cuts=st.lists(st.integers(0, 200), max_size=6))
@settings(max_examples=40, deadline=None)
def test_a_reply_in_any_pieces(raw: bytes, kept: bool, cuts: list[int]) -> None:
    async def main() -> None:
        async with asked() as (connection, transport, task, free):
            ends = sorted({*(cut for cut in cuts if 0 < cut < len(raw)), len(raw)})
            for begin, end in pairwise((0, *ends)):
                connection.data_received(raw[begin:end])
            if raw is LASTING:
                connection.connection_lost(None)
            reply = await task
            assert reply.status == 200
            names = [name for name, _ in reply.headers]
            assert b"x-late" not in names
            assert b"x-early" not in names
            if raw in (SIZED, INTERIM):
                assert reply.headers == [(b"content-length", b"9"), (b"X-Two", b"a"), (b"x-two", b"b")]
            assert await all_of(reply) == b"some body"
            assert await reply.read() == b""
            assert bool(free) == kept == (not transport.closed)

    asyncio.run(main())


@pytest.mark.parametrize("raw", [SIZED, CHUNKED, INTERIM], ids=["sized", "chunked", "interim"])
@pytest.mark.parametrize("error", [None, ConnectionResetError("reset")], ids=["end", "reset"])
def test_a_reply_that_is_cut_off_anywhere_never_looks_whole(raw: bytes, error: Exception | None) -> None:
    async def main(length: int) -> None:
        head = raw.rindex(b"\r\n\r\n", 0, raw.index(b"some")) + 4
        async with asked() as (connection, _, task, free):
            if length:
                connection.data_received(raw[:length])
            connection.connection_lost(error)
            if length < head:
                with pytest.raises(ClosedBeforeReplyError):
                    await task
            else:
                reply = await task
                with pytest.raises(UpstreamBrokenError):
                    await all_of(reply)
            assert not free

    for length in range(len(raw)):
        asyncio.run(main(length))


def test_a_reply_without_a_length_that_is_reset_is_broken() -> None:
    async def main() -> None:
        async with asked() as (connection, _, task, _free):
            connection.data_received(LASTING)
            connection.connection_lost(ConnectionResetError("reset"))
            reply = await task
            assert await reply.read() == b"some body"
            with pytest.raises(UpstreamBrokenError, match="reset"):
                await reply.read()

    asyncio.run(main())


@pytest.mark.parametrize(
    "behind", [b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil", b"x"], ids=["a reply", "a byte"]
)
@pytest.mark.parametrize("late", [False, True])
def test_what_comes_behind_a_reply_is_part_of_no_other(behind: bytes, late: bool) -> None:
    """Neither in one piece with it nor afterwards: the connection is closed."""

    async def main() -> None:
        async with asked() as (connection, transport, task, _free):
            if late:
                connection.data_received(SIZED)
                connection.data_received(behind)
            else:
                connection.data_received(SIZED + behind)
            assert await all_of(await task) == b"some body"
            assert transport.closed
            assert not connection.usable

    asyncio.run(main())


@pytest.mark.parametrize("status", [204, 304])
def test_replies_without_a_body(status: int) -> None:
    async def main() -> None:
        async with asked() as (connection, _, task, free):
            connection.data_received(b"HTTP/1.1 %d X\r\n\r\n" % status)
            reply = await task
            assert (reply.status, await all_of(reply)) == (status, b"")
            assert free

    asyncio.run(main())


def test_a_head_alone_may_describe_a_body() -> None:
    async def main() -> None:
        async with asked("HEAD") as (connection, transport, task, free):
            connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n")
            reply = await task
            assert reply.headers == [(b"content-length", b"9")]
            assert await reply.read() == b""
            assert transport.closed
            assert not free

    asyncio.run(main())


NONSENSE = {
    "no HTTP": b"SSH-2.0-OpenSSH\r\n",
    "a status below": b"HTTP/1.1 099 X\r\ncontent-length: 0\r\n\r\n",
    "a status above": b"HTTP/1.1 600 X\r\ncontent-length: 0\r\n\r\n",
    "another protocol": b"HTTP/1.1 101 X\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
    "a length that is none": b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
    "length and chunks": b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "a control byte": b"HTTP/1.1 200 OK\r\nx: a\x01b\r\ncontent-length: 0\r\n\r\n",
    "a long header": b"HTTP/1.1 200 OK\r\nx: " + b"a" * MAX_HEADER_BYTES + b"\r\n\r\n",
    "many headers": b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 1001 + b"\r\n",
    "a head without an end": b"HTTP/1.1 200 OK\r\nx: " + b"a" * MAX_HEAD_BYTES,
}


@pytest.mark.parametrize("raw", NONSENSE.values(), ids=list(NONSENSE))
@pytest.mark.parametrize("piece", [1000, 1 << 22])
def test_what_is_no_reply(raw: bytes, piece: int) -> None:
    async def main() -> None:
        async with asked() as (connection, transport, task, free):
            for at in range(0, len(raw), piece):
                connection.data_received(raw[at : at + piece])
            with pytest.raises(NotHttpError):
                await task
            assert transport.closed
            assert not free

    asyncio.run(main())


def test_a_broken_chunk_breaks_the_reply() -> None:
    async def main() -> None:
        async with asked() as (connection, transport, task, _free):
            connection.data_received(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nsome\r\nnonsense")
            reply = await task
            assert await reply.read() == b"some"
            with pytest.raises(UpstreamBrokenError):
                await reply.read()
            assert transport.closed

    asyncio.run(main())


def test_a_reply_that_nobody_takes_stops_coming() -> None:
    """And goes on once it is taken. A connection whose reply was left lying is free to be read from again."""

    async def main() -> None:
        async with asked() as (connection, transport, task, free):
            size = READ_BUFFER_BYTES + 2
            connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
            connection.data_received(b"a" * (READ_BUFFER_BYTES + 1))
            assert transport.paused
            reply = await task
            assert len(await reply.read()) == READ_BUFFER_BYTES + 1
            assert not transport.paused
            connection.data_received(b"a")
            assert free
            assert await all_of(reply) == b"a"

    asyncio.run(main())


def test_a_reply_that_ended_unread_keeps_nothing_from_the_next_one() -> None:
    async def main() -> None:
        async with asked() as (connection, transport, task, free):
            size = READ_BUFFER_BYTES + 1
            connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
            connection.data_received(b"a" * size)
            assert free
            assert not transport.paused
            first = await task
            second = asyncio.create_task(connection.send(b"x", None, bodiless=False))
            await asyncio.sleep(0)
            connection.data_received(SIZED)
            assert await all_of(await second) == b"some body"
            assert await all_of(first) == b"a" * size
            first.close()
            assert not transport.closed

    asyncio.run(main())


@pytest.mark.parametrize("part", [b"", SIZED[:20], SIZED[:-1]], ids=["before the head", "in the head", "in the body"])
def test_who_leaves_closes_the_connection(part: bytes) -> None:
    async def main() -> None:
        async with asked() as (connection, transport, task, free):
            if part:
                connection.data_received(part)
            if part == SIZED[:-1]:
                (await task).close()
            else:
                task.cancel()
                await asyncio.wait((task,))
            assert transport.closed
            assert not free
            assert not connection.usable

    asyncio.run(main())


def test_a_reply_before_the_end_of_its_request_is_the_last_one() -> None:
    """What was not sent would be taken for the beginning of the next request."""

    async def main() -> None:
        async with asked() as (connection, transport, task, free):
            transport.unsent = 1
            connection.data_received(SIZED)
            assert await all_of(await task) == b"some body"
            assert transport.closed
            assert not free

    asyncio.run(main())


def test_no_more_of_a_large_body_is_sent_once_it_is_answered() -> None:
    async def main() -> None:
        free: list[WorkerConnection] = []
        connection, transport = WorkerConnection(free.append), Transport()
        connection.connection_made(transport)
        body = bytes(5_000_000)
        task = asyncio.create_task(connection.send(b"head", body, bodiless=False))
        await asyncio.sleep(0)
        connection.pause_writing()
        for _ in range(3):
            await asyncio.sleep(0)
        sent = len(transport.written)
        assert 0 < sent < 1_000_000
        connection.data_received(b"HTTP/1.1 413 X\r\ncontent-length: 0\r\n\r\n")
        connection.resume_writing()
        reply = await task
        assert (reply.status, await all_of(reply)) == (413, b"")
        assert len(transport.written) == sent
        assert transport.closed
        assert not free

    asyncio.run(main())
