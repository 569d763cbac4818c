"""What a memory that outlives its process costs: `python -m benchmarks.serving.stores` (or `make bench`).

Routers with `--store sqlite:`, with `--store redis:` and without a store take turns under the load of `load.py`; a figure is of
two rounds next to each other, and a row shows the median of them, the least and the largest. Then, for each kind of store,

- conversations of 50 turns and 20,000 tokens, played through one router, are continued through another one that shares the
  store and never saw them, and as a comparison through the first one, which knows them; an engine that answers at once;
- a router is started again and again, with a large SQLite store, and with none.

Beside each aim stands its floor: what the calls of SQLite, or of a client of Redis, take by themselves for the same work
(`floors.py`). No code around these calls brings the figure below it, so an aim below it is moved there.

It takes about seven minutes on a quiet machine; `--turns 1000000` takes some minutes more. What is measured is printed as it
comes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.pages import machine, spread, table
from benchmarks.processes import get, running, settle, started
from benchmarks.serving.client import RawClient
from benchmarks.serving.conversations import Conversation, Corpus, tokenizer_folder
from benchmarks.serving.floors import KINDS, Times, floor_table, floors
from benchmarks.serving.load import Cell, Sample, measure
from benchmarks.serving.targets import (
    KEEPING,
    STORES,
    Target,
    add_options,
    answers,
    command,
    empty_store,
    serving,
    write,
)
from middleware_hub.store.opening import open_store
from middleware_hub.tokenizer.tokenizer import Tokenizer
from tests.middleware_hub.store.world import Turn, World
from tests.support.engine_server import free_port

AIMS: dict[str, Any] = {
    "cpu": {"sqlite": "<= 15%", "redis": "<= 20%"},
    "p50": 0.3,  # ms
    "strange": "<= 5 ms",
    "start": "as without one",
    "bytes": "<= 12 a token, text, 1 KB a turn",
}
TURNS, TOKENS = 50, 200
Found = dict[str, Any]


def loads(corpus: Corpus, rounds: int, seconds: float) -> Found:
    """Measure CPU of the router with 32 connections, and the median with one; each round without a store and with each kind."""
    found: Found = {}
    for connections in (32, 1):
        cell = Cell(TOKENS, connections)
        with serving(KEEPING, corpus.replies(TOKENS)) as targets:
            all_three = [targets[name] for name in KEEPING]
            for seconds_each in (0.2, seconds / 2):
                for target in all_three:
                    measure(target, cell, corpus, seconds_each)
                    settle(target.process)
            samples: list[list[Sample]] = []
            for number in range(rounds):
                order = all_three if number % 2 else all_three[::-1]
                taken = {target.name: measure(target, cell, corpus, seconds) for target in order}
                samples.append([taken[name] for name in KEEPING])
                print(f"{connections} connections: {[(one.cpu, one.p50) for one in samples[-1]]}", flush=True)
        found[f"cpu_{connections}"] = [[one.cpu for one in each] for each in samples]
        found[f"p50_{connections}"] = [[one.p50 for one in each] for each in samples]
    return found


async def play(target: Target, talk: Conversation, turns: int) -> list[float]:
    """Play these turns of a conversation, with 200 new tokens each, and return the milliseconds of each."""
    client = await RawClient.connect(target.url)
    times = []
    for _ in range(turns):
        body = talk.request(TOKENS, asks=False)
        begun = time.perf_counter()
        answer = await target.ask(client, body)
        times.append(1000 * (time.perf_counter() - begun))
        talk.heard(answer.body)
    await client.close()
    return times


def strangers(corpus: Corpus, name: str, conversations: int) -> dict[str, list[float]]:
    """Continue conversations at a router that knows them and at one that never saw them, over a store of this kind."""
    ports = [free_port() for _ in range(3)]
    url = f"http://127.0.0.1:{ports[0]}"
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(empty_store(name))
        flags = ("--port", str(ports[0]))
        engine = running("benchmarks.serving.instant_engine", *flags, port=ports[0], stdin=corpus.replies(TOKENS))
        stack.enter_context(engine)
        routers = []
        for port in ports[1:]:
            here = f"http://127.0.0.1:{port}"
            run = started(command(name, url, port, (), store), partial(answers, here))
            routers.append(Target(name, here, stack.enter_context(run), keeps=True))
        first, second = routers
        for router in routers:
            uvloop.run(play(router, Conversation(corpus, corpus.cut(TOKENS), TOKENS), 10))
            settle(router.process)
        known, strange = [], []
        for _ in range(conversations):
            talk = Conversation(corpus, corpus.cut(TOKENS), TOKENS)
            known.append(uvloop.run(play(first, talk, TURNS))[-1])
            strange.append(uvloop.run(play(second, talk, 1))[0])
    return {"known": known, "strange": strange}


def on_disk(folder: str) -> int:
    return sum(file.stat().st_size for file in Path(folder).iterdir())


async def size(folder: str, corpus: Corpus, tokens: int, conversations: int) -> Found:
    """Return the bytes of a store, after conversations of ten turns of so many sampled tokens, made as a tree makes them."""
    count = {"turns": 0, "tokens": 0, "text": 0}
    store = open_store(f"sqlite:{folder}/")
    await store.open("bench")
    for number in range(conversations):
        world, line = World(), None
        for turn in range(10):
            line = world.turn(
                line, corpus.cut(tokens // 2), corpus.cut(tokens), names=(f"{number:030}{turn:02}",), each=4
            )
            await store.append(line.batch)
            count["turns"] += 1
            count["tokens"] += sum(record.count for record in line.records)
            count["text"] += sum(len(record.text.encode()) for record in line.records)
    await store.close()
    return {**count, "bytes": on_disk(folder)}


async def fill(folder: str, turns: int, fingerprint: str) -> None:
    """Append this many short turns in conversations of ten."""
    dice = random.Random(0)
    store = open_store(f"sqlite:{folder}/", durability="off")
    await store.open(fingerprint)
    waiting: list[Awaitable[Any]] = []
    for number in range(turns // 10):
        world = World()
        line: Turn | None = None
        for turn in range(10):
            name = f"{dice.getrandbits(128):032x}"
            line = world.turn(
                line, f"In conversation {number} turn {turn} asks.", f"And is told {name}.", names=(name,)
            )
            waiting.append(store.append(line.batch))
        if len(waiting) > 200:
            await asyncio.gather(*waiting)
            waiting.clear()
            if number % 10_000 < 20:
                print(f"{10 * number:,} turns", flush=True)
    await asyncio.gather(*waiting)
    await store.close()


def start(port: int, engine: str, store: str | None) -> float:
    """Return the milliseconds until a router answers."""
    name = "router" if store is None else "sqlite"
    url = f"http://127.0.0.1:{port}/health"
    begun = time.perf_counter()
    with started(command(name, engine, port, (), store), lambda: get(url) is not None):
        return 1000 * (time.perf_counter() - begun)


def starts(corpus: Corpus, turns: int, rounds: int) -> Found:
    """Start routers with a large store and without one, in turns."""
    port = free_port()
    found: dict[str, list[float]] = {"none": [], "sqlite": []}
    with tempfile.TemporaryDirectory() as folder:
        uvloop.run(fill(folder, turns, Tokenizer.load(tokenizer_folder()).fingerprint))
        flags = ("--port", str(port))
        with running("benchmarks.serving.instant_engine", *flags, port=port, stdin=corpus.replies(TOKENS)):
            for number in range(rounds + 1):
                for name, store in (("none", None), ("sqlite", f"sqlite:{folder}/")):
                    took = start(free_port(), f"http://127.0.0.1:{port}", store)
                    if number:
                        found[name].append(took)
        disk = on_disk(folder)
    return {**found, "turns": turns, "disk": disk}


def load_rows(found: Found) -> list[list[str]]:
    rows = []
    for at, store in enumerate(STORES, 1):
        floor: Times = found["floors"][store][1]
        cpu, one = ([(each[0], each[at]) for each in found[key]] for key in ("cpu_32", "p50_1"))
        rows += [
            [
                f"`{store}:`, CPU of the router a request, 32 x 200 tokens",
                spread([a for a, _ in cpu], 3) + " ms",
                spread([b for _, b in cpu], 3) + " ms",
                "+" + spread([100 * (b / a - 1) for a, b in cpu], 0) + "%",
                AIMS["cpu"][store],
                f"{floor.median('cpu', KINDS[0]) / 10 / statistics.median(a for a, _ in cpu):.1f}%",
            ],
            [
                f"`{store}:`, p50 at one connection",
                spread([a for a, _ in one]) + " ms",
                spread([b for _, b in one]) + " ms",
                "+" + spread([b - a for a, b in one]) + " ms",
                f"<= {max(AIMS['p50'], floor.median('wall', KINDS[1]) / 1000):.2g} ms",
                f"{floor.median('wall', KINDS[1]) / 1000:.2f} ms",
            ],
        ]
    return rows


def stranger_rows(found: Found) -> list[list[str]]:
    return [
        [
            f"`{store}:`, turn {TURNS + 1} of a conversation at a router that never saw it, against one that knows it",
            spread(times["known"], 1) + " ms",
            spread(times["strange"], 1) + " ms",
            f"+{statistics.median(times['strange']) - statistics.median(times['known']):.1f} ms",
            AIMS["strange"],
            f"{found['floors'][store][1].median('wall', KINDS[2]) / 1000:.1f} ms",
        ]
        for store, times in found["strangers"].items()
    ]


def start_rows(begun: Found) -> list[list[str]]:
    return [
        [
            f"`sqlite:`, start until it answers, {begun['turns']:,} turns in the store",
            spread(begun["none"], 0) + " ms",
            spread(begun["sqlite"], 0) + " ms",
            f"+{statistics.median(begun['sqlite']) - statistics.median(begun['none']):.0f} ms",
            AIMS["start"],
            "",
        ]
    ]


def size_rows(sizes: Found) -> list[list[str]]:
    return [
        [
            f"{tokens:,}",
            f"{one['bytes'] / one['turns']:,.0f}",
            f"{one['text'] / one['turns']:,.0f}",
            f"{(one['bytes'] - one['text']) / one['tokens']:.1f}",
            f"{(one['bytes'] - one['text'] - 12 * one['tokens']) / one['turns']:,.0f}",
        ]
        for tokens, one in sizes.items()
    ]


def tables(found: Found) -> str:
    begun = found["starts"]
    rows = load_rows(found) + stranger_rows(found) + start_rows(begun)
    return "\n\n".join(
        [
            f"{machine()}. The median (least-largest).",
            table(["figure", "without", "with the store", "difference", "aim", "floor"], rows),
            "What the store takes for it in a process of its own, and what its calls take by themselves, for a turn:",
            floor_table(found["floors"]),
            f"Bytes of SQLite on disk of turns whose prompt is half as long as the reply; aim {AIMS['bytes']}. The store of"
            f" {begun['turns']:,} short turns has {begun['disk'] / 1e6:,.0f} MB.",
            table(
                [
                    "sampled tokens a turn",
                    "bytes a turn",
                    "of these text",
                    "bytes a token, without text",
                    "beyond text and 12 a token, a turn",
                ],
                size_rows(found["sizes"]),
                words=0,
            ),
        ]
    )


def show(rows: list[list[str]]) -> None:
    for row in rows:
        print(" | ".join(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, rounds=7, seconds=2)
    parser.add_argument("--turns", type=int, default=200_000, help="of the store that routers start with (%(default)s)")
    parser.add_argument("--conversations", type=int, default=12, help="at the strange router (%(default)s)")
    args = parser.parse_args()
    corpus = Corpus()
    found = {"floors": floors(8 * args.rounds, args.conversations), **loads(corpus, args.rounds, args.seconds)}
    show(load_rows(found))
    found["strangers"] = {name: strangers(corpus, name, args.conversations) for name in STORES}
    show(stranger_rows(found))
    found["sizes"] = {}
    for tokens in (200, 2000):
        with tempfile.TemporaryDirectory() as folder:
            found["sizes"][tokens] = uvloop.run(size(folder, corpus, tokens, 16 * args.conversations))
    show(size_rows(found["sizes"]))
    found["starts"] = starts(corpus, args.turns, args.rounds)
    show(start_rows(found["starts"]))
    text = tables(found)
    found["floors"] = {name: [one.medians() for one in both] for name, both in found["floors"].items()}
    write(args, "stores", text, found)


if __name__ == "__main__":
    main()
