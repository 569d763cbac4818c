"""Many open streams: what a token costs, how long the event loop lags, and what an open stream takes in memory."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import psutil
import uvloop

from benchmarks.processes import cpu_seconds
from benchmarks.scale.clients import StreamClient, open_stream, request
from benchmarks.scale.groups import Group, Router
from benchmarks.scale.probe import Probe
from benchmarks.serving.conversations import Corpus
from benchmarks.serving.open_loop import at

PROMPT = 100  # tokens
OPENED = 250  # streams a second
TIMEOUT = 60.0
"""Seconds beyond its planned end after which a stream counts as timed out."""
AT_A_TIME = 16  # sessions that are made at the same time


@dataclass(frozen=True)
class Way:
    """A way to ask for a stream: which router, and whether by a session's chat instead of `/generate`."""

    name: str
    router: str
    chat: bool = False

    def body(self, prompt: str, tokens: int) -> bytes:
        """Return the request. Routers that do not keep logprobs are asked for them, so that all engines send the same."""
        if self.chat:
            said = [{"role": "user", "content": prompt}]
            return msgspec.json.encode({"model": "m", "messages": said, "max_tokens": tokens, "stream": True})
        asks = {} if self.router == "router" else {"return_logprob": True}
        sampling = {"max_new_tokens": tokens}
        return msgspec.json.encode({"text": prompt, "sampling_params": sampling, **asks, "stream": True})


WAYS = (
    Way("smg, `/generate`", "smg"),
    Way("this router, `--middleware none`, `/generate`", "none"),
    Way("this router, `/generate`", "router"),
    Way("this router, a session's chat", "router", chat=True),
)
NO_ROUTER = Way("no router: clients and engines alone", "direct")


@dataclass(frozen=True)
class Load:
    """`count` streams at once, a token of each every `pause` seconds, and a window of `seconds` with all of them open."""

    count: int
    pause: float
    seconds: float

    @property
    def opening(self) -> float:
        return self.count / OPENED

    @property
    def tokens(self) -> int:
        """Of each stream: enough for it to be open from its start until the window's end, also if opening takes longer."""
        return 2 + math.ceil((1.3 * self.opening + 2 + self.seconds) / self.pause)


@dataclass
class Sample:
    """One round.

    Attributes:
        cpu, client, engine: CPU of the router, the clients and the engines for a token, in microseconds, in the window.
        per_second: tokens in the window.
        waited: the share of the window for which the router's main thread was ready to run and had no core; 0 where
            the system does not tell.
        lag: seconds that each probe took in the window.
        first: seconds until the first event of each stream.
        late: seconds by which the engines were late at most.
        before, open, after: memory of the router in bytes before the round, in the window, and after the round.
        broken: why, of each stream that was not whole.
        timeouts: how many streams did not end in time.
    """

    cpu: float = 0.0
    client: float = 0.0
    engine: float = 0.0
    per_second: float = 0.0
    waited: float = 0.0
    lag: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    late: float = 0.0
    before: int = 0
    open: int = 0
    after: int = 0
    broken: list[str] = field(default_factory=list)
    timeouts: int = 0

    def summary(self) -> dict[str, Any]:
        """Return all of it, with quantiles and counts in place of lists."""
        lag = {f"p{100 * share:g}": at(self.lag, share) for share in (0.5, 0.99, 1)}
        first = {f"p{100 * share:g}": at(self.first or [0.0], share) for share in (0.5, 0.99)}
        return {**asdict(self), "lag": lag, "first": first, "broken": len(self.broken)}


def waited(process: psutil.Process) -> float:
    """Return the seconds for which the main thread of a process was ready to run and had no core (Linux)."""
    try:
        return int(Path(f"/proc/{process.pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


async def chats(target: Router, count: int) -> list[str]:
    """Make sessions, and return the path of the chat of each."""
    paths: list[str] = []

    async def make(number: int) -> None:
        client = await target.client()
        for _ in range(number, count, AT_A_TIME):
            made = await client.post("/sessions", b"{}")
            paths.append(f"/sessions/{json.loads(made.body)['session_id']}/v1/chat/completions")
        await client.close()

    async with asyncio.TaskGroup() as group:
        for number in range(min(AT_A_TIME, count)):
            group.create_task(make(number))
    return paths


async def _play(target: Router, group: Group, way: Way, load: Load, bodies: Sequence[bytes], probe: Probe) -> Sample:
    found = Sample(before=target.process.memory_info().rss)
    paths = await chats(target, load.count) if way.chat else ["/generate"] * load.count
    addresses = [target.address]
    if target.name == "direct":
        addresses = [(parts.hostname or "", parts.port or 0) for parts in map(urlsplit, group.urls)]
    clients: list[StreamClient] = []
    begun = time.perf_counter()
    for number, (path, body) in enumerate(zip(paths, bodies, strict=True)):
        await asyncio.sleep(max(0.0, begun + number / OPENED - time.perf_counter()))
        clients.append(await open_stream(*addresses[number % len(addresses)], request(path, body)))
    while any(one.first is None and not one.ended.done() for one in clients):
        await asyncio.sleep(0.05)
        if time.perf_counter() > begun + load.opening + TIMEOUT:
            break
    probe.latencies()
    counts = await asyncio.to_thread(group.counts)
    used = cpu_seconds(target.process), time.process_time(), cpu_seconds(group.process)
    start, queued = time.perf_counter(), waited(target.process)
    await asyncio.sleep(load.seconds)
    after = cpu_seconds(target.process), time.process_time(), cpu_seconds(group.process)
    took = time.perf_counter() - start
    found.waited = (waited(target.process) - queued) / took
    now = await asyncio.to_thread(group.counts)
    events = max(1, now.events - counts.events)
    found.cpu, found.client, found.engine = (1e6 * (b - a) / events for a, b in zip(used, after, strict=True))
    found.lag, found.late, found.per_second = probe.latencies(), now.late, events / took
    found.open = target.process.memory_info().rss
    if now.open != load.count:
        print(f"only {now.open} of {load.count} streams were open at the end of the window", flush=True)
    planned = begun + load.opening + load.tokens * load.pause
    left = max(0.0, planned - time.perf_counter()) + TIMEOUT
    await asyncio.wait([one.ended for one in clients], timeout=left)
    for one in clients:
        if not one.ended.done():
            found.timeouts += 1
        elif one.ended.result():
            found.broken.append(one.ended.result())
        elif not way.chat and one.events != load.tokens + 1:
            found.broken.append(f"{one.events} events of {load.tokens + 1}")
        one.close()
    found.first = [one.first for one in clients if one.first is not None]
    await asyncio.sleep(1)
    found.after = target.process.memory_info().rss
    return found


def measure(target: Router, group: Group, way: Way, load: Load, corpus: Corpus, probe: Probe) -> Sample:
    """Measure one round of a way."""
    bodies = [way.body(corpus.cut(PROMPT), load.tokens) for _ in range(load.count)]
    return uvloop.run(_play(target, group, way, load, bodies, probe))
