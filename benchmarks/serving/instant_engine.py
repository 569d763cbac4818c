"""An engine that answers `/generate` at once with canned replies; it only counts the prompt's tokens.

`python -m benchmarks.serving.instant_engine --port N` reads its replies from stdin, one a line, and gives them in turn:
`{"ids": [...], "text": "...", "eos": id}`, for streams also `"pieces": [...]`, the text of each id. Logprobs come if the
request asks for them. A stream is cumulative, as SGLang's own is: each event has everything so far, and one token more. With
`--incremental` it has only what is new, as with SGLang's `--incremental-streaming-output`.

With `--tokenizer-path` it does with a prompt and a reply what SGLang 0.5.23 does with its tokenizer: it encodes all of a text
with the tokenizer of transformers (ids it only checks), and decodes what was sampled, 50 tokens at a time.

It uses no framework, because the measurement is of what stands in front of it, and speaks just enough HTTP/1.1.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import sys
from array import array
from collections.abc import Iterator
from random import Random
from typing import Any, cast
from uuid import uuid4

import msgspec
import uvloop

ABOUT = {
    "model_path": "instant",
    "served_model_name": "instant",
    "tokenizer_path": "x",
    "weight_version": "1",
    "is_generation": True,
    "version": "0.5.23",
}
MODELS = {"object": "list", "data": [{"id": "instant", "object": "model", "owned_by": "sglang"}]}
NAME, COUNT = uuid4().hex, uuid4().hex  # stand for a request's id and its number of prompt tokens
_INTERVAL = b'"stream_interval":'
CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class CannedReply:
    """One reply. Its bytes are made once, but for what differs from request to request."""

    def __init__(self, ids: list[int], text: str, eos: int, pieces: list[str] | None = None) -> None:
        self.ids = ids
        self._pieces = pieces or []
        random = Random(len(text))
        floats = array("f", (math.log(1 - random.random()) for _ in ids))  # as an engine has them: 32 bits
        self.logprobs = [[logprob, token, None] for logprob, token in zip(floats, ids, strict=True)]
        meta: dict[str, Any] = {
            "id": NAME,
            "finish_reason": {"type": "stop", "matched": eos},
            "prompt_tokens": COUNT,
            "weight_version": "1",
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_versions": [{"version": "1", "start": 0, "end": len(ids)}],
        }
        with_logprobs = {"output_token_logprobs": self.logprobs, "output_token_logprobs_length": len(ids)}
        self._bare = self._parts({"text": text, "output_ids": ids, "meta_info": meta})
        self._full = self._parts({"text": text, "output_ids": ids, "meta_info": meta | with_logprobs})

    @staticmethod
    def _parts(reply: dict[str, Any]) -> tuple[bytes, bytes, bytes]:
        """Return the parts before, between and after the request's id and the number of prompt tokens."""
        before, rest = msgspec.json.encode(reply).split(NAME.encode())
        between, behind = rest.split(b'"%b"' % COUNT.encode())
        return before, between, behind

    def whole(self, name: bytes, prompt_tokens: int, *, logprobs: bool) -> bytes:
        before, between, behind = self._full if logprobs else self._bare
        return b"%b%b%b%d%b" % (before, name, between, prompt_tokens, behind)

    def events(
        self, name: bytes, prompt_tokens: int, *, logprobs: bool, incremental: bool = False, interval: int = 1
    ) -> Iterator[bytes]:
        """Yield an event for the first token, and then one for every `interval` tokens."""
        text, ids, floats = b"", b"", b""
        for count, (token, piece) in enumerate(zip(self.ids, self._pieces, strict=True), 1):
            comma = b"," if ids else b""
            text += msgspec.json.encode(piece)[1:-1]
            ids += b"%b%d" % (comma, token)
            floats += comma + msgspec.json.encode(self.logprobs[count - 1])
            finish = b"null" if count < len(self.ids) else b'{"type":"length","length":%d}' % count
            if (count - 1) % interval and count < len(self.ids):
                continue
            kept = b'"input_token_logprobs":[],"output_token_logprobs":[%b],"output_token_logprobs_length":%d,' % (
                floats,
                count,
            )
            yield (
                b'data: {"text":"%b","output_ids":[%b],"meta_info":{"id":"%b","finish_reason":%b,"prompt_tokens":%d,'
                b'"weight_version":"1","num_retractions":0,%b"reasoning_tokens":0,"completion_tokens":%d,'
                b'"cached_tokens":0,"cached_tokens_details":null,"dp_rank":null}}\n\n'
                % (text, ids, name, finish, prompt_tokens, kept if logprobs else b"", count)
            )
            if incremental:
                text, ids, floats = b"", b"", b""
        yield b"data: [DONE]\n\n"


class SGLangTokenizer:
    """Does the work of SGLang's tokenizer and detokenizer for one request at a time."""

    CONTEXT = 5  # tokens of the prompt that are decoded in front of a reply
    INTERVAL = 50  # tokens after which what was sampled is decoded, of a request that is not streamed

    def __init__(self, folder: str) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(folder)

    def work(self, body: bytes, reply: list[int]) -> int:
        """Encode a request's prompt and decode its reply. Return the number of prompt tokens."""
        request = json.loads(body)
        ids: list[int] = request.get("input_ids")
        if ids is None:
            ids = self._tokenizer([request["text"]])["input_ids"][0]
        else:
            array("q", ids)  # raises an error for what is not an int
        decoded = ids[-self.CONTEXT :]
        before, read = 0, len(decoded)
        texts = []
        for start in range(0, len(reply), self.INTERVAL):
            decoded += reply[start : start + self.INTERVAL]
            (known,) = self._tokenizer.batch_decode([decoded[before:read]], skip_special_tokens=True)
            (text,) = self._tokenizer.batch_decode([decoded[before:]], skip_special_tokens=True)
            texts.append(text[len(known) :])
            before, read = read, len(decoded)
        return len(ids)


class Engine:
    """Chooses the answers. `pause` is in seconds, for each token between the events of a stream."""

    def __init__(
        self, replies: list[CannedReply], tokenizer: SGLangTokenizer | None, pause: float, *, incremental: bool = False
    ) -> None:
        self._replies = itertools.cycle(replies)
        self._tokenizer = tokenizer
        self._incremental = incremental
        self._pause = pause

    def generate(self, body: bytes) -> bytes | tuple[Iterator[bytes], float]:
        """Return the body of a reply, or the events of a stream and the seconds between them."""
        reply = next(self._replies)
        if self._tokenizer is None:
            ids = body.find(b'"input_ids":[')  # a router without its middleware sends text
            count = body.count(b",", ids, body.index(b"]", ids)) + 1 if ids >= 0 else 0
        else:
            count = self._tokenizer.work(body, reply.ids)
        rid = body.find(b'"rid":"') + 7
        name = body[rid : body.index(b'"', rid)] if rid >= 7 else b"unnamed"
        logprobs = b'"return_logprob":true' in body
        if b'"stream":true' in body:
            at = body.find(_INTERVAL) + len(_INTERVAL)
            interval = int(body[at : at + 4].partition(b",")[0].rstrip(b"}, ")) if at >= len(_INTERVAL) else 1
            events = reply.events(name, count, logprobs=logprobs, incremental=self._incremental, interval=interval)
            return events, self._pause * interval
        return reply.whole(name, count, logprobs=logprobs)


class _EngineConnection(asyncio.Protocol):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._buffer = bytearray()
        self._transport: asyncio.Transport
        self._writable = asyncio.Event()
        self._writable.set()
        self._streaming: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is no subclass

    def connection_lost(self, _: Exception | None) -> None:
        if self._streaming is not None:
            self._streaming.cancel()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        if not self._buffer and data.startswith(b"PRI "):  # a router tries HTTP/2
            self._transport.close()
            return
        self._buffer += data
        while True:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self._buffer[:end]).lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._buffer) < end + 4 + length:
                return
            body = bytes(self._buffer[end + 4 : end + 4 + length])
            del self._buffer[: end + 4 + length]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"post /generate"):
            content = self._engine.generate(body)
        else:
            content = msgspec.json.encode(MODELS if head.startswith(b"get /v1/models") else ABOUT)
        if isinstance(content, bytes):
            start = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(content)
            self._transport.write(start + content)
        else:
            self._streaming = asyncio.get_running_loop().create_task(self._stream(*content))

    async def _stream(self, events: Iterator[bytes], pause: float) -> None:
        self._transport.write(CHUNKED)
        for event in events:
            self._transport.write(b"%x\r\n%b\r\n" % (len(event), event))
            await asyncio.sleep(pause)
            await self._writable.wait()
        self._transport.write(b"0\r\n\r\n")


async def serve(port: int, engine: Engine) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _EngineConnection(engine), "127.0.0.1", port, backlog=2048)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tokenizer-path", help="encode and decode as SGLang does, with the tokenizer of this folder")
    parser.add_argument("--pause", type=float, default=0, help="seconds between the tokens of a stream")
    parser.add_argument("--incremental", action="store_true", help="events have only what is new")
    args = parser.parse_args(sys.argv[1:])
    replies = [CannedReply(**msgspec.json.decode(line)) for line in sys.stdin.buffer]
    tokenizer = SGLangTokenizer(args.tokenizer_path) if args.tokenizer_path else None
    engine = Engine(replies, tokenizer, args.pause, incremental=args.incremental)
    uvloop.run(serve(args.port, engine))


if __name__ == "__main__":
    main()
