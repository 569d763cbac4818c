"""Many open streams: what a token costs, how long the event loop lags, and what an open stream takes in memory."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec
import uvloop

from benchmarks.processes import cpu_seconds
from benchmarks.scale.clients import StreamClient, open_stream, request
from benchmarks.scale.groups import KEEPING, NAMES, Group, Router
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
        asks = {} if self.router in KEEPING else {"return_logprob": True}
        sampling = {"max_new_tokens": tokens}
        return msgspec.json.encode({"text": prompt, "sampling_params": sampling, **asks, "stream": True})


WAYS = (
    Way("smg, `/generate`", "smg"),
    Way(f"{NAMES['none']}, `/generate`", "none"),
    *(
        Way(f"{NAMES[name]}, {what}", name, chat=chat)
        for name in KEEPING
        for what, chat in (("`/generate`", False), ("a session's chat", True))
    ),
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
        waited: the share of the window for which the router's main thread (of several, one) was ready to run and had no
            core; 0 where the system does not tell.
        lag: seconds that each probe took in the window.
        first: seconds until the first event of each stream.
        late: seconds by which the engines were late at most.
        before, open, after: memory of the router in bytes before the round, in the window, and after the round.
        broken: why, of each stream that was not whole.
        timeouts: how many streams did not end in time.
        drained: if all routers got SIGTERM at the window's end, the seconds from the end of the last stream until all
            were gone.
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
    drained: float | None = None

    def summary(self) -> dict[str, Any]:
        """Return all of it, with quantiles and counts in place of lists."""
        lag = {f"p{100 * share:g}": at(self.lag, share) for share in (0.5, 0.99, 1)}
        first = {f"p{100 * share:g}": at(self.first or [0.0], share) for share in (0.5, 0.99)}
        return {**asdict(self), "lag": lag, "first": first, "broken": len(self.broken)}


async def chats(target: Router, count: int) -> list[str]:
    """Make sessions, and return the path of the chat of each client."""
    paths = [""] * count

    async def make(first: int) -> None:
        for number in range(first, count, AT_A_TIME):
            client = await target.client(number)
            made = await client.post("/sessions", b"{}")
            paths[number] = f"/sessions/{json.loads(made.body)['session_id']}/v1/chat/completions"
            await client.close()

    async with asyncio.TaskGroup() as group:
        for number in range(min(AT_A_TIME, count)):
            group.create_task(make(number))
    return paths


async def _play(
    target: Router, group: Group, way: Way, load: Load, bodies: Sequence[bytes], probe: Probe, *, drain: bool
) -> Sample:
    found = Sample(before=target.memory())
    paths = await chats(target, load.count) if way.chat else ["/generate"] * load.count
    clients: list[StreamClient] = []
    begun = time.perf_counter()
    for number, (path, body) in enumerate(zip(paths, bodies, strict=True)):
        await asyncio.sleep(max(0.0, begun + number / OPENED - time.perf_counter()))
        clients.append(await open_stream(*target.member(number).address, request(path, body, target.key(number))))
    while any(one.first is None and not one.ended.done() for one in clients):
        await asyncio.sleep(0.05)
        if time.perf_counter() > begun + load.opening + TIMEOUT:
            break
    probe.latencies()
    counts = await asyncio.to_thread(group.counts)
    used = target.cpu(), time.process_time(), cpu_seconds(group.process)
    start, queued = time.perf_counter(), target.waited()
    await asyncio.sleep(load.seconds)
    after = target.cpu(), time.process_time(), cpu_seconds(group.process)
    took = time.perf_counter() - start
    found.waited = (target.waited() - queued) / took
    now = await asyncio.to_thread(group.counts)
    events = max(1, now.events - counts.events)
    found.cpu, found.client, found.engine = (1e6 * (b - a) / events for a, b in zip(used, after, strict=True))
    found.lag, found.late, found.per_second = probe.latencies(), now.late, events / took
    found.open = target.memory()
    if now.open != load.count:
        print(f"only {now.open} of {load.count} streams were open at the end of the window", flush=True)
    ends = []
    if drain:
        ends = [asyncio.create_task(asyncio.to_thread(one.end)) for one in target.members]
    planned = begun + load.opening + load.tokens * load.pause
    left = max(0.0, planned - time.perf_counter()) + TIMEOUT
    await asyncio.wait([one.ended for one in clients], timeout=left)
    if drain:
        last = time.perf_counter()
        await asyncio.wait(ends)
        found.drained = time.perf_counter() - last
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
    found.after = 0 if drain else target.memory()
    return found


def measure(
    target: Router, group: Group, way: Way, load: Load, corpus: Corpus, probe: Probe, *, drain: bool = False
) -> Sample:
    """Measure one round of a way. `drain`: at the end of the window all routers get SIGTERM, and run no more after it."""
    bodies = [way.body(corpus.cut(PROMPT), load.tokens) for _ in range(load.count)]
    return uvloop.run(_play(target, group, way, load, bodies, probe, drain=drain))
