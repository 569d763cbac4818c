"""What a streamed reply costs: the time to its first token, and the CPU of a long cumulative one.

`python -m benchmarks.serving.streams` asks first for short streams over one connection, and takes the time from the request
until the first bytes of the reply's body; the targets take turns, request by request. Then it streams replies of 1,000 to 8,000
tokens, one token an event, as fast as they can be read. As SGLang's own, such a stream is cumulative: each event repeats
everything so far, so the worker's bytes grow with the square of the length, and at best the CPU for each byte stays the same.
Logprobs are in the worker's stream; this router keeps them, and the other targets pass them on.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import uvloop

from benchmarks.pages import spread, table
from benchmarks.processes import cpu_seconds
from benchmarks.serving.client import Answer, RawClient
from benchmarks.serving.conversations import NEW_TOKENS, Conversation, Corpus
from benchmarks.serving.targets import NAMES, Target, add_options, serving, versions, write

TARGETS = ("direct", "bare", "router", "smg")
FIRST_TOKENS = 8  # of a stream whose first token is timed
PAUSE = 0.003  # seconds between its events: the first token is on its way alone


async def stream(client: RawClient, target: Target, corpus: Corpus, tokens: int) -> Answer:
    """Ask for one stream with a new prompt, and read all of it."""
    talk = Conversation(corpus, corpus.cut(NEW_TOKENS))
    answer = await target.ask(client, talk.request(tokens, asks=not target.keeps, stream=True))
    if b"data: [DONE]\n\n" not in answer.body[-40:]:
        raise SystemExit(f"{target.name} broke a stream off: {answer.body[-500:]!r}")
    return answer


async def first_tokens(targets: Sequence[Target], corpus: Corpus, count: int) -> dict[str, float]:
    """Return the median time until the first token of each target, in milliseconds."""
    clients = [await RawClient.connect(target.url) for target in targets]
    times: dict[str, list[float]] = {target.name: [] for target in targets}
    for number in range(count + 20):
        for target, client in zip(targets, clients, strict=True):
            begun = time.perf_counter()
            answer = await stream(client, target, corpus, FIRST_TOKENS)
            if number >= 20:  # the first ones warm up
                times[target.name].append(1000 * (answer.first - begun))
    for client in clients:
        await client.close()
    return {name: statistics.median(found) for name, found in times.items()}


@dataclass(frozen=True)
class Long:
    """What one long stream cost. `megabytes` is what the worker sent."""

    tokens: int
    megabytes: float
    seconds: float
    cpu: float


async def long_stream(target: Target, corpus: Corpus, tokens: int) -> tuple[Answer, float]:
    client = await RawClient.connect(target.url)
    begun = time.perf_counter()
    answer = await stream(client, target, corpus, tokens)
    took = time.perf_counter() - begun
    await client.close()
    return answer, took


def long_streams(args: argparse.Namespace, corpus: Corpus, tokens: int) -> dict[str, list[Long]]:
    """Stream replies of this many tokens through each target."""
    found: dict[str, list[Long]] = {}
    with serving(args.targets, corpus.replies(tokens, count=1)) as targets:
        answer, _ = uvloop.run(long_stream(targets["direct"], corpus, tokens))
        megabytes = answer.size / 1e6
        for number in range(args.rounds + 1):
            for name in args.targets:
                if name not in targets or name == "direct":
                    continue
                before = cpu_seconds(targets[name].process)
                _, took = uvloop.run(long_stream(targets[name], corpus, tokens if number else 200))
                cpu = cpu_seconds(targets[name].process) - before
                if number:
                    found.setdefault(name, []).append(Long(tokens, megabytes, took, cpu))
    for name, rounds in found.items():
        print(f"{tokens} tokens, {megabytes:.0f} MB  {name:<8} {' | '.join(figures(rounds))}", flush=True)
    return found


def figures(rounds: Sequence[Long]) -> list[str]:
    """Return the CPU in all, for each event, and for each byte of the worker; and the duration."""
    return [
        spread([one.cpu for one in rounds]),
        spread([1e6 * one.cpu / one.tokens for one in rounds], 0),
        spread([1000 * one.cpu / one.megabytes for one in rounds], 2),
        spread([one.seconds for one in rounds]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, rounds=3)
    parser.add_argument("--requests", type=int, default=200, help="whose first token is timed, a round (%(default)s)")
    parser.add_argument("--tokens", type=int, nargs="*", default=[1000, 2000, 4000, 8000], help="of the long streams")
    parser.add_argument("--targets", nargs="+", choices=NAMES, default=TARGETS)
    args = parser.parse_args()
    corpus = Corpus()
    first: dict[str, list[float]] = {}
    with serving(args.targets, corpus.replies(FIRST_TOKENS), ("--pause", str(PAUSE))) as targets:
        chosen = [targets[name] for name in args.targets if name in targets]
        for _ in range(args.rounds):
            for name, median in uvloop.run(first_tokens(chosen, corpus, args.requests)).items():
                first.setdefault(name, []).append(median)
    added = {
        name: [one - base for one, base in zip(medians, first["direct"], strict=True)] if "direct" in first else []
        for name, medians in first.items()
    }
    first_rows = [
        [NAMES[name], spread(medians), spread(added[name]) if added[name] and name != "direct" else ""]
        for name, medians in first.items()
    ]
    for row in first_rows:
        print("first token", " | ".join(row), flush=True)
    long = {tokens: long_streams(args, corpus, tokens) for tokens in args.tokens}
    long_rows = [
        [f"{tokens:,}", NAMES[name], f"{rounds[0].megabytes:,.0f}", *figures(rounds)]
        for tokens, targets_found in long.items()
        for name, rounds in targets_found.items()
    ]
    head = ["tokens", "target", "MB of the worker", "CPU, s", "CPU an event, us", "CPU a byte, ns", "duration, s"]
    written = "\n\n".join(
        [
            f"{versions(args.targets)}. The median of the rounds (least-largest).",
            table(["first token of a stream", "p50, ms", "added, ms"], first_rows),
            table(head, long_rows, words=2),
        ]
    )
    rows = [
        {"target": name, "rounds": [asdict(one) for one in rounds]}
        for targets_found in long.values()
        for name, rounds in targets_found.items()
    ]
    write(args, "streams", written, {"first_token_ms": first, "long": rows})


if __name__ == "__main__":
    main()
