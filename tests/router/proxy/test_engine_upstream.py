"""Requests in the common form at workers of another engine: one or several calls, and one reply, however it is cut."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.engines.engine import Engine, EngineAnswer, EngineCall, EngineExchange, Introduction, KnownWorker, Question
from router.engines.engine import UntranslatableError as Untranslatable
from router.engines.sglang.engine import SGLANG
from router.http.upstream import Body, Headers, Take, UpstreamBrokenError, UpstreamResponse, is_event_stream
from router.proxy.engine_upstream import EngineUpstream

EVENTS = (b"content-type", b"text/event-stream")
JSON = (b"content-type", b"application/json")


class Reply:
    """A worker's reply in these pieces; the last may be an error."""

    def __init__(
        self, pieces: Sequence[bytes | Exception], header: tuple[bytes, bytes] = JSON, status: int = 200
    ) -> None:
        self.status = status
        self.headers: Headers = [header, (b"x-worker", b"1")]
        self.stream = is_event_stream(self.headers)
        self.closed = False
        self._pieces = list(pieces)

    async def read(self) -> bytes:
        await asyncio.sleep(0)
        piece = self._pieces.pop(0) if self._pieces else b""
        if isinstance(piece, Exception):
            raise piece
        return piece

    async def flow(self, take: Take) -> None:
        while (piece := await self.read()) and take(piece):
            pass

    def close(self) -> None:
        self.closed = True


class Workers:
    """Answers each call by its path."""

    def __init__(self, **replies: Reply | Exception) -> None:
        self.replies = {f"/{name}": reply for name, reply in replies.items()}
        self.sent: list[tuple[str, str, Headers, Body]] = []

    async def send(
        self, method: str, url: str, headers: Headers, body: Body = None, *, fresh: bool = False
    ) -> UpstreamResponse:
        self.sent.append((method, url, headers, body))
        await asyncio.sleep(0)
        reply = self.replies["/" + url.rpartition("/")[2]]
        if isinstance(reply, Exception):
            raise reply
        return reply


class Doubling:
    """Asks `/a` and `/b` for `/generate`; of a stream it passes events on with the number of their call."""

    def __init__(self, stream: bool, paths: Sequence[str] = ("/a", "/b")) -> None:
        self.over = False
        self.calls: Sequence[EngineCall] = [EngineCall("POST", path, path[1:].encode()) for path in paths]
        self.stream = stream

    def whole(self, answers: Sequence[EngineAnswer]) -> EngineAnswer:
        if answers[0].body == b"garbage":
            raise Untranslatable("garbage")
        return EngineAnswer(answers[0].status, b"+".join(answer.body for answer in answers))

    def event(self, number: int, data: bytes) -> bytes:
        if data == b"garbage":
            raise Untranslatable("garbage")
        self.over = b"error" in data
        return b"" if data == b"[DONE]" else b"data: %d%b\n\n" % (number, data)

    def end(self) -> bytes:
        return b"data: [DONE]\n\n"


class Other:
    """An engine."""

    name = "other"
    native = False
    mark = ""
    questions: Sequence[Question] = ()
    private_headers = frozenset({b"x-secret"})

    def recognises(self, description: bytes) -> bool:
        return False

    def introduction(self, answers: Mapping[str, EngineAnswer]) -> Introduction:
        return Introduction()

    def exchange(self, call: EngineCall, worker: KnownWorker) -> EngineExchange | EngineAnswer | None:
        if call.target == "/refused":
            return EngineAnswer(400, b"no")
        return None if call.target == "/else" else Doubling(call.target == "/stream")


def asking(
    workers: Workers, target: str, then: Callable[[UpstreamResponse], Awaitable[object]], engine: Engine
) -> None:
    async def main() -> None:
        upstream = EngineUpstream(workers, lambda url: KnownWorker())
        upstream.speak(engine)
        headers = [(b"x-secret", b"1"), (b"x-kept", b"2"), (b"content-type", b"text/plain")]
        await then(await upstream.send("POST", f"http://w:1{target}", headers, b"{}"))

    asyncio.run(main())


async def everything(reply: UpstreamResponse) -> bytes:
    """All of a reply: some of its pieces are read, and some flow."""
    pieces: list[bytes] = []

    def take(piece: bytes) -> bool:
        pieces.append(piece)
        return len(pieces) % 3 > 0

    while piece := await reply.read():
        pieces.append(piece)
        await reply.flow(take)
    return b"".join(pieces)


def check(body: bytes, status: int = 200) -> Callable[[UpstreamResponse], Awaitable[object]]:
    async def then(reply: UpstreamResponse) -> None:
        assert reply.status == status
        assert await everything(reply) == body
        assert await reply.read() == b""
        reply.close()

    return then


def test_the_native_engine_is_spoken_to_directly() -> None:
    workers = Workers(generate=Reply([b"x"]))
    upstream = EngineUpstream(workers, lambda url: KnownWorker())
    upstream.speak(SGLANG)
    assert upstream.send == workers.send


def test_several_answers_are_one() -> None:
    workers = Workers(a=Reply([b"1", b"2"]), b=Reply([b"3"]))
    asking(workers, "/generate", check(b"12+3"), Other())
    assert [(url, body) for _, url, _, body in workers.sent] == [("http://w:1/a", b"a"), ("http://w:1/b", b"b")]
    assert all(headers == [(b"x-kept", b"2"), JSON] for _, _, headers, _ in workers.sent)
    assert all(reply.closed for reply in workers.replies.values() if isinstance(reply, Reply))


def test_what_is_not_translated_passes() -> None:
    workers = Workers(**{"else": Reply([b"x"])})
    asking(workers, "/else", check(b"x"), Other())
    assert workers.sent[0][2][0] == (b"x-secret", b"1")


def test_a_refusal_asks_nobody() -> None:
    workers = Workers()
    asking(workers, "/refused", check(b"no", 400), Other())
    assert workers.sent == []


def test_one_bad_answer_is_the_answer() -> None:
    workers = Workers(a=Reply([b"1"]), b=Reply([b"bad"], status=503))
    asking(workers, "/generate", check(b"bad", 503), Other())
    assert all(reply.closed for reply in workers.replies.values() if isinstance(reply, Reply))


def test_a_bad_answer_waits_for_no_other() -> None:
    """The others may generate for minutes."""
    workers = Workers(a=Reply([b"bad"], status=400), b=Reply([b"x"]))
    sent = workers.send
    left = asyncio.Event()

    async def send(
        method: str, url: str, headers: Headers, body: Body = None, *, fresh: bool = False
    ) -> UpstreamResponse:
        if url.endswith("/b"):
            try:
                await asyncio.Event().wait()
            finally:
                left.set()
        return await sent(method, url, headers, body)

    workers.send = send  # type: ignore[method-assign]
    asking(workers, "/generate", check(b"bad", 400), Other())
    assert left.is_set()


@pytest.mark.parametrize("target", ["/generate", "/stream"])
def test_one_lost_connection_closes_the_others(target: str) -> None:
    workers = Workers(a=Reply([b"1"], EVENTS), b=UpstreamBrokenError("gone"))
    with pytest.raises(UpstreamBrokenError, match="gone"):
        asking(workers, target, check(b""), Other())
    reply = workers.replies["/a"]
    assert isinstance(reply, Reply)
    assert reply.closed


def test_garbage_is_a_fault_of_the_worker() -> None:
    with pytest.raises(UpstreamBrokenError, match="its reply cannot be read: garbage"):
        asking(Workers(a=Reply([b"garbage"]), b=Reply([b""])), "/generate", check(b""), Other())
    workers = Workers(a=Reply([b"data: garbage\n\n"], EVENTS), b=Reply([b"data: x\n\n"], EVENTS))
    with pytest.raises(UpstreamBrokenError, match="its stream cannot be read: garbage"):
        asking(workers, "/stream", check(b""), Other())
    assert all(reply.closed for reply in workers.replies.values() if isinstance(reply, Reply))


def test_a_stream_that_ends_inside_an_event_is_broken() -> None:
    workers = Workers(a=Reply([b"data: 1\n\ndata: 2"], EVENTS), b=Reply([b"data: [DONE]\n\n"], EVENTS))
    with pytest.raises(UpstreamBrokenError, match="in the middle of an event"):
        asking(workers, "/stream", check(b""), Other())


def test_a_stream_that_breaks_off_is_broken() -> None:
    workers = Workers(a=Reply([b"data: 1\n\n", UpstreamBrokenError("off")], EVENTS), b=Reply([b"data: 2\n\n"], EVENTS))
    with pytest.raises(UpstreamBrokenError, match="off"):
        asking(workers, "/stream", check(b""), Other())


def test_an_exchange_that_is_over_waits_for_no_other_call() -> None:
    endless = Reply([b"data: 2\n\n"] * 500, EVENTS)
    workers = Workers(a=Reply([b"data: error\n\n"], EVENTS), b=endless)

    async def then(reply: UpstreamResponse) -> None:
        said = await everything(reply)
        assert said.endswith(b"data: 0error\n\ndata: [DONE]\n\n")
        assert said.count(b"data: 1") < 100

    asking(workers, "/stream", then, Other())
    assert endless.closed


@given(st.data())
def test_streams_are_joined_however_they_are_cut(data: st.DataObject) -> None:
    """Each call's events stay whole and in order, and the end comes last and once."""
    streams = [
        b"".join(b"data: %d\n\n" % n for n in range(data.draw(st.integers(0, 5)))) + b"data: [DONE]\n\n" for _ in "ab"
    ]
    cut: list[Reply] = []
    for stream in streams:
        cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
        pieces = [stream[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True) if begin < end]
        cut.append(Reply(pieces, EVENTS))

    async def then(reply: UpstreamResponse) -> None:
        events = (await everything(reply)).split(b"\n\n")
        assert events[-2:] == [b"data: [DONE]", b""]
        for number, stream in enumerate(streams):
            own = [event for event in events if event.startswith(b"data: %d" % number)]
            count = stream.count(b"data") - 1
            assert own == [b"data: %d%d" % (number, one) for one in range(count)]
        assert events.count(b"data: [DONE]") == 1

    asking(Workers(a=cut[0], b=cut[1]), "/stream", then, Other())


def test_a_reply_that_nobody_wants_is_closed() -> None:
    workers = Workers(a=Reply([b"data: 1\n\n"] * 500, EVENTS), b=Reply([b"data: 2\n\n"] * 500, EVENTS))

    async def then(reply: UpstreamResponse) -> None:
        assert await reply.read()
        reply.close()

    asking(workers, "/stream", then, Other())
    assert all(reply.closed for reply in workers.replies.values() if isinstance(reply, Reply))
