"""How large pictures hold up others: the latency of `/liveness` while many clients send some at once.

`python -m benchmarks.serving.pictures` starts a demo worker that takes images, and a router, as processes of their own. A third
process asks for `/liveness` over and over. A fourth is the clients: each sends chats, or `/generate`, with a picture of `--mb`
megabytes, one after the other. The row `nothing` shows the machine's own noise.
"""

from __future__ import annotations

import argparse
import http.client
import io
import json
import multiprocessing
import random
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from urllib.parse import urlsplit

from PIL import Image

from tests.support.pictures import data_url
from tests.support.programs import Program
from worker.models.ngram import shipped_image_tokenizer

PATHS = ("/v1/chat/completions", "/generate")
_DISTINCT = 8


def noise(megabytes: float, seed: int) -> bytes:
    """Return a PNG of this size, which no compression makes smaller."""
    side = max(1, int((megabytes * 1e6 / 3) ** 0.5))
    encoded = io.BytesIO()
    made = Image.frombytes("RGB", (side, side), random.Random(seed).randbytes(3 * side * side))
    made.save(encoded, "PNG", compress_level=0)
    return encoded.getvalue()


def bodies(path: str, megabytes: float) -> list[bytes]:
    """Return requests with a picture each."""
    found = []
    for seed in range(_DISTINCT):
        url = data_url(noise(megabytes, seed))
        if path == "/generate":
            text = f"Look {seed}: <|image_pad|>"
            body = {"text": text, "image_data": [url], "sampling_params": {"max_new_tokens": 1}}
        else:
            part = {"type": "image_url", "image_url": {"url": url}}
            body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
        found.append(json.dumps(body).encode())
    return found


def flood(url: str, path: str, megabytes: float, clients: int, each: int, pipe: Connection) -> None:
    """Send the requests when told to, and report the statuses of the answers."""
    parts, made = urlsplit(url), bodies(path, megabytes)

    def client(number: int) -> list[int]:
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=300)
        statuses = []
        for turn in range(each):
            headers = {"content-type": "application/json"}
            connection.request("POST", path, made[(number + turn) % len(made)], headers)
            answer = connection.getresponse()
            answer.read()
            statuses.append(answer.status)
        connection.close()
        return statuses

    pipe.send(None)
    pipe.recv()
    with ThreadPoolExecutor(clients) as pool:
        pipe.send([status for found in pool.map(client, range(clients)) for status in found])


def watch(url: str, pipe: Connection) -> None:
    """Ask for `/liveness` repeatedly; for each message on the pipe, send how long each answer since the last one took."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port)
    took: list[float] = []
    while True:
        begun = time.perf_counter()
        connection.request("GET", "/liveness")
        connection.getresponse().read()
        took.append(time.perf_counter() - begun)
        if pipe.poll(0.002):
            pipe.recv()
            pipe.send(took)
            took = []


def shown(name: str, took: Sequence[float]) -> str:
    times = sorted(took)
    at = (times[int(share * (len(times) - 1))] * 1000 for share in (0.5, 0.99, 1))
    return f"{name:24} {len(times):6} asked   p50 {next(at):7.1f}   p99 {next(at):7.1f}   longest {next(at):7.1f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=10.0, help="size of a picture (%(default)g)")
    parser.add_argument("--clients", type=int, default=32, help="(%(default)s)")
    parser.add_argument("--each", type=int, default=4, help="requests of a client (%(default)s)")
    parser.add_argument("--only", default="", help="paths with this in them")
    arguments = parser.parse_args()
    folder, spawn = str(shipped_image_tokenizer()), multiprocessing.get_context("spawn")
    with ExitStack() as entered:
        logs = Path(entered.enter_context(tempfile.TemporaryDirectory()))
        worker = entered.enter_context(Program("worker", "demo-worker", "--images", folder=logs))
        worker.wait_until_up()
        flags = ("--tokenizer-path", folder, "--worker-urls", worker.url, "--media-max-bytes", "1000000000")
        router = entered.enter_context(Program("router", *flags, folder=logs))
        router.wait_until_up()
        here, there = multiprocessing.Pipe()
        watcher = spawn.Process(target=watch, args=(router.url, there), daemon=True)
        watcher.start()
        time.sleep(4)

        def took() -> list[float]:
            here.send(None)
            return list(here.recv())

        print(shown("nothing", took()))
        for path in PATHS:
            if arguments.only not in path:
                continue
            ours, theirs = multiprocessing.Pipe()
            given = (router.url, path, arguments.mb, arguments.clients, arguments.each, theirs)
            clients = spawn.Process(target=flood, args=given, daemon=True)
            clients.start()
            ours.recv()
            took()
            begun = time.perf_counter()
            ours.send(None)
            statuses = ours.recv()
            seconds = time.perf_counter() - begun
            good = sum(status == 200 for status in statuses)
            print(f"{shown(path, took())}   {seconds:5.1f} s, {good} of {len(statuses)} answered", flush=True)
            clients.join()
        watcher.terminate()


if __name__ == "__main__":
    main()
