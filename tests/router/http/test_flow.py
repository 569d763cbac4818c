"""A reply that flows: its pieces are taken in the calls in which they come, and it is still read to its end like any other."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from collections.abc import Callable, Coroutine, Iterable
from contextvars import ContextVar
from itertools import accumulate, count, pairwise
from random import Random
from typing import Any

import pytest
from aiohttp import ClientPayloadError
from aiohttp.client_proto import ResponseHandler
from hypothesis import example, given
from hypothesis import strategies as st

from router.http.upstream import AiohttpUpstream, SizeLimit, UpstreamBrokenError, UpstreamResponse, _Tap
from tests.router.http.test_upstream import Run, all_of, both_loops
from tests.support.serving import read_request, serving_socket


class Dribbling:
    """A worker that sends each reply in the pieces that it is given, with a pause behind each."""

    def __init__(self, *pieces: bytes, ends: bool = True) -> None:
        self.pieces = pieces
        self.ends = ends
        self.connections = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                for piece in self.pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.001)
                if not self.ends:
                    writer.close()
                    return


EVENT_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def _chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)


def _against(worker: Dribbling, use: Callable[[AiohttpUpstream, str], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), serving_socket(worker) as url, AiohttpUpstream(connect_timeout=5) as upstream:
            await use(upstream, url)

    asyncio.run(main())


async def _flowing(reply: UpstreamResponse, wants: Callable[[], bool]) -> tuple[list[bytes], list[bytes]]:
    """Read a reply to its end, as far as possible by `flow`; return what came by it, and all that came, both in order."""
    flowed: list[bytes] = []
    came: list[bytes] = []

    def take(piece: bytes) -> bool:
        flowed.append(piece)
        came.append(piece)
        return wants()

    while piece := await reply.read():
        came.append(piece)
        await reply.flow(take)
    return flowed, came


@both_loops
@pytest.mark.parametrize("seed", range(12))
def test_what_flows_and_what_is_read_are_all_of_a_reply_wherever_it_is_cut(run: Run, seed: int) -> None:
    random = Random(seed)
    events = [b"data: %d%b\n\n" % (number, b"x" * random.randrange(50)) for number in range(40)]
    raw = EVENT_HEAD + _chunked(*events) + b"0\r\n\r\n"
    cuts = sorted(random.sample(range(1, len(raw)), 60))
    worker = Dribbling(*(raw[begin:end] for begin, end in pairwise([0, *cuts, len(raw)])))

    async def main() -> None:
        async with asyncio.timeout(30), serving_socket(worker) as url, AiohttpUpstream(connect_timeout=5) as upstream:
            for stops in (0.0, 0.3, 1.0):
                reply = await upstream.send("GET", url + "/", [])
                flowed, came = await _flowing(reply, lambda: random.random() >= stops)  # noqa: B023 - called at once
                assert b"".join(came) == b"".join(events)
                assert flowed
                assert await reply.read() == b""
                reply.close()
            assert worker.connections == 1  # it is whole again after each

    run(main())


class _Transport(asyncio.Transport):
    """A connection on which nothing is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.protocol: Any = None

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol

    def resume_reading(self) -> None: ...

    def close(self) -> None:
        asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)


async def _tapped(pieces: Iterable[bytes], wants: Callable[[], bool], fed: list[bytes] | None = None) -> bytes:
    """Return the body of a reply that flows, of which these pieces come; `fed` gets those that aiohttp reads."""

    class Handler(ResponseHandler):
        def data_received(self, data: bytes) -> None:
            if data and fed is not None:
                fed.append(data)
            super().data_received(data)

    handler, transport = Handler(asyncio.get_running_loop()), _Transport()
    handler.connection_made(transport)
    handler.set_response_params(read_until_eof=True, auto_decompress=False)
    handler.data_received(EVENT_HEAD)
    _, content = await handler.read()
    tap = _Tap(handler, transport, content, SizeLimit(1 << 20, stream=True))
    found = bytearray()

    def take(piece: bytes) -> bool:
        found.extend(piece)
        return wants()

    flow = asyncio.create_task(tap.flow(take))
    for piece in pieces:
        await asyncio.sleep(0)
        if flow.done():
            flow = asyncio.create_task(tap.flow(take))
            await asyncio.sleep(0)
        tap.data_received(piece)
    async with asyncio.timeout(5):
        found += await content.read()
    flow.cancel()
    return bytes(found)


_LIKE_FRAMES = st.lists(st.sampled_from([b"data: a\n\n", b"4", b"\r\n", b"1", b"d", b"0\r\n\r\n", b"5\r\nabcde\r\n"]))


@given(
    bodies=st.lists(_LIKE_FRAMES.map(b"".join).filter(len), min_size=1, max_size=12),
    extensions=st.booleans(),
    data=st.data(),
)
@example(bodies=[b"4\r\n4\r\n4\r\n", b"4\r\n4", b"abcd"], extensions=False, data=None)
def test_a_chunk_that_comes_alone_is_the_same_to_a_client(
    bodies: list[bytes], extensions: bool, data: st.DataObject | None
) -> None:
    """Also where a body looks like the frame of a chunk, and wherever the bytes are cut."""
    chunks = [
        b"%x%b\r\n%b\r\n" % (len(body), b";x" if extensions and number % 3 == 0 else b"", body)
        for number, body in enumerate(bodies)
    ]
    ends = [*accumulate(map(len, chunks))]
    whole = b"".join(chunks) + b"0\r\n\r\n"
    cuts = {*ends} if data is None or data.draw(st.booleans()) else set[int]()
    if data is not None:
        cuts ^= data.draw(st.sets(st.integers(1, len(whole) - 1), max_size=6))
    random = Random(len(whole))
    wants = (lambda: True) if data is None or data.draw(st.booleans()) else lambda: random.random() < 0.8
    pieces = [whole[begin:end] for begin, end in pairwise([0, *sorted(cuts), len(whole)])]
    assert asyncio.run(_tapped(pieces, wants)) == b"".join(bodies)


@pytest.mark.parametrize(
    ("pieces", "body"),
    [
        # The end of a chunk, and the frame of the next.
        ([b"9\r\ndata:", b"4\r\n4\r\n4\r\n", b"1\r\nx\r\n"], b"data:4\r\n41\r\nx"),
        # The rest of a frame, `14`, and the beginning of its chunk.
        ([b"2\r\nab\r\n", b"1", b"4\r\nabcd\r\n", b"x" * 14 + b"\r\n"], b"ababcd\r\n" + b"x" * 14),
        # A part of a chunk, while nothing flows.
        ([b"2\r\nab\r\n", b"2\r\nno\r\n", b"a\r\nx", b"1\r\nx\r\n", b"xyz\r\n"], b"abnox1\r\nx\r\nxyz"),
    ],
)
def test_what_looks_like_a_chunk_is_none(pieces: list[bytes], body: bytes) -> None:
    for stops in (True, False):
        calls = count()
        wants = (lambda: next(calls) != 1) if stops else (lambda: True)  # noqa: B023 - called at once
        assert asyncio.run(_tapped([*pieces, b"0\r\n\r\n"], wants)) == body


@pytest.mark.parametrize("spoiled", [b"3\r\nabcxx", b"3\r\nabc\rx", b"x\r\nabc\r\n"])
def test_a_chunk_without_its_frame_breaks_the_reply(spoiled: bytes) -> None:
    with pytest.raises(ClientPayloadError):
        asyncio.run(_tapped([b"2\r\nab\r\n", b"2\r\nab\r\n", spoiled, b"2\r\nab\r\n"], lambda: True))


def test_chunks_that_come_alone_go_past_aiohttp() -> None:
    """But for the first, which shows where a chunk begins, and what comes behind others or in parts."""
    fed: list[bytes] = []
    one, two, three = (_chunked(b"data: %d\n\n" % number) for number in range(3))
    pieces = [one, two, three, one + two, two, three, one[:5], one[5:], one, two, b"0\r\n\r\n"]
    asyncio.run(_tapped(pieces, lambda: True, fed))
    assert fed[1:] == [one, one + two, two, one[:5], one[5:], one, b"0\r\n\r\n"]


@both_loops
def test_nothing_wakes_a_task_for_a_piece_that_flows(run: Run) -> None:
    """`take` is called for one after the other while the task that waits sleeps."""
    worker = Dribbling(EVENT_HEAD, *(_chunked(b"data: %d\n\n" % number) for number in range(10)), b"0\r\n\r\n")

    async def main() -> None:
        async with asyncio.timeout(30), serving_socket(worker) as url, AiohttpUpstream(connect_timeout=5) as upstream:
            reply = await upstream.send("GET", url + "/", [])
            calls = 0
            came = [await reply.read()]

            def take(piece: bytes) -> bool:
                came.append(piece)
                return True

            while len(came) < 10:
                await reply.flow(take)
                calls += 1
            assert calls == 1
            assert await all_of(reply) == b""

    run(main())


def test_what_has_come_before_flows_at_once() -> None:
    """It is not left until more comes, which may take a minute."""
    worker = Dribbling(EVENT_HEAD, _chunked(b"data: 0\n\n"), _chunked(b"data: 1\n\n"))

    async def use(upstream: AiohttpUpstream, url: str) -> None:
        reply, came = await upstream.send("GET", url + "/", []), list[bytes]()
        assert await reply.read() == b"data: 0\n\n"
        while not reply._content.total_bytes > 9:  # type: ignore[attr-defined]  # noqa: ASYNC110 - until the second one is here
            await asyncio.sleep(0.001)

        def take(piece: bytes) -> bool:
            came.append(piece)
            return False

        async with asyncio.timeout(5):
            await reply.flow(take)
        assert came == [b"data: 1\n\n"]
        reply.close()

    _against(worker, use)


@both_loops
def test_a_reply_that_breaks_while_it_flows(run: Run) -> None:
    worker = Dribbling(EVENT_HEAD, *(_chunked(b"data: %d\n\n" % number) for number in range(5)), ends=False)

    async def main() -> None:
        async with asyncio.timeout(30), serving_socket(worker) as url, AiohttpUpstream(connect_timeout=5) as upstream:
            came: list[bytes] = []
            reply = await upstream.send("GET", url + "/", [])

            def take(piece: bytes) -> bool:
                came.append(piece)
                return True

            async def read_on() -> None:
                while piece := await reply.read():
                    came.append(piece)
                    await reply.flow(take)

            with pytest.raises(UpstreamBrokenError, match=r"^the connection was closed in the middle of the reply$"):
                await read_on()
            assert b"".join(came) == b"".join(b"data: %d\n\n" % number for number in range(5))
            reply.close()

    run(main())


@both_loops
@pytest.mark.parametrize("flows", [False, True])
def test_a_reply_ends_with_its_connection_although_nobody_says_so(
    run: Run, flows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """aiohttp does not always tell that to whoever reads the body, who would wait for ever."""
    worker = Dribbling(EVENT_HEAD, _chunked(b"data: 1\n\n"), ends=False)

    async def main() -> None:
        async with asyncio.timeout(30), serving_socket(worker) as url, AiohttpUpstream(connect_timeout=5) as upstream:
            reply = await upstream.send("GET", url + "/", [])
            monkeypatch.setattr(ResponseHandler, "connection_lost", lambda self, exc: None)
            with pytest.raises(UpstreamBrokenError, match="closed in the middle of the reply"):
                await (_flowing(reply, lambda: True) if flows else all_of(reply))
            monkeypatch.undo()
            reply.close()

    run(main())


def test_an_event_that_is_too_large_while_it_flows() -> None:
    worker = Dribbling(EVENT_HEAD, _chunked(b"data: 1\n\n"), *[_chunked(b"y" * 400)] * 5)

    async def main() -> None:
        upstream = AiohttpUpstream(connect_timeout=5, max_reply=1000)
        async with asyncio.timeout(30), serving_socket(worker) as url, upstream:
            reply = await upstream.send("GET", url + "/", [])
            with pytest.raises(UpstreamBrokenError, match="an event is longer than 1000 bytes"):
                await _flowing(reply, lambda: True)
            reply.close()

    asyncio.run(main())


@pytest.mark.parametrize("late", [False, True])
def test_what_a_taker_raises_is_raised_where_the_flow_is_awaited(late: bool) -> None:
    worker = Dribbling(EVENT_HEAD, *(_chunked(b"data: %d\n\n" % number) for number in range(4)), b"0\r\n\r\n")

    async def use(upstream: AiohttpUpstream, url: str) -> None:
        reply, came = await upstream.send("GET", url + "/", []), list[bytes]()

        def take(piece: bytes) -> bool:
            came.append(piece)
            if len(came) > late:
                raise ZeroDivisionError
            return True

        first = await reply.read()
        with pytest.raises(ZeroDivisionError):
            await reply.flow(take)
        rest = await all_of(reply)
        assert first + b"".join(came) + rest == b"".join(b"data: %d\n\n" % number for number in range(4))

    _against(worker, use)


@both_loops
def test_a_task_that_is_cancelled_while_a_reply_flows_leaves_the_rest_to_be_read(run: Run) -> None:
    gate = asyncio.Event()

    async def worker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(EVENT_HEAD + _chunked(b"data: 0\n\n"))
        await gate.wait()
        writer.write(_chunked(b"data: 1\n\n") + b"0\r\n\r\n")
        await reader.read()

    async def main() -> None:
        async with asyncio.timeout(30), serving_socket(worker) as url, AiohttpUpstream(connect_timeout=5) as upstream:
            reply = await upstream.send("GET", url + "/", [])
            assert await reply.read() == b"data: 0\n\n"
            taken: list[bytes] = []
            flow = asyncio.create_task(reply.flow(lambda piece: not taken.append(piece)))  # type: ignore[func-returns-value]
            await asyncio.sleep(0.01)
            flow.cancel()
            await asyncio.wait([flow])
            gate.set()
            assert await all_of(reply) == b"data: 1\n\n"
            assert taken == []

    run(main())


def test_what_flows_is_taken_in_the_context_of_its_own_request() -> None:
    """A connection has the context of the request for which it was made. Log lines of others would have the id of that."""
    name = ContextVar("name", default="nobody")
    worker = Dribbling(EVENT_HEAD, *(_chunked(b"data: %d\n\n" % number) for number in range(4)), b"0\r\n\r\n")

    async def use(upstream: AiohttpUpstream, url: str) -> None:
        for request in ("first", "second"):
            name.set(request)
            reply, names = await upstream.send("GET", url + "/", []), set[str]()

            def take(_: bytes, names: set[str] = names) -> bool:
                names.add(name.get())
                return True

            await reply.read()
            await reply.flow(take)
            await all_of(reply)
            assert names == {request}
        assert worker.connections == 1

    _against(worker, use)


def test_what_is_packed_does_not_flow() -> None:
    packed = gzip.compress(b"data: 1\n\ndata: 2\n\n")
    head = EVENT_HEAD.replace(b"\r\n\r\n", b"\r\ncontent-encoding: gzip\r\n\r\n")
    worker = Dribbling(head, *(_chunked(packed[at : at + 9]) for at in range(0, len(packed), 9)), b"0\r\n\r\n")

    async def use(upstream: AiohttpUpstream, url: str) -> None:
        flowed, came = await _flowing(await upstream.send("GET", url + "/", []), lambda: True)
        assert (flowed, b"".join(came)) == ([], b"data: 1\n\ndata: 2\n\n")

    _against(worker, use)
