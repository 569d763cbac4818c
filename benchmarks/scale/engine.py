"""A group of engines that step: at each step of an engine, each of its open streams gets one token, in an event of its own.

`python -m benchmarks.scale.engine --ports P ... --pause SECONDS` reads its replies from stdin as `instant_engine` does. All
engines are one process with one timer each, because they share the cores with what is measured: an event takes one formatting
and one write. Events are incremental, have the fields and sizes of SGLang's, and have logprobs if the request asks for them. A
stream has as many tokens as its request's `max_new_tokens` says; a canned reply that is shorter is repeated.

An engine that cannot keep its pace steps late, and never leaves a step out. `GET /counts` says how many events all have sent,
how many streams are open, and how late the latest step was.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from typing import cast

import msgspec
import uvloop

from benchmarks.serving.instant_engine import ABOUT, CHUNKED, MODELS, CannedReply

DONE = b"data: [DONE]\n\n"
_END = b"%x\r\n%b\r\n0\r\n\r\n" % (len(DONE), DONE)
_EVENT = (
    b'%b%b%b%b"weight_version":"%b","num_retractions":0,%b"reasoning_tokens":0,"completion_tokens":%d,'
    b'"cached_tokens":0,"cached_tokens_details":null,"dp_rank":null}}\n\n'
)
_MOST = b'"max_new_tokens":'


class Tokens:
    """A canned reply, with the parts of its events that are the same in all streams."""

    def __init__(self, ids: Sequence[int], pieces: Sequence[str]) -> None:
        logprobs = CannedReply(list(ids), "".join(pieces), ids[-1]).logprobs
        self.parts = [
            (
                b'data: {"text":"%b","output_ids":[%d],"meta_info":{"id":"' % (msgspec.json.encode(piece)[1:-1], token),
                b'"input_token_logprobs":[],"output_token_logprobs":[%b],' % msgspec.json.encode(logprob),
            )
            for token, piece, logprob in zip(ids, pieces, logprobs, strict=True)
        ]


class Stream:
    """One open stream."""

    def __init__(
        self, group: Group, transport: asyncio.Transport, name: bytes, most: int, prompt: int, *, logprobs: bool
    ) -> None:
        self._group = group
        self._transport = transport
        self._parts = itertools.cycle(next(group.replies).parts)
        self._most = most
        self._logprobs = logprobs
        self._name = b'%b","finish_reason":' % name
        self._prompt = b',"prompt_tokens":%d,' % prompt
        self._sent = 0
        transport.write(CHUNKED)

    def step(self) -> bool:
        """Send the next token. Return whether it was not the last one."""
        if self._transport.is_closing():
            return False
        before, kept = next(self._parts)
        self._sent = count = self._sent + 1
        last = count == self._most
        event = _EVENT % (
            before,
            self._name,
            b'{"type":"length","length":%d}' % count if last else b"null",
            self._prompt,
            self._group.version,
            b'%b"output_token_logprobs_length":%d,' % (kept, count) if self._logprobs else b"",
            count,
        )
        self._transport.write(b"%x\r\n%b\r\n%b" % (len(event), event, _END if last else b""))
        return not last


class Group:
    """All engines.

    Attributes:
        events: how many were sent.
        late: by how many seconds the latest step was late, since it was read.
        version: of the weights, which a call to any engine updates for all.
    """

    def __init__(self, replies: Sequence[Tokens], pause: float) -> None:
        self.replies = itertools.cycle(replies)
        self.pause = pause
        self.engines: list[Engine] = []
        self.events = 0
        self.late = 0.0
        self.version = b"1"

    def answer(self, head: bytes, body: bytes) -> bytes:
        """Return the JSON for a request that is no `/generate`. `head` is in lower case."""
        if head.startswith(b"get /counts"):
            return self.counts()
        if head.startswith(b"get /v1/models"):
            return msgspec.json.encode(MODELS)
        if head.startswith(b"post /update_weights_from"):
            self.version = json.loads(body)["weight_version"].encode()
            return b'{"success":true,"message":"updated"}'
        return msgspec.json.encode({**ABOUT, "weight_version": self.version.decode()})

    def counts(self) -> bytes:
        late, self.late = self.late, 0.0
        opened = sum(len(engine.streams) for engine in self.engines)
        return msgspec.json.encode({"events": self.events, "open": opened, "late": late})

    def start(self) -> None:
        """Begin to step, one engine after the other."""
        now = asyncio.get_running_loop().time()
        for number, engine in enumerate(self.engines):
            engine.step_at(now + self.pause * number / len(self.engines))


class Engine:
    """One engine: its open streams, and its clock."""

    def __init__(self, group: Group) -> None:
        self.streams: list[Stream] = []
        self._group = group

    def step_at(self, due: float) -> None:
        asyncio.get_running_loop().call_at(due, self._step, due)

    def _step(self, due: float) -> None:
        group, now = self._group, asyncio.get_running_loop().time()
        group.late = max(group.late, now - due)
        group.events += len(self.streams)
        self.streams = [stream for stream in self.streams if stream.step()]
        self.step_at(due + group.pause)

    def open(self, transport: asyncio.Transport, body: bytes) -> None:
        """Begin the stream that a request asks for."""
        ids = body.find(b'"input_ids":[')  # a router without its middleware sends text
        prompt = body.count(b",", ids, body.index(b"]", ids)) + 1 if ids >= 0 else 0
        rid = body.find(b'"rid":"') + 7
        name = body[rid : body.index(b'"', rid)] if rid >= 7 else b"unnamed"
        at = body.index(_MOST) + len(_MOST)
        most = int(body[at : at + 12].partition(b"}")[0].partition(b",")[0])
        logprobs = b'"return_logprob":true' in body
        self.streams.append(Stream(self._group, transport, name, most, prompt, logprobs=logprobs))


class _Connection(asyncio.Protocol):
    def __init__(self, group: Group, engine: Engine) -> None:
        self._group = group
        self._engine = engine
        self._buffer = bytearray()
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is no subclass

    def data_received(self, data: bytes) -> None:
        if not self._buffer and data.startswith(b"PRI "):  # a router tries HTTP/2
            self._transport.close()
            return
        self._buffer += data
        for head, body in self._requests():
            if head.startswith(b"post /generate"):
                self._engine.open(self._transport, body)
                continue
            content = self._group.answer(head, body)
            start = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(content)
            self._transport.write(start + content)

    def _requests(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield the head, in lower case, and the body of each request that is whole."""
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._buffer[:end]).lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._buffer) < end + 4 + length:
                return
            body = bytes(self._buffer[end + 4 : end + 4 + length])
            del self._buffer[: end + 4 + length]
            yield head, body


async def serve(ports: Sequence[int], group: Group) -> None:
    loop = asyncio.get_running_loop()
    for port in ports:
        engine = Engine(group)
        group.engines.append(engine)
        await loop.create_server(lambda one=engine: _Connection(group, one), "127.0.0.1", port, backlog=4096)  # type: ignore[misc]
    group.start()
    await loop.create_future()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ports", type=int, nargs="+", required=True)
    parser.add_argument("--pause", type=float, required=True, help="seconds from a step of an engine to its next")
    args = parser.parse_args()
    lines = [json.loads(line) for line in sys.stdin.buffer]
    # Without the end token that stands last: a reply may be repeated.
    replies = [Tokens(one["ids"][:-1], one["pieces"][:-1]) for one in lines]
    uvloop.run(serve(args.ports, Group(replies, args.pause)))


if __name__ == "__main__":
    main()
