"""What a cluster pays for a request: the CPU of the router plus that of its worker, turn by turn.

`python -m benchmarks.serving.cluster` runs an engine that does with its tokenizer what SGLang does (`instant_engine.py`,
`--tokenizer-path`): a text it encodes as a whole, in each turn; ids it takes as they are. This router sends ids and encodes
only what is new; others pass on the text. Of a worker only this is counted: not its HTTP server, its scheduler and its model.

All conversations play their first turn, then all their second, and so on, eight at a time; after each turn the CPU of the two
processes is read. The targets take turns; a cell shows the median of the rounds, the least and the largest.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator

import uvloop

from benchmarks.pages import spread, table
from benchmarks.processes import cpu_seconds
from benchmarks.serving.client import RawClient
from benchmarks.serving.conversations import NEW_TOKENS, TURNS, Conversation, Corpus, tokenizer_folder
from benchmarks.serving.targets import NAMES, Target, add_options, serving, versions, write

TARGETS = ("direct", "smg", "router")
AT_A_TIME = 8
Costs = list[tuple[float, float]]
"""Of each turn, CPU in milliseconds a request: of the router, and of the worker."""


async def play(target: Target, talks: list[Conversation], reply_tokens: int) -> None:
    """Play the next turn of each conversation."""
    left = iter(talks)

    async def connection() -> None:
        client = await RawClient.connect(target.url)
        for talk in left:
            answer = await target.ask(client, talk.request(reply_tokens, asks=not target.keeps))
            talk.heard(answer.body)
        await client.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_A_TIME):
            group.create_task(connection())


def measure(target: Target, worker: Target, corpus: Corpus, reply_tokens: int, count: int) -> Costs:
    """Play this many conversations."""
    talks = [Conversation(corpus, corpus.cut(NEW_TOKENS)) for _ in range(count)]

    def turns() -> Iterator[tuple[float, float]]:
        for _ in range(TURNS):
            before = cpu_seconds(target.process), cpu_seconds(worker.process)
            uvloop.run(play(target, talks, reply_tokens))
            after = cpu_seconds(target.process), cpu_seconds(worker.process)
            router, engine = (1000 * (end - start) / count for start, end in zip(before, after, strict=True))
            yield (0.0 if target is worker else router), engine

    return list(turns())


def run(reply_tokens: int, corpus: Corpus, args: argparse.Namespace) -> dict[str, list[Costs]]:
    """Measure all targets with replies of this many tokens."""
    found: dict[str, list[Costs]] = {}
    engine = ("--tokenizer-path", tokenizer_folder())
    with serving(args.targets, corpus.replies(reply_tokens), engine) as targets:
        for number in range(args.rounds + 1):
            for name in args.targets:
                if name in targets:
                    count = args.conversations if number else AT_A_TIME  # the first round warms up
                    costs = measure(targets[name], targets["direct"], corpus, reply_tokens, count)
                    if number:
                        found.setdefault(name, []).append(costs)
    for name, rounds in found.items():
        print(f"{reply_tokens} tokens  {name:<14} {' | '.join(figures(rounds))}", flush=True)
    return found


def figures(rounds: list[Costs]) -> list[str]:
    """Return for each turn the sum, and the router's part of it."""
    by_turn = [[costs[turn] for costs in rounds] for turn in range(TURNS)]
    return [f"{spread([sum(one) for one in costs])}, {spread([one[0] for one in costs])}" for costs in by_turn]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, rounds=3)
    parser.add_argument("--conversations", type=int, default=150, help="of a round (%(default)s)")
    parser.add_argument("--reply-tokens", type=int, nargs="+", default=[200, 2000])
    parser.add_argument("--targets", nargs="+", choices=NAMES, default=TARGETS)
    args = parser.parse_args()
    corpus = Corpus()
    found = {tokens: run(tokens, corpus, args) for tokens in args.reply_tokens}
    rows = [
        [f"{tokens:,}", NAMES[name], *figures(rounds)]
        for tokens, targets in found.items()
        for name, rounds in targets.items()
    ]
    head = ["reply tokens", "through", *(f"turn {turn}" for turn in range(1, TURNS + 1))]
    above = f"{versions(args.targets)}. CPU a request, ms: of router and worker, then of the router alone."
    costs = [
        {"reply_tokens": tokens, "target": name, "rounds": rounds}
        for tokens, targets in found.items()
        for name, rounds in targets.items()
    ]
    write(args, "cluster", f"{above}\n\n{table(head, rows, words=2)}", costs)


if __name__ == "__main__":
    main()
