"""What the benchmarks rest on: the client reads what came, an open loop counts what waited, a profile knows its parts."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import psutil
import pytest

from benchmarks.pages import put_between, spread, table
from benchmarks.serving.client import CLIENTS
from benchmarks.serving.conversations import Corpus
from benchmarks.serving.instant_engine import CannedReply
from benchmarks.serving.open_loop import OpenLoop
from benchmarks.serving.profile import CLIENT, METRICS, REPLY, REQUEST, ROUTER, SERVER, part, shares
from benchmarks.serving.targets import Target
from worker.http.serve import stop_listening

ROOT = Path(__file__).parents[1]
REPLY_JSON = b'{"text":" and so on"}'
Answering = Callable[[asyncio.StreamWriter], Awaitable[None]]


class Server:
    """Serves HTTP in this loop: reads requests, and lets a function answer them."""

    def __init__(self, answer: Answering) -> None:
        self._answer = answer
        self._served: list[asyncio.Task[None]] = []
        self.bodies: list[bytes] = []
        self.url = ""

    async def __aenter__(self) -> Server:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await stop_listening(self._server)
        await asyncio.gather(*self._served)  # until the clients have closed their connections

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._served.append(task)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
                self.bodies.append(await reader.readexactly(length))
                await self._answer(writer)
                await writer.drain()
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()


def whole(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def chunked(kind: bytes, *chunks: bytes) -> list[bytes]:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ntransfer-encoding: chunked\r\n\r\n" % kind
    return [head, *(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks), b"0\r\n\r\n"]


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_reads_whole_and_chunked_bodies_one_after_the_other(client: str) -> None:
    """However the bytes are cut: here one by one."""
    answers = [whole(b"[1]"), b"".join(chunked(b"application/json", b'{"a":', b"0}")), whole(b"")]

    async def answer(writer: asyncio.StreamWriter) -> None:
        for byte in answers.pop(0):
            writer.write(bytes([byte]))
            await asyncio.sleep(0)

    async def ask() -> list[bytes]:
        async with Server(answer) as server:
            made = await CLIENTS[client].connect(server.url)
            bodies = [(await made.post("/generate", b"{}")).body for _ in range(3)]
            await made.close()
            return bodies

    assert asyncio.run(ask()) == [b"[1]", b'{"a":0}', b""]


@pytest.mark.parametrize("client", CLIENTS)
def test_the_first_bytes_of_a_stream_have_their_own_time(client: str) -> None:
    written: list[float] = []

    async def answer(writer: asyncio.StreamWriter) -> None:
        for piece in chunked(b"text/event-stream", b"data: 1\n\n", b"data: [DONE]\n\n"):
            writer.write(piece)
            await writer.drain()
            written.append(time.perf_counter())
            await asyncio.sleep(0.05)

    async def ask() -> None:
        async with Server(answer) as server:
            made = await CLIENTS[client].connect(server.url)
            begun = time.perf_counter()
            got = await made.post("/generate", b"{}")
            assert begun < written[0] < got.first < written[2]
            assert b"data: [DONE]\n\n" in got.body
            await made.close()

    asyncio.run(ask())


class Sentences(Corpus):
    """Needs no vocabulary."""

    def __init__(self) -> None:
        self.made = 0

    def cut(self, tokens: int) -> str:
        self.made += 1
        return f"This is {self.made}."


@pytest.mark.slow
def test_an_open_loop_counts_what_waited_behind_a_slow_answer() -> None:
    """While nothing is answered, requests stay due: all are late, not only the one that a closed loop waits for."""
    held = 0.3

    async def measure() -> tuple[list[float], list[bytes]]:
        opened = asyncio.Event()

        async def answer(writer: asyncio.StreamWriter) -> None:
            if len(server.bodies) == 1:
                asyncio.get_running_loop().call_later(held, opened.set)
            await opened.wait()
            writer.write(whole(REPLY_JSON))

        async with Server(answer) as server:
            target = Target("server", server.url, psutil.Process(), keeps=True)
            loop = OpenLoop(target, Sentences(), 200)
            await loop.run(rate=100, count=200)
            return loop.latencies, server.bodies

    latencies, bodies = asyncio.run(measure())
    assert len(latencies) == len(bodies) == 200
    late = sorted(latencies, reverse=True)
    # 30 requests are due before the first answer, one after every 10 ms.
    assert late[0] > 0.25
    assert late[14] > 0.1
    turns = [msgspec.json.decode(body)["text"].count("and so on") for body in bodies]
    assert max(turns) == 3, "conversations have four turns"


@pytest.mark.parametrize(
    ("paths", "found"),
    [
        (["router/app.py"], ROUTER),
        (["asyncio/runners.py"], SERVER),
        (["asyncio/runners.py", "uvicorn/protocols/http/httptools_impl.py", "asyncio/sslproto.py"], SERVER),
        (["uvicorn/a.py", "router/proxy/proxy.py", "aiohttp/client.py", "asyncio/timeouts.py"], CLIENT),
        (["router/proxy/proxy.py", "uuid.py"], ROUTER),
        (["router/app.py", "middleware_hub/radix/match.py", "router/engines/json.py"], REQUEST),
        (
            ["middleware_hub/a.py", "router/generate/generations.py", "middleware_hub/b.py", "router/engines/c.py"],
            REPLY,
        ),
        (["middleware_hub/a.py", "router/observability/tallies.py", "prometheus_client/metrics.py"], METRICS),
    ],
)
def test_a_sample_counts_for_the_innermost_frame_that_belongs_to_a_part(paths: list[str], found: str) -> None:
    assert part(paths) == found


def test_shares_are_of_all_samples() -> None:
    raw = "run (asyncio/runners.py:118);send (uvicorn/a.py:1) 3\nrun (asyncio/runners.py:118);f (router/a.py:5) 1\n"
    assert {name: share for name, share in shares(raw).items() if share} == {SERVER: 0.75, ROUTER: 0.25}


def test_a_canned_reply_says_the_same_whole_and_streamed() -> None:
    reply = CannedReply([5, 6, 7], " a b", 7, [" a", " b", ""])
    answer = msgspec.json.decode(reply.whole(b"name", 3, logprobs=True))
    *events, done = reply.events(b"name", 3, logprobs=True)
    last = msgspec.json.decode(events[-1].removeprefix(b"data: "))
    assert done == b"data: [DONE]\n\n"
    assert len(events) == 3
    for key in ("text", "output_ids"):
        assert last[key] == answer[key]
    for key in ("id", "prompt_tokens", "completion_tokens", "output_token_logprobs"):
        assert last["meta_info"][key] == answer["meta_info"][key]
    assert "output_token_logprobs" not in msgspec.json.decode(reply.whole(b"name", 3, logprobs=False))["meta_info"]


def test_a_table_is_written_between_its_marks(tmp_path) -> None:
    page = tmp_path / "page.md"
    page.write_text("above\n<!-- begin: a -->\nold\n<!-- end: a -->\nbelow\n")
    put_between(page, "a", table(["what", "ms"], [["one", spread([0.3, 0.1, 0.2])]]))
    rows = "| what | ms |\n| --- | --: |\n| one | 0.20 (0.10-0.30) |"
    assert page.read_text() == f"above\n<!-- begin: a -->\n{rows}\n<!-- end: a -->\nbelow\n"


def test_each_part_of_the_benchmarks_has_its_place_on_the_page() -> None:
    """`make bench` and `make soak` write their tables between marks."""
    (parts,) = re.findall(r"^BENCHES := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    marks = [*(part.replace("_", " ") for part in parts.split()), "soak"]
    page = (ROOT / "docs" / "performance.md").read_text()
    assert sorted(re.findall("<!-- begin: (.+) -->", page)) == sorted(marks)
    assert sorted(re.findall("<!-- end: (.+) -->", page)) == sorted(marks)
