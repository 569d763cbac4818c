"""Timed workers: engines of `/generate` in one process, one for each rank of each worker, with a prefix cache of its own.

`python -m benchmarks.routing.fleet --ports P P P P --speed X [--ranks N]` reads its words from stdin: `{"words": [...],
"ids": [...], "tokenizer": path}`. Each word has `WIDTH` characters and is one token, so text and ids look the same: `WIDTH`
bytes a token.

A reply takes the time of `benchmarks.routing.simulation`, divided by `speed`: for the prompt tokens that are not cached, and
for the sampled tokens, which are slower the more requests the rank has in flight. `meta_info` reports the rank, counted over
all workers, the prompt tokens, and how many of them were cached. Requests that name no rank get them in turn, as with SGLang.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from array import array
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any, cast

import httptools
import msgspec
import uvloop

from benchmarks.routing.simulation import CROWD, DECODE, PREFILL

WIDTH = 4
PAGE = 16 * WIDTH  # bytes: a page of 16 tokens


class TimedRequest(msgspec.Struct):
    """The fields of a request that count; others are ignored."""

    sampling_params: dict[str, Any]
    text: str | None = None
    input_ids: list[int] | None = None
    rid: str | None = None
    return_logprob: bool = False
    routed_dp_rank: int | None = None


class PrefixCache:
    """The pages that a worker has computed, each identified by its whole prefix; nothing is evicted."""

    def __init__(self) -> None:
        self._known: set[int] = set()

    def match(self, key: bytes) -> int:
        """Return the number of cached tokens, in whole pages."""
        path = 0
        for start in range(0, len(key) - PAGE + 1, PAGE):
            path = hash((path, key[start : start + PAGE]))
            if path not in self._known:
                return start // WIDTH
        return len(key) // PAGE * PAGE // WIDTH

    def insert(self, key: bytes) -> None:
        path = 0
        for start in range(0, len(key) - PAGE + 1, PAGE):
            path = hash((path, key[start : start + PAGE]))
            self._known.add(path)


class TimedEngine:
    """One rank of a worker: its replies and their duration."""

    def __init__(self, number: int, words: list[str], ids: list[int], speed: float) -> None:
        self.number = number
        self._speed = speed
        self._random = random.Random(number)
        picked = self._random.choices(range(len(words)), k=200_000)
        self._text = "".join(words[index] for index in picked)
        self._ids = array("i", (ids[index] for index in picked))
        self._cache = PrefixCache()
        self._numbers = count()
        self.inflight = 0

    def begin(self, request: TimedRequest) -> tuple[float, bytes, bytes]:
        """Return the seconds that the request takes, the reply, and the key for `finish`."""
        given = request.input_ids
        key = (request.text or "").encode() if given is None else array("i", given).tobytes()
        tokens = int(request.sampling_params["max_new_tokens"])
        start = self._random.randrange(len(self._ids) - tokens)
        cached = self._cache.match(key)
        self.inflight += 1
        slow = DECODE * (1 + self.inflight / CROWD)
        seconds = ((len(key) // WIDTH - cached) / PREFILL + tokens * slow) / self._speed
        ids = self._ids[start : start + tokens]
        text = self._text[start * WIDTH : (start + tokens) * WIDTH]
        meta: dict[str, Any] = {
            "id": request.rid or f"{self.number}-{next(self._numbers)}",
            "finish_reason": {"type": "length", "length": tokens},
            "prompt_tokens": len(key) // WIDTH,
            "completion_tokens": tokens,
            "cached_tokens": cached,
            "weight_version": "1",
            "worker": self.number,
        }
        if request.return_logprob:
            meta["output_token_logprobs"] = [(-0.5, token, None) for token in ids]
        reply = msgspec.json.encode({"text": text, "output_ids": ids.tolist(), "meta_info": meta})
        return seconds, reply, key + (text.encode() if given is None else ids.tobytes())

    def finish(self, key: bytes) -> None:
        self.inflight -= 1
        self._cache.insert(key)


def other_answers(tokenizer: str, ranks: int) -> dict[bytes, bytes]:
    """Return the answers to what routers ask about a worker, by path."""
    model = {
        "model_path": tokenizer,
        "served_model_name": "timed",
        "tokenizer_path": tokenizer,
        "weight_version": "1",
        "is_generation": True,
        "max_total_num_tokens": 1_000_000_000,
        "context_length": 1_000_000,
        "tp_size": 1,
        "dp_size": ranks,
        "version": "0.5.10",
    }
    models = {"object": "list", "data": [{"id": "timed", "object": "model", "owned_by": "sglang"}]}
    known = dict.fromkeys(("/model_info", "/get_model_info", "/server_info", "/get_server_info"), model)
    health: dict[str, Any] = {path: {} for path in ("/health", "/health_generate", "/ping")}
    return {
        path.encode(): msgspec.json.encode(answer) for path, answer in (known | health | {"/v1/models": models}).items()
    }


class EngineConnection(asyncio.Protocol):
    """HTTP/1.1 for one worker, one request at a time."""

    def __init__(self, engines: Sequence[TimedEngine], turns: Iterator[int], others: dict[bytes, bytes]) -> None:
        """`engines`: the ranks. `turns`: numbers for requests that name none."""
        self._engines = engines
        self._turns = turns
        self._others = others
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body = bytearray()
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is no subclass

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:  # a client probes for HTTP/2
            self._transport.close()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        path, body = self._url.partition(b"?")[0], bytes(self._body)
        self._url = b""
        self._body.clear()
        if path != b"/generate":
            self._answer(b"200 OK" if path in self._others else b"404 Not Found", self._others.get(path, b"{}"))
            return
        request = msgspec.json.decode(body, type=TimedRequest)
        rank = next(self._turns) if request.routed_dp_rank is None else request.routed_dp_rank
        engine = self._engines[rank % len(self._engines)]
        seconds, reply, key = engine.begin(request)
        asyncio.get_running_loop().call_later(seconds, self._generated, engine, reply, key)

    def _generated(self, engine: TimedEngine, reply: bytes, key: bytes) -> None:
        engine.finish(key)
        if not self._transport.is_closing():
            self._answer(b"200 OK", reply)

    def _answer(self, status: bytes, content: bytes) -> None:
        head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(content))
        self._transport.write(head + content)


async def serve(workers: dict[int, list[TimedEngine]], others: dict[bytes, bytes]) -> None:
    """Serve each worker, given by its ranks, at its port."""
    loop = asyncio.get_running_loop()
    for port, engines in workers.items():
        make = partial(EngineConnection, engines, count(), others)
        await loop.create_server(make, "127.0.0.1", port, backlog=2048)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ports", type=int, nargs="+", required=True)
    parser.add_argument("--speed", type=float, required=True, help="how many times as fast as the simulation's workers")
    parser.add_argument("--ranks", type=int, default=1, help="of each worker")
    args = parser.parse_args()
    said = msgspec.json.decode(sys.stdin.buffer.read())
    ranks = range(args.ranks)
    workers = {
        port: [TimedEngine(number * len(ranks) + rank, said["words"], said["ids"], args.speed) for rank in ranks]
        for number, port in enumerate(args.ports)
    }
    uvloop.run(serve(workers, other_answers(said["tokenizer"], len(ranks))))


if __name__ == "__main__":
    main()
