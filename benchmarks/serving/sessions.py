"""What a turn of an agent session costs: `python -m benchmarks.serving.sessions` (or `make bench`).

1, 8 and 32 sessions at a time send OpenAI chat completions: 50 turns each, 200 tokens in, 100 out, one tool call a turn. The
engine (`instant_engine.py`) answers at once, so all time is spent in the router, in the client, and between them. One session
of 2,000 turns shows how the cost of a turn grows with the length of its history.

CPU is what the operating system counted for the router's process, and for the client, which shares the few cores with it. The
client of `--client raw` is as cheap as possible; that of `--client aiohttp` is one that people use.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec
import psutil
import uvloop

from benchmarks.pages import machine, spread, table
from benchmarks.processes import cpu_seconds, running, settle
from benchmarks.serving.client import CLIENTS, Client
from benchmarks.serving.conversations import VOCABULARY, Corpus, tokenizer_folder
from benchmarks.serving.targets import add_options, write
from tests.support import templates
from tests.support.engine_server import free_port
from tests.support.vocabularies import load

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
Served = tuple[str, psutil.Process, Callable[[str], Awaitable[Client]]]
"""The router's URL and process, and what connects a client to a URL."""
encode, decode = msgspec.json.encode, msgspec.json.decode


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
    flags = ["--worker-urls", worker, "--tokenizer-path", tokenizer_folder(), "--log-level", "warning"]
    flags += ["--chat-template", str(templates.folder() / "qwen2_5.jinja"), "--port", str(ports[1])]
    engine = running("benchmarks.serving.instant_engine", "--port", str(ports[0]), port=ports[0], stdin=said)
    with engine, running("router", *flags, port=ports[1]) as process:
        yield router, process


async def post(client: Client, path: str, body: bytes) -> bytes:
    """Return the body of the answer. Raises RuntimeError for an error."""
    answer = await client.post(path, body)
    if answer.status >= 300:
        raise RuntimeError(f"{path}: {answer.status} {answer.body[:300]!r}")
    return answer.body


async def converse(client: Client, observation: str, turns: int, times: list[float]) -> str:
    """Play one session to its last turn and append the seconds of each turn to `times`. Return the session's id."""
    name: str = json.loads(await post(client, "/sessions", b"{}"))["session_id"]
    path = f"/sessions/{name}/v1/chat/completions"
    said = bytearray(b'{"model":"m","tools":%b,"messages":[' % encode(TOOLS))
    said += encode({"role": "user", "content": observation})
    for _ in range(turns):
        begun = time.perf_counter()
        reply = await post(client, path, bytes(said) + b"]}")
        times.append(time.perf_counter() - begun)
        message = decode(reply)["choices"][0]["message"]
        (call,) = message["tool_calls"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": observation}
        said += b",%b,%b" % (encode(message), encode(result))
    return name


async def round_of(served: Served, observation: str, at_a_time: int, turns: int) -> Row:
    url, process, connect = served
    clients = [await connect(url) for _ in range(at_a_time)]
    times: list[float] = []
    before, own, begun = cpu_seconds(process), time.process_time(), time.perf_counter()
    names = await asyncio.gather(*(converse(client, observation, turns, times) for client in clients))
    seconds = time.perf_counter() - begun
    used = cpu_seconds(process) - before
    spent = time.process_time() - own
    for client, name in zip(clients, names, strict=True):
        request = urllib.request.Request(f"{url}/sessions/{name}", method="DELETE")
        (await asyncio.to_thread(urllib.request.urlopen, request)).close()
        await client.close()
    ordered = sorted(times)
    return {
        "sessions": at_a_time,
        "per_second": len(times) / seconds,
        "p50_ms": 1000 * statistics.median(times),
        "p99_ms": 1000 * ordered[int(0.99 * (len(ordered) - 1))],
        "cpu_ms": 1000 * used / len(times),
        "client_cpu_ms": 1000 * spent / len(times),
    }


async def long_one(served: Served, observation: str, turns: int) -> list[Row]:
    """Play one long session. Return the median time of a turn around some lengths, and the memory that a turn adds."""
    url, process, connect = served
    client = await connect(url)
    times: list[float] = []
    resident = process.memory_info().rss
    await converse(client, observation, turns, times)
    grown = process.memory_info().rss - resident
    await client.close()
    found = [
        {"turn": turn, "p50_ms": 1000 * statistics.median(times[max(0, turn - 10) : turn + 10])}
        for turn in (10, 50, 200, 1000, 1990)
        if turn < turns
    ]
    return [*found, {"turn": turns, "bytes_per_turn": grown / turns}]


async def measure(rounds: int, turns: int, client: str) -> dict[str, Any]:
    observation = Corpus().cut(IN_TOKENS)
    found: dict[int, list[Row]] = {count: [] for count in AT_A_TIME}
    with processes() as (url, process):
        served = (url, process, CLIENTS[client].connect)
        await round_of(served, observation, 4, 10)
        await asyncio.to_thread(settle, process)
        for _ in range(rounds):
            for count in AT_A_TIME:
                found[count].append(await round_of(served, observation, count, TURNS))
                print(json.dumps(found[count][-1]), flush=True)
        long = await long_one(served, "One file: notes.txt.", turns)
        for row in long:
            print(json.dumps(row), flush=True)
    return {"turns": [{"sessions": count, "rounds": rows} for count, rows in found.items()], "long": long}


def tables(found: dict[str, Any]) -> str:
    rows = [
        [
            str(row["sessions"]),
            *(
                spread([one[key] for one in row["rounds"]], digits)
                for key, digits in {"per_second": 0, "p50_ms": 2, "p99_ms": 2, "cpu_ms": 2, "client_cpu_ms": 2}.items()
            ),
        ]
        for row in found["turns"]
    ]
    *turns, last = found["long"]
    kilobytes = last["bytes_per_turn"] / 1024
    about = (
        f"{TURNS} turns a session, {IN_TOKENS} tokens in, {OUT_TOKENS} out. The median of the rounds (least-largest)."
    )
    head = ["sessions at a time", "turns/s", "p50, ms", "p99, ms", "CPU of the router a turn, ms", "of the client, ms"]
    return "\n\n".join(
        [
            f"{machine()}. {about}",
            table(head, rows, words=0),
            f"One session of {last['turn']} short turns: a turn adds {kilobytes:.1f} kB to the process.",
            table(["turn", "p50, ms"], [[str(row["turn"]), f"{row['p50_ms']:.2f}"] for row in turns], words=0),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, rounds=5)
    parser.add_argument("--turns", type=int, default=2000, help="of the long session (%(default)s)")
    parser.add_argument("--client", choices=CLIENTS, default="raw", help="the library that sends the requests")
    args = parser.parse_args()
    found = uvloop.run(measure(args.rounds, args.turns, args.client))
    write(args, "sessions", tables(found), found)


if __name__ == "__main__":
    main()
