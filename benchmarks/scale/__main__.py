"""Many long rollouts at once: what they cost a router, and whether all of them get through.

`python -m benchmarks.scale` opens many streams at once, through this router and through smg, to a group of engine doubles
(`engine.py`). Each engine steps like a real one: all of its streams get a token at the same moment, one an event, in SGLang's
form and size, with logprobs. Nothing is left out or put together. All events of all streams together come at a rate that
this machine's few cores can carry beside the engines and the clients, `--rate`: with more streams, each of them is slower.

A round opens all streams, waits for their first tokens, and measures in a window in which all are open; then it lets every
stream come to its end, and counts those that broke or did not end. The ways take turns, round by round.

`--routers` may also name two processes behind one port, and two routers over one SQLite file or one Redis; then CPU and memory
are those of all their processes, and the lag is that of one. `--workers` may name several sizes of the group. With `--tenants`,
clients of this router take the keys of as many tenants in turn. With `--drain`, each router gets SIGTERM in a last round, at
the end of the window, when all streams are open.

CPU is what the operating system counted for the router's process. The lag is the time of `GET /liveness`, twenty times a
second. The first row has no router: it shows what the engines, the clients and the machine add by themselves. Where other
programs want the same cores, lag and delays are theirs: the line over the table says for which part of the time a router was
ready to run and had no core. On Linux, `chrt -r 1` in front of the command lets all of its processes go before others.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Iterable, Iterator, Sequence

from benchmarks import foreign_routers
from benchmarks.pages import spread, table
from benchmarks.processes import DidNotStartError
from benchmarks.scale.groups import KEEPING, Member, Router, engines, free_ports, router
from benchmarks.scale.probe import Probe, probing
from benchmarks.scale.streams import NO_ROUTER, WAYS, Load, Sample, Way, measure
from benchmarks.serving.conversations import Corpus
from benchmarks.serving.open_loop import at
from benchmarks.serving.targets import add_options, versions, write
from router.serving.server import raise_limit

REPLY = 200  # tokens of a canned reply, which is repeated
WARM = Load(20, 0.05, 1.0)

Rounds = dict[Way, list[Sample]]


def run(load: Load, workers: int, args: argparse.Namespace, corpus: Corpus) -> Rounds:
    """Measure all ways with this many streams and workers. Their processes are new."""
    found: Rounds = {}
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(engines(corpus.replies(REPLY), free_ports(workers), load.pause))
        targets: dict[str, tuple[Router, Probe]] = {}
        direct = Router("direct", [Member(url, group.process) for url in group.urls])
        targets["direct"] = direct, stack.enter_context(probing(direct.member(0).url))
        for name in args.routers:
            try:
                one = stack.enter_context(router(name, group, args.router_flags, args.tenants))
                targets[name] = one, stack.enter_context(probing(one.member(0).url))
            except (foreign_routers.NotInstalledError, DidNotStartError) as error:
                print(f"{name}: {error}", flush=True)
        ways = [way for way in (NO_ROUTER, *WAYS) if way.router in targets]
        for way in ways:
            target, probe = targets[way.router]
            measure(target, group, way, Load(WARM.count, load.pause, 1.0), corpus, probe)
        for target, _ in targets.values():
            if target is not direct:
                target.settle()
        for number in range(args.rounds):
            for way in ways:
                target, probe = targets[way.router]
                found.setdefault(way, []).append(measure(target, group, way, load, corpus, probe))
                told(f"{load.count:>6,} {workers} {number} {way.name:<46}", found[way][-1])
        last = {way.router: way for way in ways if way is not NO_ROUTER}
        for way in last.values() if args.drain else ():
            target, probe = targets[way.router]
            found[way].append(measure(target, group, way, load, corpus, probe, drain=True))
            told(f"{load.count:>6,} {workers} SIGTERM {way.name:<46}", found[way][-1])
    return found


def told(what: str, sample: Sample) -> None:
    """Print a round."""
    print(f"{what} {' | '.join(figures([sample]))}", flush=True)
    if sample.drained is not None:
        print(f"       gone {sample.drained:.2f} s after the last stream", flush=True)
    for why in sample.broken[:3]:
        print(f"       broken: {why}", flush=True)


def figures(samples: Sequence[Sample]) -> list[str]:
    """Return what a row shows, of all rounds."""
    return [
        spread([one.cpu for one in samples], 0),
        spread([1000 * at(one.lag, 0.5) for one in samples], 1),
        spread([1000 * at(one.lag, 0.99) for one in samples], 1),
        spread([1000 * statistics.median(one.first or [0.0]) for one in samples], 0),
        f"{sum(one.timeouts for one in samples)} + {sum(len(one.broken) for one in samples)}",
    ]


def rows(name: str, load: Load, rounds: Rounds, tenants: int) -> Iterator[list[str]]:
    """Yield a row for each way."""
    for way, samples in _steady(rounds).items():
        direct = way is NO_ROUTER
        cpu, *rest = figures(samples)
        ratio = ""
        if not direct and (base := _steady(rounds).get(WAYS[0])):
            ratio = spread([one.cpu / other.cpu for one, other in zip(samples, base, strict=True)])
        others = spread([one.client + one.engine for one in samples], 0)
        # Of the first round only: what it leaves in memory is used again by the next.
        grown = "" if direct else f"{(samples[0].open - samples[0].before) / load.count / 1000:.0f}"
        of = f", {tenants} tenants" if tenants and way.router in KEEPING else ""
        yield [name, way.name + of, "" if direct else cpu, ratio, others, *rest, grown]


def _steady(rounds: Rounds) -> Rounds:
    """Return the rounds without SIGTERM."""
    return {way: [one for one in samples if one.drained is None] for way, samples in rounds.items()}


def drain_rows(name: str, load: Load, rounds: Rounds) -> Iterator[list[str]]:
    """Yield a row for each router that got SIGTERM."""
    for way, samples in rounds.items():
        for one in samples:
            if one.drained is not None:
                whole = load.count - one.timeouts - len(one.broken)
                yield [name, way.name, f"{whole:,}", f"{one.timeouts} + {len(one.broken)}", f"{one.drained:.2f}"]


def quiet(found: Iterable[Rounds]) -> str:
    """Return how far the machine was busy with other things."""
    samples = [one for rounds in found for samples in rounds.values() for one in samples]
    waited, late = max(one.waited for one in samples), max(one.late for one in samples)
    return (
        f"A router that was ready to run had no core for {100 * waited:.0f}% of the time at most,"
        f" and a step of an engine was {1000 * late:.0f} ms late at most."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, rounds=3, seconds=8)
    parser.add_argument("--streams", type=int, nargs="+", default=[100], help="open at once (100)")
    parser.add_argument(
        "--rate", type=float, default=4000, help="tokens a second of all streams together (%(default)g)"
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[16], help="engine doubles (16)")
    parser.add_argument("--routers", nargs="+", choices=("smg", "none", *KEEPING), default=["smg", "none", "router"])
    parser.add_argument("--tenants", type=int, default=0, help="of this router, with a key each (none)")
    parser.add_argument("--drain", action="store_true", help="stop each router in a last round")
    parser.add_argument("--mark", default="scale", help="between which marks of the page the table goes (%(default)s)")
    parser.add_argument("--router-flags", nargs=argparse.REMAINDER, default=[], help="for this router (last)")
    args = parser.parse_args()
    raise_limit()
    corpus = Corpus()
    loads = [Load(count, count / args.rate, args.seconds) for count in args.streams]
    found: dict[str, tuple[Load, Rounds]] = {}
    for load in loads:
        for workers in args.workers:
            name = f"{load.count:,}" if len(args.workers) == 1 else f"{load.count:,} of {workers} engines"
            found[name] = load, run(load, workers, args, corpus)
    lines = [row for name, (load, rounds) in found.items() for row in rows(name, load, rounds, args.tenants)]
    head = [
        *("streams", "way", "CPU a token, us", "of smg", "clients and engines, us", "lag p50, ms", "p99, ms"),
        *("first token, ms", "timeouts + broken", "memory a stream, kB"),
    ]
    about = (
        f"{versions(args.routers)}. {', '.join(map(str, args.workers))} engines, {args.rate:,.0f} tokens a second of all"
        f" streams together. The median of the rounds (least-largest). {quiet(rounds for _, rounds in found.values())}"
    )
    text = f"{about}\n\n{table(head, lines, words=2)}"
    if args.drain:
        head = ["streams", "SIGTERM to", "whole", "timeouts + broken", "gone after the last stream, s"]
        text += f"\n\n{table(head, (row for name, one in found.items() for row in drain_rows(name, *one)), words=2)}"
    data = {
        name: {way.name: [one.summary() for one in samples] for way, samples in rounds.items()}
        for name, (_, rounds) in found.items()
    }
    write(args, args.mark, text, data)


if __name__ == "__main__":
    main()
