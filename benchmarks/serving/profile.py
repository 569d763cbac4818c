"""Where the router's CPU goes, by part: `python -m benchmarks.serving.profile`, with py-spy (`pip install py-spy`).

The load is that of `load.py`, 32 connections. A sample of the profile counts for the innermost frame that belongs to a part.
Python's own modules and the libraries that a part calls count for their caller, and so does `router/engines`, where both router
and middleware read what an engine says. The middleware's reply side is what the router calls it for once a reply has come.

Python's garbage collector has no frames: it is timed by itself, and its share is part of the others too. CPU a
request is measured before, without the profiler.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gc
import mmap
import os
import runpy
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.pages import machine, table
from benchmarks.processes import cpu_seconds, python, started
from benchmarks.serving.conversations import Corpus, tokenizer_folder
from benchmarks.serving.load import Cell, measure
from benchmarks.serving.targets import Target, add_options, answers, serving, write
from tests.support.engine_server import free_port

SERVER, CLIENT, ROUTER = "connection, HTTP server, event loop", "HTTP client towards the worker", "router"
REQUEST, REPLY, METRICS = "middleware, request side", "middleware, reply side", "metrics, logs, traces"
COLLECTOR = "of all these, the garbage collector"
PARTS = (SERVER, CLIENT, ROUTER, REQUEST, REPLY, METRICS)
# The first that fits a frame's path; what is not here, and `CALLER`, counts for the caller.
CALLER = ("router/engines/", "router/http/offload")
ROOMS = {
    "prometheus_client/": METRICS,
    "router/observability/": METRICS,
    "router/http/upstream": CLIENT,
    "router/": ROUTER,
    "uvicorn/": SERVER,
    "httptools/": SERVER,
    "starlette/": SERVER,
    "asyncio/runners.py": SERVER,
    "aiohttp/": CLIENT,
    "<attrs generated methods aiohttp": CLIENT,
    "yarl/": CLIENT,
    "multidict/": CLIENT,
    "aiosignal/": CLIENT,
}
HUB = "middleware_hub/"


def room(path: str) -> str:
    """Return the part that a file belongs to: `HUB` for the middleware, an empty string for none."""
    if path.startswith(HUB):
        return HUB
    if path.startswith(CALLER):
        return ""
    return next((part for start, part in ROOMS.items() if path.startswith(start)), "")


def part(paths: Sequence[str]) -> str:
    """Return the part of a sample, from the paths of its frames, the outermost first."""
    rooms = [found for found in map(room, paths) if found]
    innermost = rooms[-1] if rooms else SERVER
    if innermost != HUB:
        return innermost
    called = rooms[rooms.index(HUB) :]
    return REPLY if ROUTER in called else REQUEST


def shares(raw: str) -> dict[str, float]:
    """Return the share of each part, from what py-spy prints with `--format raw`: stacks, each with its number of samples."""
    counts: collections.Counter[str] = collections.Counter()
    for line in raw.splitlines():
        stack, _, count = line.rpartition(" ")
        paths = [frame.rpartition(" (")[2].partition(":")[0] for frame in stack.split(";")]
        counts[part(paths)] += int(count)
    return {name: counts[name] / counts.total() for name in PARTS}


@contextlib.contextmanager
def timed_router(engine: str) -> Iterator[tuple[Target, mmap.mmap]]:
    """Run the router. Yield it, and the memory in which it keeps the seconds that its garbage collector took."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(8))
        file.flush()
        flags = ["--worker-urls", engine, "--tokenizer-path", tokenizer_folder(), "--log-level", "warning"]
        command = python("benchmarks.serving.profile", "--serve", file.name, "--", *flags, "--port", str(port))
        with started(command, lambda: answers(url)) as process, mmap.mmap(file.fileno(), 8) as seconds:
            yield Target("router", url, process, keeps=True), seconds


def serve(path: Path, arguments: Sequence[str]) -> None:
    """Run the router, and keep the seconds that the garbage collector takes in this file."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 8) as seconds:
        begun = total = 0.0

        def watch(phase: str, _: object) -> None:
            nonlocal begun, total
            if phase == "start":
                begun = time.perf_counter()
            else:
                total += time.perf_counter() - begun
                struct.pack_into("d", seconds, 0, total)

        gc.callbacks.append(watch)
        sys.argv = ["router", *arguments]
        try:
            runpy.run_module("router", run_name="__main__")
        finally:
            gc.callbacks.remove(watch)


def profile(spy: str, corpus: Corpus, reply_tokens: int, seconds: float) -> tuple[float, dict[str, float]]:
    """Return the CPU of a request in milliseconds, and the share of each part and of the garbage collector."""
    cell = Cell(reply_tokens, 32)
    with contextlib.ExitStack() as stack:
        targets = stack.enter_context(serving([], corpus.replies(reply_tokens)))
        target, collected = stack.enter_context(timed_router(targets["direct"].url))
        measure(target, cell, corpus, seconds / 2)  # warm up
        before, spent = struct.unpack("d", collected)[0], cpu_seconds(target.process)
        cpu = statistics.median(measure(target, cell, corpus, seconds / 2).cpu for _ in range(2))
        collector = (struct.unpack("d", collected)[0] - before) / (cpu_seconds(target.process) - spent)
        with tempfile.TemporaryDirectory() as folder:
            raw = Path(folder, "raw")
            command = [spy, "record", "--pid", str(target.process.pid), "--rate", "400", "--format", "raw"]
            command += ["--duration", str(round(seconds)), "--output", str(raw)]
            with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as recording:
                measure(target, cell, corpus, seconds + 0.5)
                _, errors = recording.communicate()
            if not raw.exists():
                raise SystemExit(errors.decode(errors="replace"))
            return cpu, {**shares(raw.read_text()), COLLECTOR: collector}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, rounds=1, seconds=10)
    parser.add_argument("--reply-tokens", type=int, nargs="+", default=[200, 2000])
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.arguments)
        return
    spy = shutil.which("py-spy", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if spy is None:
        print("no profile: py-spy is not installed (pip install py-spy)")
        return
    corpus = Corpus()
    found = {tokens: profile(spy, corpus, tokens, args.seconds) for tokens in args.reply_tokens}
    rows = [
        [name, *(f"{100 * by_part[name]:.0f}% ({1000 * cpu * by_part[name]:.0f})" for cpu, by_part in found.values())]
        for name in (*PARTS, COLLECTOR)
    ]
    rows.append(["all", *(f"{1000 * cpu:.0f}" for cpu, _ in found.values())])
    head = ["share of the CPU (us a request)", *(f"{tokens:,} tokens" for tokens in found)]
    write(args, "profile", f"{machine()}.\n\n{table(head, rows)}", {str(tokens): one for tokens, one in found.items()})


if __name__ == "__main__":
    main()
