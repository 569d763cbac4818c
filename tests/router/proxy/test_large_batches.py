"""A batch of thousands of prompts at a worker of another engine: it has many calls, and few connections at a time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import pytest

from router.engines.engine import EngineAnswer, EngineCall, EngineExchange, KnownWorker
from router.http.upstream import Body, ClosedBeforeReplyError, Headers, UpstreamBrokenError, UpstreamResponse
from router.proxy.engine_upstream import MOST_OPEN
from tests.router.conftest import running
from tests.router.proxy.test_engine_upstream import (
    EVENTS,
    JSON,
    Doubling,
    Other,
    Reply,
    Workers,
    asking,
    check,
    everything,
)
from tests.support.serving import read_request, serving_socket

LARGE = 2 * MOST_OPEN + 10


class Batching(Other):
    def exchange(self, call: EngineCall, worker: KnownWorker) -> EngineExchange | EngineAnswer | None:
        return Doubling(call.target.endswith("/stream"), [f"/{number}" for number in range(LARGE)])


class LargeBatch(Workers):
    """Answers calls whose path is a number, and counts how many of its replies are open: sent, and neither ended nor closed.

    `refused`: the call that is answered with an error; `lost`: the one whose connection breaks.
    """

    def __init__(self, *, stream: bool, refused: int | None = None, lost: int | None = None) -> None:
        super().__init__()
        self.open: set[str] = set()
        self._full = asyncio.Event()
        self.most = 0
        self.fresh = 0
        self._stream, self._refused, self._lost = stream, refused, lost

    async def send(
        self, method: str, url: str, headers: Headers, body: Body = None, *, fresh: bool = False
    ) -> UpstreamResponse:
        name = url.rpartition("/")[2]
        self.sent.append((method, url, headers, body))
        self.fresh += fresh
        self.open.add(name)
        self.most = max(self.most, len(self.open))
        if self.most == MOST_OPEN:
            self._full.set()
        await self._full.wait()
        if name == str(self._lost):
            self.open.discard(name)
            raise ClosedBeforeReplyError("lost")
        if name == str(self._refused):
            return Counted(self, name, [b'{"error":\n1}'], status=400)
        text = name.encode()
        if self._stream:
            return Counted(self, name, [b"data: %b\n\n" % text, b"data: [DONE]\n\n"], EVENTS)
        return Counted(self, name, [text])


class Counted(Reply):
    def __init__(
        self,
        workers: LargeBatch,
        name: str,
        pieces: Sequence[bytes],
        header: tuple[bytes, bytes] = JSON,
        status: int = 200,
    ) -> None:
        super().__init__(pieces, header, status)
        self._ended = lambda: workers.open.discard(name)

    async def read(self) -> bytes:
        piece = await super().read()
        if not piece:
            self._ended()
        return piece

    def close(self) -> None:
        self._ended()


def test_a_large_batch_is_answered_in_order_by_few_connections() -> None:
    workers = LargeBatch(stream=False)
    asking(workers, "/batch", check(b"+".join(b"%d" % number for number in range(LARGE))), Batching())
    assert (workers.most, len(workers.open), len(workers.sent)) == (MOST_OPEN, 0, LARGE)
    assert workers.fresh == LARGE - MOST_OPEN, "a kept connection may be closed in the moment of use"


def test_a_large_batch_of_streams_has_few_connections() -> None:
    workers = LargeBatch(stream=True)

    async def then(reply: UpstreamResponse) -> None:
        events = (await everything(reply)).split(b"\n\n")
        assert events[-2:] == [b"data: [DONE]", b""]
        assert sorted(events[:-2]) == sorted(b"data: %d%d" % (number, number) for number in range(LARGE))

    asking(workers, "/batch/stream", then, Batching())
    assert (workers.most, len(workers.open), len(workers.sent)) == (MOST_OPEN, 0, LARGE)
    assert workers.fresh == LARGE - MOST_OPEN, "a kept connection may be closed in the moment of use"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("number", [3, LARGE - 1])
def test_a_refusal_of_one_of_a_large_batch_ends_it(stream: bool, number: int) -> None:
    """A stream whose client has a part already ends with the worker's error as an event."""
    workers = LargeBatch(stream=stream, refused=number)

    async def then(reply: UpstreamResponse) -> None:
        said = await everything(reply)
        if stream and number >= MOST_OPEN:
            assert said.endswith(b'data: %d{"error": 1}\n\ndata: [DONE]\n\n' % number)
        else:
            assert (reply.status, said) == (400, b'{"error":\n1}')
        reply.close()
        await asyncio.sleep(0)

    asking(workers, "/batch" + "/stream" * stream, then, Batching())
    assert not workers.open


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("number", [3, LARGE - 1])
def test_a_lost_connection_of_a_large_batch_closes_the_others(stream: bool, number: int) -> None:
    workers = LargeBatch(stream=stream, lost=number)
    expected = UpstreamBrokenError if stream and number >= MOST_OPEN else ClosedBeforeReplyError
    with pytest.raises(expected, match="lost"):
        asking(workers, "/batch" + "/stream" * stream, everything, Batching())
    assert not workers.open


class ClosingVllm:
    """A worker that closes a kept connection when its second request comes, as one does whose connections were idle."""

    def __init__(self) -> None:
        self.answered: list[str] = []
        self.closed = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served = 0
        while True:
            head, body = await read_request(reader)
            path = head.split(" ")[1]
            asked = json.loads(body or b"{}")
            if "prompt" not in asked or path == "/tokenize":
                known = {
                    "/version": b'{"version":"0.32.0"}',
                    "/v1/completions": b"",
                    "/ping": b"{}",
                    "/tokenize": b"{}",
                }
                status = {"/v1/completions": 400}.get(path, 200 if path in known else 404)
                writer.write(_http(status, known.get(path, b"{}"), b"connection: close\r\n"))
                return
            if served:
                self.closed += 1
                return
            served += 1
            self.answered.append(asked["prompt"])
            one = {"index": 0, "text": asked["prompt"], "token_ids": [5], "finish_reason": "length"}
            writer.write(_http(200, json.dumps({"choices": [one]}).encode()))


def _http(status: int, body: bytes, more: bytes = b"") -> bytes:
    return b"HTTP/1.1 %d OK\r\ncontent-length: %d\r\n%b\r\n%b" % (status, len(body), more, body)


def test_stale_connections_of_the_only_worker_cost_a_batch_nothing() -> None:
    """Nothing of an answer has come, so the batch is sent again on new connections, and has one reply to each prompt."""

    async def main() -> None:
        worker = ClosingVllm()
        async with serving_socket(worker) as url, running([url]) as router:
            for batch in (["a", "b", "c", "d"], ["e", "f", "g"], ["h", "i"]):
                async with router.client.post("/generate", json={"text": batch}) as reply:
                    assert reply.status == 200, await reply.text()
                    assert [one["text"] for one in await reply.json()] == batch
            assert worker.closed, "a kept connection was used again"
            await router.idle()

    asyncio.run(main())
