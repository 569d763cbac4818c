"""An engine that answers `/generate` at once with one canned reply; it only counts the prompt's tokens.

`python -m benchmarks.serving.instant_engine --port N` reads its reply from stdin: `{"ids": [...], "text": "...", "eos": id}`.
It uses no framework, because the measurement is of what stands in front of it, and speaks just enough HTTP/1.1 for the router.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import cast

import msgspec
import uvloop


class _InstantConnection(asyncio.Protocol):
    def __init__(self, reply: tuple[bytes, bytes]) -> None:
        self._reply = reply
        self._buffer = bytearray()
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is no subclass

    def data_received(self, data: bytes) -> None:
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
            self._transport.write(self._answer(head, body))

    def _answer(self, head: bytes, body: bytes) -> bytes:
        if not head.startswith(b"post /generate"):
            content = b'{"model_path":"instant","weight_version":"1","tokenizer_path":"x"}'
        else:
            ids = body.find(b'"input_ids":[')  # a router without its middleware sends text
            count = body.count(b",", ids, body.index(b"]", ids)) + 1 if ids >= 0 else 0
            rid = body.find(b'"rid":"') + 7
            before, behind = self._reply
            name = body[rid : body.index(b'"', rid)] if rid >= 7 else b"unnamed"
            content = before % name + str(count).encode() + behind
        return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
            len(content),
            content,
        )


def reply_of(ids: list[int], text: str, eos: int) -> tuple[bytes, bytes]:
    """Return the parts of a reply before and behind the number of prompt tokens; `%b` stands for the request's id."""
    made = {
        "text": text,
        "output_ids": ids,
        "meta_info": {
            "id": "NAME",
            "finish_reason": {"type": "stop", "matched": eos},
            "prompt_tokens": 4_294_967_296,
            "weight_version": "1",
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "output_token_logprobs": [[-0.5 - number / 128, token, None] for number, token in enumerate(ids)],
            "output_token_logprobs_length": len(ids),
            "weight_versions": [{"version": "1", "start": 0, "end": len(ids)}],
        },
    }
    before, behind = msgspec.json.encode(made).split(b"4294967296")
    return before.replace(b"%", b"%%").replace(b"NAME", b"%b"), behind


async def serve(port: int, reply: tuple[bytes, bytes]) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: _InstantConnection(reply), "127.0.0.1", port)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args(sys.argv[1:])
    said = msgspec.json.decode(sys.stdin.buffer.read())
    uvloop.run(serve(args.port, reply_of(said["ids"], said["text"], said["eos"])))


if __name__ == "__main__":
    main()
