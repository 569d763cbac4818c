"""What the router costs under load, compared with a worker alone and with the barest proxy of the same stack.

`python -m benchmarks.serving.load` (or `make bench`) starts a scripted worker and the targets in front of it: nothing, the bare
proxy (`bare_proxy.py`), the router without its middleware, and the router. Each target serves a closed loop of conversations as
text: a first prompt of 1,000 tokens, then turn after turn the reply and an observation of 100 tokens, without logprobs. The
targets take turns, round by round; the result of each is the median of its rounds.

CPU is what the operating system counted for the target's process and threads, per request; it hardly depends on how busy the
machine is. Requests per second and latencies do, because client, router and worker share the same few cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil

from benchmarks.pages import machine, put_between
from benchmarks.processes import ROOT, cpu_seconds, running
from tests.support.sglang_server import free_port
from tests.support.vocabularies import load, vocabulary

VOCABULARY = "qwen"
PROMPT_TOKENS = 1000
OBSERVATION_TOKENS = 100
TARGETS = ("worker", "floor", "floor-json", "proxy", "router")
NAMES = {
    "worker": "the worker itself",
    "floor": "bare proxy",
    "floor-json": "bare proxy that parses and prints JSON",
    "proxy": "router, `--middleware none`",
    "router": "router",
}
Row = dict[str, Any]
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Cell:
    """A kind of load."""

    connections: int
    reply_tokens: int
    turns: int
    stream: bool


@dataclass(frozen=True)
class Sample:
    """One round of one target in one cell. Times in milliseconds, CPU per request, memory in MB."""

    requests: int
    per_second: float
    p50: float
    p99: float
    cpu: float
    rss: float


class Texts:
    """Cuts prompts and observations of a given number of tokens out of this repository's own prose and code."""

    def __init__(self) -> None:
        tokenizer = load(VOCABULARY)
        paths = [*sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("middleware_hub/*.py"))]
        whole = "\n".join(path.read_text() for path in paths)
        ends = [end for _, end in tokenizer.encode(whole, add_special_tokens=False).offsets]
        self._whole = whole
        self._ends = ends
        self._random = random.Random(0)

    def cut(self, tokens: int) -> str:
        """Return a random piece of this many tokens."""
        first = self._random.randrange(len(self._ends) - tokens - 1)
        return self._whole[self._ends[first] : self._ends[first + tokens]]


class _TextReply(msgspec.Struct):
    text: str


class Load:
    """A closed loop: one conversation per connection, each waiting for its reply."""

    def __init__(self, url: str, cell: Cell, texts: Texts) -> None:
        self._url = f"{url}/generate"
        self._cell = cell
        self._texts = texts
        self._decode = msgspec.json.Decoder(_TextReply).decode
        self._until = 0.0
        self.latencies: list[float] = []

    async def run(self, seconds: float) -> float:
        """Run for about this long. Return the seconds it took."""
        self.latencies = []
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
            begun = time.perf_counter()
            self._until = begun + seconds
            async with asyncio.TaskGroup() as group:
                for _ in range(self._cell.connections):
                    group.create_task(self._talk(session))
            return time.perf_counter() - begun

    async def _talk(self, session: aiohttp.ClientSession) -> None:
        while True:
            text = self._texts.cut(PROMPT_TOKENS)
            for _ in range(self._cell.turns):
                begun = time.perf_counter()
                if begun > self._until:
                    return
                text += await self._reply(session, text)
                self.latencies.append(time.perf_counter() - begun)
                text += "\nObservation: " + self._texts.cut(OBSERVATION_TOKENS)

    async def _reply(self, session: aiohttp.ClientSession, text: str) -> str:
        sampling = {"max_new_tokens": self._cell.reply_tokens, "ignore_eos": True}
        body = msgspec.json.encode({"text": text, "sampling_params": sampling, "stream": self._cell.stream})
        async with session.post(self._url, data=body, headers={"content-type": "application/json"}) as response:
            content = await response.read()
            if response.status != 200:
                raise SystemExit(f"{self._url} answered {response.status}: {content[:500]!r}")
        if not self._cell.stream:
            return self._decode(content).text
        if not content.endswith(DONE):
            raise SystemExit(f"{self._url} broke a stream off: {content[-500:]!r}")
        last = content[: -len(DONE)].rstrip(b"\n").rpartition(b"\n\n")[2]
        return self._decode(last.removeprefix(b"data: ")).text


def measure(url: str, process: psutil.Process, cell: Cell, texts: Texts, seconds: float) -> Sample:
    """One round."""
    load = Load(url, cell, texts)
    before = cpu_seconds(process)
    took = asyncio.run(load.run(seconds))
    used = cpu_seconds(process) - before
    count = len(load.latencies)
    cuts = statistics.quantiles(load.latencies, n=100)
    return Sample(
        requests=count,
        per_second=count / took,
        p50=1000 * cuts[49],
        p99=1000 * cuts[98],
        cpu=1000 * used / count,
        rss=process.memory_info().rss / 1e6,
    )


@contextlib.contextmanager
def everything(targets: Sequence[str], router_flags: Sequence[str]) -> Iterator[dict[str, tuple[str, psutil.Process]]]:
    """Run the worker and the targets in front of it. Yield the URL and process of each target."""
    folder = str(vocabulary(VOCABULARY))
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    worker = ["router", "demo-worker", "--scripted", "--port", str(port), "--tokenizer-path", folder]
    worker += ["--context-length", "1000000", "--log-level", "warning"]
    router = ["router", "--worker-urls", url, "--log-level", "warning", "--tokenizer-path", folder]
    commands = {
        "floor": ["benchmarks.serving.bare_proxy", "--worker-url", url],
        "floor-json": ["benchmarks.serving.bare_proxy", "--worker-url", url, "--json"],
        "proxy": [*router, "--middleware", "none", *router_flags],
        "router": [*router, *router_flags],
    }
    with contextlib.ExitStack() as stack:
        found = {"worker": (url, stack.enter_context(running(*worker, port=port)))}
        for name in targets:
            if name in commands:
                own = free_port()
                process = stack.enter_context(running(*commands[name], "--port", str(own), port=own))
                found[name] = (f"http://127.0.0.1:{own}", process)
        yield {name: found[name] for name in targets}


def run(args: argparse.Namespace) -> list[Row]:
    """Measure all targets in all cells. Return the rows."""
    texts = Texts()
    rows: list[Row] = []
    cells = [
        Cell(connections, tokens, args.turns, args.stream)
        for connections in args.connections
        for tokens in args.reply_tokens
    ]
    for cell in cells:
        # Fresh processes for each cell: what one cell leaves in memory must not slow the next.
        with everything(args.targets, args.router_flags) as targets:
            for url, process in targets.values():
                measure(url, process, cell, texts, args.seconds / 2)  # warm up: connections, caches, a tree
            rounds: dict[str, list[Sample]] = {name: [] for name in targets}
            for _ in range(args.rounds):
                for name, (url, process) in targets.items():
                    rounds[name].append(measure(url, process, cell, texts, args.seconds))
            for name, samples in rounds.items():
                row = {"target": name, **asdict(cell), **_median(samples)}
                rows.append(row)
                print(_line(row), flush=True)
    return rows


def _median(samples: Sequence[Sample]) -> dict[str, float]:
    columns = {key: [asdict(sample)[key] for sample in samples] for key in asdict(samples[0])}
    return {key: round(statistics.median(values), 3) for key, values in columns.items()}


def _line(row: Row) -> str:
    kind = "stream" if row["stream"] else "plain"
    what = f"{row['target']:<11}{kind:<7}{row['connections']:>4} x {row['reply_tokens']:>5} tokens"
    return (
        f"{what}  {row['per_second']:>8.1f}/s  p50 {row['p50']:>8.1f} ms  p99 {row['p99']:>8.1f} ms"
        f"  cpu {row['cpu']:>7.3f} ms  {row['rss']:>7.1f} MB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.load", description=__doc__.split("\n")[0])
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--reply-tokens", type=int, nargs="+", default=[200, 2000])
    parser.add_argument("--turns", type=int, default=4, help="requests of a conversation")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=TARGETS)
    parser.add_argument("--seconds", type=float, default=4, help="of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="where to write the rows as JSON")
    parser.add_argument("--page", type=Path, help="a page with the marks between which the table goes")
    parser.add_argument("--router-flags", nargs=argparse.REMAINDER, default=[], help="for the router (last)")
    args = parser.parse_args()
    print(machine(), flush=True)
    rows = run(args)
    if args.out:
        args.out.parent.mkdir(exist_ok=True)
        args.out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    if args.page:
        put_between(args.page, "load", _table(rows))


def _table(rows: Sequence[Row]) -> str:
    direct = {_cell(row): row for row in rows if row["target"] == "worker"}
    lines = [
        f"{machine()}. Medians of rounds that take turns.",
        "",
        "| connections x tokens | target | requests/s | added p50, ms | added p99, ms | CPU a request, ms | memory, MB |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        base = direct.get(_cell(row))
        added = [f"{row[key] - base[key]:.1f}" if base and row is not base else "" for key in ("p50", "p99")]
        cells = [f"{row['connections']} x {row['reply_tokens']}", NAMES[row["target"]], f"{row['per_second']:.0f}"]
        cells += [*added, f"{row['cpu']:.2f}", f"{row['rss']:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(row: Row) -> tuple[object, ...]:
    return row["connections"], row["reply_tokens"], row["stream"]


if __name__ == "__main__":
    main()
