"""Many agents of fifty turns while the fleet changes under them: `python -m benchmarks.scale.agents`.

Each agent has a session of its own, streams one chat after the other, and sends all messages so far each time. They do so three
times: undisturbed; while the weights are updated every few seconds; while a worker is killed, and started again, every few
seconds. A stream that breaks is asked for again, as an agent's library does. In the end each session is finalized: one of its
trajectories has to have all turns, with every sampled token, and be exact.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import uvloop

from benchmarks.pages import table
from benchmarks.processes import cpu_seconds, settle
from benchmarks.scale.clients import events_of, open_stream, request
from benchmarks.scale.groups import Group, Router, engines, free_ports, router
from benchmarks.scale.probe import Probe, probing
from benchmarks.serving.conversations import Corpus
from benchmarks.serving.open_loop import at
from benchmarks.serving.targets import add_options, versions, write

PAUSE = 0.02  # seconds between two steps of an engine
NEW = 50  # tokens of each further message
ATTEMPTS = 20  # of a turn

TROUBLES = {"none": "nothing", "weights": "an update of the weights", "kills": "a worker killed"}


@dataclass
class Run:
    """What all agents found.

    Attributes:
        cpu: of the router for a turn, in seconds.
        again: streams that broke or were refused, and were asked for again, by the beginning of why.
        exact: sessions with an exact trajectory of all turns; `wrong` says why others have none.
        versions: how many weight versions the trajectories have.
        troubles: how many times the fleet changed.
    """

    seconds: float = 0.0
    cpu: float = 0.0
    lag: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    again: Counter[str] = field(default_factory=Counter)
    exact: int = 0
    wrong: list[str] = field(default_factory=list)
    versions: set[str] = field(default_factory=set)
    troubles: int = 0


class Agent:
    """One rollout."""

    def __init__(self, target: Router, corpus: Corpus, run: Run, tokens: int) -> None:
        self._target = target
        self._corpus = corpus
        self._run = run
        self._tokens = tokens

    async def play(self, turns: int, wait: float) -> None:
        await asyncio.sleep(wait)
        client = await self._target.client()
        made = await client.post("/sessions", b"{}")
        path = f"/sessions/{json.loads(made.body)['session_id']}"
        messages: list[dict[str, Any]] = []
        for _ in range(turns):
            messages.append({"role": "user", "content": self._corpus.cut(NEW)})
            messages.append(await self._turn(f"{path}/v1/chat/completions", messages))
        answer = await client.post(f"{path}/finalize", b"{}")
        await client.close()
        self.check(json.loads(answer.body), turns)

    async def _turn(self, path: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the reply to a turn."""
        body = {"model": "m", "messages": messages, "max_tokens": self._tokens, "stream": True}
        content = request(path, msgspec.json.encode(body))
        for _ in range(ATTEMPTS):
            client = await open_stream(*self._target.address, content, keep=True)
            wrong = await client.ended
            if not wrong:
                self._run.first.append(client.first or 0.0)
                return _message(client.kept)
            self._run.again[wrong[:60]] += 1
            await asyncio.sleep(0.2)
        raise SystemExit(f"a turn failed {ATTEMPTS} times: {wrong}")

    def check(self, session: dict[str, Any], turns: int) -> None:
        """Count a finalized session as exact or wrong."""
        found = [one for one in session["trajectories"] if one["num_turns"] == turns]
        sampled = [sum(one["response_mask"]) for one in found]
        if not found or not found[-1]["exact"] or sampled[-1] != turns * self._tokens:
            all_turns = [one["num_turns"] for one in session["trajectories"]]
            reasons = [one["reasons"] for one in session["trajectories"]]
            self._run.wrong.append(f"trajectories of {all_turns} turns, {sampled} tokens: {reasons}")
            return
        self._run.exact += 1
        self._run.versions |= {span["version"] for span in found[-1]["weight_versions"]}


def _message(answer: bytes) -> dict[str, Any]:
    """Return the message that the events of a chat make together."""
    told = {"content": "", "reasoning_content": ""}
    for event in events_of(answer):
        delta = event["choices"][0]["delta"] if event["choices"] else {}
        for key in told:
            told[key] += delta.get(key) or ""
    return {"role": "assistant", **{key: text for key, text in told.items() if text or key == "content"}}


@contextlib.asynccontextmanager
async def trouble(change: Callable[[int], None] | None, seconds: float, run: Run) -> AsyncIterator[None]:
    """Change the fleet every so many seconds, for the time of a block."""

    async def go_on(change: Callable[[int], None]) -> None:
        while True:
            await asyncio.sleep(seconds)
            run.troubles += 1
            await asyncio.shield(asyncio.to_thread(change, run.troubles))

    task = None if change is None else asyncio.create_task(go_on(change))
    try:
        yield
    finally:
        if task is not None:
            task.cancel()
            await asyncio.wait([task])


class Fleet:
    """Engines of which one can be killed, and a router in front of them."""

    def __init__(self, replies: bytes, workers: int, stack: contextlib.ExitStack) -> None:
        self._replies = replies
        self._port = free_ports(1)
        self._own = stack.enter_context(contextlib.ExitStack())
        steady = stack.enter_context(engines(replies, free_ports(workers - 1), PAUSE))
        self._start()
        self.router = stack.enter_context(router("router", Group([*steady.urls, self._url], steady.process), ()))

    @property
    def _url(self) -> str:
        return f"http://127.0.0.1:{self._port[0]}"

    def _start(self) -> None:
        self._process = self._own.enter_context(engines(self._replies, self._port, PAUSE)).process

    def kill(self, _: int) -> None:
        """Kill one worker, and start it again after a second."""
        self._process.kill()
        self._own.close()
        time.sleep(1)
        self._start()

    def update(self, number: int) -> None:
        """Update the weights of all workers."""

        async def call() -> None:
            client = await self.router.client()
            body = {"model_path": "x", "weight_version": str(number + 1)}
            answer = await client.post("/update_weights_from_disk", msgspec.json.encode(body))
            await client.close()
            if answer.status != 200:
                raise SystemExit(f"an update was answered {answer.status}: {answer.body[:300]!r}")

        asyncio.run(call())


async def _play(fleet: Fleet, name: str, args: argparse.Namespace, corpus: Corpus, probe: Probe) -> Run:
    run, target = Run(), fleet.router
    change = {"none": None, "weights": fleet.update, "kills": fleet.kill}[name]
    probe.latencies()
    begun, used = time.perf_counter(), cpu_seconds(target.process)
    async with trouble(change, args.every, run), asyncio.TaskGroup() as group:
        for number in range(args.agents):
            agent = Agent(target, corpus, run, args.tokens)
            group.create_task(agent.play(args.turns, number * PAUSE))
    run.seconds = time.perf_counter() - begun
    run.cpu = (cpu_seconds(target.process) - used) / (args.agents * args.turns)
    run.lag = probe.latencies()
    return run


def rows(found: dict[str, Run], agents: int, turns: int) -> Iterator[list[str]]:
    """Yield a row for each trouble."""
    for name, run in found.items():
        yield [
            TROUBLES[name] if name == "none" else f"{TROUBLES[name]}, {run.troubles} times",
            f"{agents * turns / run.seconds:.0f}",
            f"{1000 * run.cpu:.2f}",
            f"{1000 * at(run.lag, 0.5):.1f}",
            f"{1000 * at(run.lag, 0.99):.1f}",
            f"{1000 * at(run.first, 0.5):.0f}",
            f"{1000 * at(run.first, 0.99):.0f}",
            f"{run.again.total()}",
            f"{run.exact} of {agents}",
            f"{len(run.versions)}",
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, rounds=1)
    parser.add_argument("--agents", type=int, default=100, help="at once (%(default)s)")
    parser.add_argument("--turns", type=int, default=50, help="of an agent (%(default)s)")
    parser.add_argument("--tokens", type=int, default=40, help="of a reply (%(default)s)")
    parser.add_argument("--every", type=float, default=5, help="seconds between two troubles (%(default)g)")
    parser.add_argument("--workers", type=int, default=9, help="engine doubles (%(default)s)")
    parser.add_argument("--troubles", nargs="+", choices=TROUBLES, default=list(TROUBLES))
    args = parser.parse_args()
    corpus, found = Corpus(), dict[str, Run]()
    with contextlib.ExitStack() as stack:
        fleet = Fleet(corpus.replies(100), args.workers, stack)
        probe = stack.enter_context(probing(fleet.router.url))
        settle(fleet.router.process)
        for name in args.troubles:
            found[name] = run = uvloop.run(_play(fleet, name, args, corpus, probe))
            print(f"{name}: {run.again} {run.wrong[:3]}", flush=True)
    head = [
        *("while the agents run", "turns a second", "CPU a turn, ms", "lag p50, ms", "p99, ms"),
        *("first token p50, ms", "p99, ms", "streams asked for again", "exact with all turns", "weight versions"),
    ]
    about = (
        f"{versions(())}. {args.agents} agents of {args.turns} turns, {NEW} tokens in and {args.tokens} out, a token every"
        f" {1000 * PAUSE:.0f} ms; {args.workers} engines; what happens, happens every {args.every:g} s."
    )
    lines = list(rows(found, args.agents, args.turns))
    data = {
        name: {
            **{key: getattr(run, key) for key in ("seconds", "cpu", "exact", "wrong", "troubles")},
            "again": dict(run.again),
            "versions": sorted(run.versions),
            **{f"lag_p{100 * share:g}": at(run.lag, share) for share in (0.5, 0.99, 1)},
        }
        for name, run in found.items()
    }
    write(args, "agents", f"{about}\n\n{table(head, lines)}", data)


if __name__ == "__main__":
    main()
