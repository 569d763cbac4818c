"""What a turn of an agent session costs: `python -m benchmarks.serving.sessions` (or `make bench`).

1, 8 and 32 sessions at a time send OpenAI chat completions: 50 turns each, 200 tokens in, 100 out, one tool call a turn. The
engine (`instant_engine.py`) answers at once, so all time is spent in the router, in the client, and between them. One session
of 2,000 turns shows how the cost of a turn grows with the length of its history.

CPU is what the operating system counted for the router's process. Client, router and engine share the same few cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import uvloop

from benchmarks.pages import machine, put_between
from benchmarks.processes import cpu_seconds, running
from benchmarks.serving.load import VOCABULARY, Texts
from tests.support import templates
from tests.support.sglang_server import free_port
from tests.support.vocabularies import load, vocabulary

TURNS, IN_TOKENS, OUT_TOKENS = 50, 200, 100
AT_A_TIME = (1, 8, 32)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "run",
            "description": "Run a command in a shell.",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string"}, "timeout": {"type": "integer"}},
                "required": ["command"],
            },
        },
    }
]
Row = dict[str, Any]


def sampled() -> tuple[list[int], str]:
    """Return the ids and the text of a reply of 100 tokens that ends with a tool call."""
    encode = load(VOCABULARY).encode
    call = '\n<tool_call>\n{"name": "run", "arguments": {"command": "ls -l /tmp", "timeout": 5}}\n</tool_call>'
    tail = encode(call, add_special_tokens=False).ids
    words = encode(
        "I look at what is in this folder, and then I think about it for a while. " * 20, add_special_tokens=False
    )
    ids = words.ids[: OUT_TOKENS - 1 - len(tail)]
    text = load(VOCABULARY).decode(ids) + call
    return [*ids, *tail], text


@contextlib.contextmanager
def processes() -> Iterator[tuple[str, psutil.Process]]:
    """Run the engine and the router. Yield the router's URL and process."""
    ids, text = sampled()
    eos = load(VOCABULARY).token_to_id("<|im_end|>")
    ports = free_port(), free_port()
    said = json.dumps({"ids": [*ids, eos], "text": text, "eos": eos}).encode()
    worker, router = f"http://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}"
    flags = ["--worker-urls", worker, "--tokenizer-path", str(vocabulary(VOCABULARY)), "--log-level", "warning"]
    flags += ["--chat-template", str(templates.folder() / "qwen2_5.jinja"), "--port", str(ports[1])]
    engine = running("benchmarks.serving.instant_engine", "--port", str(ports[0]), port=ports[0], stdin=said)
    with engine, running("router", *flags, port=ports[1]) as process:
        yield router, process


class Client:
    """A keep-alive connection that posts JSON. It uses no HTTP library, which would cost more than anything else here."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, url: str) -> Client:
        host, port = url.removeprefix("http://").split(":")
        return cls(*await asyncio.open_connection(host, int(port), limit=2**26))

    async def post(self, path: str, body: bytes) -> bytes:
        head = (
            f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self._writer.write(head.encode() + body)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        status = int(answer[9:12])
        lowered = answer.lower()
        at = lowered.index(b"content-length:") + 15
        content = await self._reader.readexactly(int(lowered[at : lowered.index(b"\r\n", at)]))
        if status >= 300:
            raise RuntimeError(f"{path}: {status} {content[:300]!r}")
        return content

    def close(self) -> None:
        self._writer.close()


async def converse(client: Client, observation: str, turns: int, times: list[float]) -> str:
    """Play one session to its last turn and append the seconds of each turn to `times`. Return the session's id."""
    name: str = json.loads(await client.post("/sessions", b"{}"))["session_id"]
    path = f"/sessions/{name}/v1/chat/completions"
    opening = b'{"model":"m","tools":' + json.dumps(TOOLS).encode() + b',"messages":['
    said = json.dumps({"role": "user", "content": observation}).encode()
    for _ in range(turns):
        begun = time.perf_counter()
        reply = await client.post(path, opening + said + b"]}")
        times.append(time.perf_counter() - begun)
        message = json.loads(reply)["choices"][0]["message"]
        (call,) = message["tool_calls"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": observation}
        said += b"," + json.dumps(message).encode() + b"," + json.dumps(result).encode()
    return name


async def round_of(url: str, process: psutil.Process, observation: str, at_a_time: int, turns: int) -> Row:
    clients = [await Client.connect(url) for _ in range(at_a_time)]
    times: list[float] = []
    before, begun = cpu_seconds(process), time.perf_counter()
    names = await asyncio.gather(*(converse(client, observation, turns, times) for client in clients))
    seconds = time.perf_counter() - begun
    used = cpu_seconds(process) - before
    for client, name in zip(clients, names, strict=True):
        request = urllib.request.Request(f"{url}/sessions/{name}", method="DELETE")
        await asyncio.to_thread(lambda one=request: urllib.request.urlopen(one).close())
        client.close()
    ordered = sorted(times)
    return {
        "sessions": at_a_time,
        "turns_per_second": len(times) / seconds,
        "p50_ms": 1000 * statistics.median(times),
        "p99_ms": 1000 * ordered[int(0.99 * (len(ordered) - 1))],
        "cpu_ms": 1000 * used / len(times),
    }


async def long_one(url: str, process: psutil.Process, observation: str, turns: int) -> list[Row]:
    """Play one long session. Return the median time of a turn around some lengths, and the memory that a turn adds."""
    client = await Client.connect(url)
    times: list[float] = []
    resident = process.memory_info().rss
    await converse(client, observation, turns, times)
    grown = process.memory_info().rss - resident
    client.close()
    found = [
        {"turn": turn, "p50_ms": 1000 * statistics.median(times[max(0, turn - 10) : turn + 10])}
        for turn in (10, 50, 200, 1000, 1990)
        if turn < turns
    ]
    return [*found, {"turn": turns, "bytes_per_turn": grown / turns}]


async def measure(rounds: int, turns: int) -> dict[str, Any]:
    observation = Texts().cut(IN_TOKENS)
    found: dict[int, list[Row]] = {count: [] for count in AT_A_TIME}
    with processes() as (url, process):
        await round_of(url, process, observation, 4, 10)
        for _ in range(rounds):
            for count in AT_A_TIME:
                found[count].append(await round_of(url, process, observation, count, TURNS))
                print(json.dumps(found[count][-1]), flush=True)
        long = await long_one(url, process, "One file: notes.txt.", turns)
        for row in long:
            print(json.dumps(row), flush=True)
    medians = [{key: statistics.median(row[key] for row in rows) for key in rows[0]} for rows in found.values()]
    return {"machine": machine(), "turns": medians, "long": long}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=2000, help="of the long session")
    parser.add_argument("--out", type=Path, help="where to write what was measured as JSON")
    parser.add_argument("--page", type=Path, help="a page with the marks between which the table goes")
    args = parser.parse_args()
    found = uvloop.run(measure(args.rounds, args.turns))
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    if args.page is not None:
        put_between(args.page, "sessions", table(found))


def table(found: dict[str, Any]) -> str:
    lines = [
        f"{found['machine']}. {TURNS} turns a session, {IN_TOKENS} tokens in, {OUT_TOKENS} out, medians of rounds.",
        "",
        "| sessions at a time | turns/s | p50, ms | p99, ms | CPU of the router a turn, ms |",
        "|---|---|---|---|---|",
    ]
    for row in found["turns"]:
        cells = [f"{row['sessions']:.0f}", f"{row['turns_per_second']:.0f}"]
        lines.append(f"| {' | '.join([*cells, *(f'{row[key]:.2f}' for key in ('p50_ms', 'p99_ms', 'cpu_ms'))])} |")
    *turns, last = found["long"]
    lines += [
        "",
        f"One session of {last['turn']} short turns: a turn adds {last['bytes_per_turn'] / 1024:.1f} kB to the process.",
        "",
    ]
    lines += ["| turn | p50, ms |", "|---|---|", *(f"| {row['turn']} | {row['p50_ms']:.2f} |" for row in turns)]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
