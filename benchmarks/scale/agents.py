"""Many agents of fifty turns while the fleet changes under them: `python -m benchmarks.scale.agents`.

Each agent has a session of its own, streams one chat after the other, and sends all messages so far each time. They do so once
undisturbed, and once for each of the `--troubles`, which happens every few seconds: the weights are updated; a worker is
killed, and started again; a worker is removed, and added when it has ended what it had; a router is killed, or stopped with
SIGTERM, and started again; the store is killed, and started again. `--routers` says in front of what: one router,
`--processes 2`, two routers over one SQLite file, two over one Redis. A trouble that cannot happen there is left out.

A call that breaks is made again, at the other router if there are two, as an agent's library and a load balancer do. In the end
each session is finalized: one of its trajectories has to have all turns, with every sampled token, and be exact.
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
from benchmarks.scale.clients import events_of, open_stream, request
from benchmarks.scale.groups import KEEPING, NAMES, Group, Router, engines, free_ports, router
from benchmarks.scale.probe import Probe, probing
from benchmarks.serving.client import RawClient
from benchmarks.serving.conversations import Corpus
from benchmarks.serving.open_loop import at
from benchmarks.serving.targets import add_options, versions, write

PAUSE = 0.02  # seconds between two steps of an engine
NEW = 50  # tokens of each further message
ATTEMPTS = 50  # of a call
_WORKER = b"\r\nx-router-worker: "

TROUBLES = {
    "none": "nothing",
    "weights": "an update of the weights",
    "kills": "a worker killed",
    "drains": "a worker drained",
    "routers": "a router killed",
    "restarts": "a router stopped with SIGTERM",
    "stores": "the store killed",
}
RESTART = ("routers", "restarts")
"""In which routers start again: their CPU is not told."""


@dataclass
class Run:
    """What all agents found.

    Attributes:
        cpu: of the router for a turn, in seconds.
        again: calls that broke or were refused, and were made again, by the beginning of why.
        exact: sessions with an exact trajectory of all turns; `wrong` says why others have none.
        versions: how many weight versions the trajectories have.
        troubles: how many times the fleet changed.
        took: the seconds of each change for which someone waits: an update, a drain.
        stayed, further: turns at the worker of the turn before, and all but first turns.
        grown: bytes that the routers grew by.
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
    took: list[float] = field(default_factory=list)
    stayed: int = 0
    further: int = 0
    grown: int = 0


class Agent:
    """One rollout. It goes to one of several routers, and after a failure to the next one, as behind a load balancer."""

    def __init__(self, target: Router, corpus: Corpus, run: Run, tokens: int, number: int = 0) -> None:
        self._target = target
        self._corpus = corpus
        self._run = run
        self._tokens = tokens
        self._key = target.key(number)
        self._at = number
        self._worker = b""

    async def play(self, turns: int, wait: float) -> None:
        await asyncio.sleep(wait)
        path = f"/sessions/{(await self._call('/sessions'))['session_id']}"
        messages: list[dict[str, Any]] = []
        for _ in range(turns):
            messages.append({"role": "user", "content": self._corpus.cut(NEW)})
            messages.append(await self._turn(f"{path}/v1/chat/completions", messages))
        # A router that was killed may have kept a turn that the client did not get: that is a branch, with turns in common.
        whole = f"{path}/finalize?shared_turns=every"
        found = await self._call(whole)
        for _ in range(ATTEMPTS):
            if not any("store_unreachable" in one["reasons"] for one in found["trajectories"]):
                break
            await self._failed("store_unreachable")  # while the store is away, or replies wait for it
            found = await self._call(whole)
        self.check(found, turns)

    async def _call(self, path: str) -> Any:
        """Return what a POST of nothing is answered."""
        wrong = ""
        for _ in range(ATTEMPTS):
            try:
                client = await RawClient.connect(self._target.member(self._at).url, self._key)
                answer = await client.post(path, b"{}")
                await client.close()
            except OSError as error:
                wrong = repr(error)
            else:
                if answer.status in (200, 201):
                    return json.loads(answer.body)
                wrong = f"{answer.status}: {answer.body[:300]!r}"
            await self._failed(wrong)
        raise SystemExit(f"{path} failed {ATTEMPTS} times: {wrong}")

    async def _failed(self, wrong: str) -> None:
        """Count a call that is to be made again, and wait a moment."""
        self._run.again[wrong[:60]] += 1
        self._at += 1
        await asyncio.sleep(0.2)

    async def _turn(self, path: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the reply to a turn."""
        body = {"model": "m", "messages": messages, "max_tokens": self._tokens, "stream": True}
        content = request(path, msgspec.json.encode(body), self._key)
        wrong = ""
        for _ in range(ATTEMPTS):
            try:
                client = await open_stream(*self._target.member(self._at).address, content, keep=True)
            except OSError as error:
                wrong = repr(error)
            else:
                wrong = await client.ended
            if not wrong:
                self._run.first.append(client.first or 0.0)
                self.served(client.kept)
                return _message(client.kept)
            await self._failed(wrong)
        raise SystemExit(f"a turn failed {ATTEMPTS} times: {wrong}")

    def served(self, answer: bytes) -> None:
        """Count whether an answer names the worker of the turn before, which has the conversation in its cache."""
        before, self._worker = self._worker, answer.partition(_WORKER)[2].partition(b"\r\n")[0]
        if before:
            self._run.further += 1
            self._run.stayed += before == self._worker

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
async def trouble(change: Callable[[int], float | None] | None, seconds: float, run: Run) -> AsyncIterator[None]:
    """Change the fleet every so many seconds, for the time of a block. A change that has begun is completed."""
    stop = asyncio.Event()

    async def go_on(change: Callable[[int], float | None]) -> None:
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), seconds)
                return
            run.troubles += 1
            took = await asyncio.to_thread(change, run.troubles)
            run.took += [] if took is None else [took]

    task = None if change is None else asyncio.create_task(go_on(change))
    try:
        yield
    finally:
        stop.set()
        if task is not None:
            await task


class Fleet:
    """Engines, of which one can be killed, and what answers in front of them.

    Attributes:
        changes: what can happen to it, by the names of `TROUBLES`. Each takes its number, and returns its seconds if someone
            waits for its end.
    """

    def __init__(self, name: str, args: argparse.Namespace, corpus: Corpus, stack: contextlib.ExitStack) -> None:
        self._replies = corpus.replies(100)
        self._port = free_ports(1)
        self._own = stack.enter_context(contextlib.ExitStack())
        steady = stack.enter_context(engines(self._replies, free_ports(args.workers - 1), PAUSE))
        self._start()
        group = Group([*steady.urls, self._url], steady.process)
        self.router = stack.enter_context(router(name, group, args.router_flags, args.tenants))
        self.changes: dict[str, Callable[[int], float | None]] = {
            "weights": self.update,
            "kills": self.kill,
            "drains": self.drain,
        }
        if len(self.router.members) > 1 or name == "processes":
            self.changes["routers"] = self.kill_router
        if len(self.router.members) > 1:
            self.changes["restarts"] = self.restart
        if self.router.store is not None:
            self.changes["stores"] = self.kill_store

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

    def update(self, number: int) -> float:
        """Update the weights of all workers."""
        return self._call("/update_weights_from_disk", {"model_path": "x", "weight_version": str(number + 1)})

    def drain(self, _: int) -> float:
        """Remove a worker, wait until it has ended what it had, and add it again."""
        begun = time.perf_counter()
        self._call(f"/remove_worker?url={self._url}", {})
        while self._url in {one["url"] for one in self._workers()}:
            time.sleep(0.02)
        took = time.perf_counter() - begun
        self._call(f"/add_worker?url={self._url}", {})
        return took

    def kill_router(self, number: int) -> None:
        """Kill a router, and start it again after a second."""
        member = self.router.member(number)
        member.kill()
        if self.router.name != "processes":  # there the parent starts it
            time.sleep(1)
            member.start()

    def restart(self, number: int) -> float:
        """Stop a router as an upgrade does, and start it again."""
        member = self.router.member(number)
        took = member.end()
        member.start()
        return took

    def kill_store(self, _: int) -> None:
        """Kill the store, and start it again after a second."""
        assert self.router.store is not None
        self.router.store.kill()
        time.sleep(1)
        self.router.store.start()

    def _workers(self) -> list[dict[str, Any]]:
        async def call() -> list[dict[str, Any]]:
            client = await self.router.client()
            answer = await client.get("/workers")
            await client.close()
            found: list[dict[str, Any]] = json.loads(answer.body)["workers"]
            return found

        return asyncio.run(call())

    def _call(self, path: str, body: dict[str, Any]) -> float:
        async def call() -> None:
            client = await self.router.client()
            answer = await client.post(path, msgspec.json.encode(body))
            await client.close()
            if answer.status != 200:
                raise SystemExit(f"{path} was answered {answer.status}: {answer.body[:300]!r}")

        begun = time.perf_counter()
        asyncio.run(call())
        return time.perf_counter() - begun


async def _play(fleet: Fleet, name: str, args: argparse.Namespace, corpus: Corpus, probe: Probe) -> Run:
    run, target = Run(), fleet.router
    change = fleet.changes.get(name)
    probe.latencies()
    begun, used, held = time.perf_counter(), target.cpu(), target.memory()
    async with trouble(change, args.every, run):
        async with asyncio.TaskGroup() as group:
            for number in range(args.agents):
                agent = Agent(target, corpus, run, args.tokens, number)
                group.create_task(agent.play(args.turns, number * PAUSE))
        run.seconds = time.perf_counter() - begun
    run.cpu = (target.cpu() - used) / (args.agents * args.turns)
    run.grown = target.memory() - held
    run.lag = probe.latencies()
    return run


def rows(found: dict[tuple[str, str], Run], args: argparse.Namespace) -> Iterator[list[str]]:
    """Yield a row for each trouble of each router."""
    turns = args.agents * args.turns
    for (through, name), run in found.items():
        took = f"{at(run.took, 0.5):.2f} ({max(run.took):.2f})" if run.took else ""
        known = name not in RESTART
        yield [
            NAMES[through],
            TROUBLES[name] if name == "none" else f"{TROUBLES[name]}, {run.troubles} times",
            f"{turns / run.seconds:.0f}",
            f"{1000 * run.cpu:.2f}" if known else "",
            f"{1000 * at(run.lag, 0.5):.1f}",
            f"{1000 * at(run.lag, 0.99):.1f}",
            f"{1000 * at(run.first, 0.5):.0f}",
            f"{1000 * at(run.first, 0.99):.0f}",
            f"{run.again.total()}",
            f"{run.exact} of {args.agents}",
            f"{len(run.versions)}",
            f"{100 * run.stayed / run.further:.1f}",
            took,
            f"{run.grown / turns / (NEW + args.tokens):.0f}" if name == "none" else "",
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, rounds=1)
    parser.add_argument("--agents", type=int, default=100, help="at once (%(default)s)")
    parser.add_argument("--turns", type=int, default=50, help="of an agent (%(default)s)")
    parser.add_argument("--tokens", type=int, default=40, help="of a reply (%(default)s)")
    parser.add_argument("--every", type=float, default=5, help="seconds between two troubles (%(default)g)")
    parser.add_argument("--workers", type=int, default=9, help="engine doubles (%(default)s)")
    parser.add_argument("--tenants", type=int, default=0, help="with a key each (none)")
    parser.add_argument("--mark", default="agents", help="between which marks of the page the table goes (%(default)s)")
    parser.add_argument("--troubles", nargs="+", choices=TROUBLES, default=list(TROUBLES))
    parser.add_argument("--routers", nargs="+", choices=KEEPING, default=["router"])
    parser.add_argument("--router-flags", nargs=argparse.REMAINDER, default=[], help="for the routers (last)")
    args = parser.parse_args()
    corpus, found = Corpus(), dict[tuple[str, str], Run]()
    for through in args.routers:
        with contextlib.ExitStack() as stack:
            fleet = Fleet(through, args, corpus, stack)
            fleet.router.settle()
            for name in args.troubles:
                if name != "none" and name not in fleet.changes:
                    continue
                with probing(fleet.router.member(0).url) as probe:
                    found[through, name] = run = uvloop.run(_play(fleet, name, args, corpus, probe))
                print(f"{through}, {name}: {run.seconds:.0f} s {run.again} {run.took} {run.wrong[:3]}", flush=True)
    head = [
        *("through", "while the agents run", "turns a second", "CPU a turn, ms", "lag p50, ms", "p99, ms"),
        *("first token p50, ms", "p99, ms", "calls made again", "exact with all turns", "weight versions"),
        *("turns at the worker of the turn before, %", "each took, s (at most)", "memory a token, bytes"),
    ]
    about = (
        f"{versions(())}. {args.agents} agents of {args.turns} turns, {NEW} tokens in and {args.tokens} out, a token every"
        f" {1000 * PAUSE:.0f} ms; {args.workers} engines; what happens, happens every {args.every:g} s."
        + (f" `{' '.join(args.router_flags)}`." if args.router_flags else "")
    )
    data = {
        f"{through}, {name}": {
            **{key: getattr(run, key) for key in ("seconds", "cpu", "exact", "wrong", "troubles", "took", "grown")},
            **{key: getattr(run, key) for key in ("stayed", "further")},
            "again": dict(run.again),
            "versions": sorted(run.versions),
            **{f"lag_p{100 * share:g}": at(run.lag, share) for share in (0.5, 0.99, 1)},
        }
        for (through, name), run in found.items()
    }
    write(args, args.mark, f"{about}\n\n{table(head, rows(found, args), words=2)}", data)


if __name__ == "__main__":
    main()
