"""Routers on one store are hurt for some minutes, and everything that clients were told is counted.

`python -m benchmarks.many_routers.run --store redis --minutes 10`: three routers behind HAProxy, a store, two workers that
sample tokens whose text no tokenizer would encode so, and clients with conversations as text (plain, streamed, in batches,
several samples, aborted, left) and in sessions (OpenAI's and Anthropic's dialect in turns); with `--images` they show
pictures. Trainers claim the conversations as text, acknowledge them, give them back, or die with them. Processes are killed
with SIGKILL and stopped with SIGSTOP; connections to Redis are cut, delayed, held back, and lose answers. For root, the links
between routers and Redis lose packets in one direction or both, and the store's disk is full, slow, or hangs for a while. Wall
clocks of routers are set minutes ahead or behind. What is not possible is printed as skipped. At the end, a router that has
seen nothing is asked for all of it, trainers claim what is left, and the store is read as a whole.

Nothing that was answered may be lost, doubled, wrong, or seen by another tenant, and each reply of a rewarded conversation
is acknowledged by one trainer, once. What was told to be unsaved has to be there once the store is back. The exit status is 1
otherwise, and the shortest story of each fault is printed.

With `--fsync everysec` Redis may acknowledge a write up to two seconds before it gives it to the system, if a sync of the file
takes so long. A kill of Redis in that time loses it. Only `--fsync always` promises that nothing is.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.many_routers.clients import Client, Shared, Truth
from benchmarks.many_routers.count import Count, check_store
from benchmarks.many_routers.faults import Faults
from benchmarks.many_routers.ledger import Ledger
from benchmarks.many_routers.machines import ADMIN, FSYNCS, TENANTS, Machines
from benchmarks.many_routers.targets import check_targets
from benchmarks.many_routers.trainers import Trained, Trainer

STORIES = 8


@dataclass(frozen=True)
class Plan:
    """What to run.

    Attributes:
        trainers: how many claim what is sampled as text.
        store: `sqlite` or `redis`; `fsync` is Redis' `appendfsync`.
        flags: further flags of the routers.
        apart: prefill and decode workers, two of each.
        ranks: data-parallel ranks of each worker.
        images: the model sees, and clients show it pictures.
    """

    store: str = "sqlite"
    minutes: float = 10.0
    routers: int = 3
    clients: int = 32
    trainers: int = 4
    fsync: str = "always"
    seed: int = 0
    flags: Sequence[str] = ()
    apart: bool = False
    ranks: int = 1
    images: bool = False


@dataclass(frozen=True)
class Result:
    """What was counted, and the broken promises in words."""

    counts: Counter[str]
    wrong: Sequence[str]

    def __str__(self) -> str:
        return "\n".join(f"{count:>8,}  {what}" for what, count in sorted(self.counts.items()))


def run(
    plan: Plan, folder: Path, progress: float = 30.0, plant: Callable[[Ledger, str], None] = lambda _, __: None
) -> Result:
    """Run the routers, clients and faults, then count. All files are below `folder`.

    `plant` is called before the count, with the ledger and the store's URL: what it breaks, the count has to find.
    """
    ledger = Ledger()
    made = Machines(
        *(plan.store, folder, plan.routers, plan.fsync, plan.flags),
        apart=plan.apart,
        ranks=plan.ranks,
        images=plan.images,
    )
    with made as machines:
        for what in machines.absent:
            print(f"SKIPPED: {what}", flush=True)
        truth = Truth(machines.workers)
        shared = Shared(machines.url, ledger, truth, images=plan.images)
        clients = [Client(shared, number, plan.seed) for number in range(plan.clients)]
        trained = Trained(shared)
        trainers = [Trainer(shared, trained, number, plan.seed) for number in range(plan.trainers)]
        faults = Faults(machines, ledger, plan.seed)
        with _threads(
            [*(one.run for one in (*clients, *trainers)), faults.run], [shared.stopping.set, faults.stop]
        ) as threads:
            end = time.monotonic() + 60 * plan.minutes
            while time.monotonic() < end and all(one.is_alive() for one in threads):
                time.sleep(min(progress, max(0.1, end - time.monotonic())))
                _show(ledger, faults)
            died = [one.name for one in threads if not one.is_alive()]
            faults.stop()
            threads[-1].join(60)
            shared.stopping.set()
            try:
                machines.heal()
            except TimeoutError as error:
                ledger.accuse("hangs", str(error))
            plant(ledger, machines.store)
        if died:
            ledger.accuse("wrong", f"threads of the harness itself ended: {died}")
        fresh = machines.router("fresh")
        with fresh:
            fresh.wait_until_up()
            for number in range(len(TENANTS)):
                Trainer(shared, trained, number, plan.seed, fresh.url).rest()
            count = Count(fresh.url, ledger, truth, trained)
            count.run()
        placed = check_targets([one.url for one in machines.routers], ADMIN, ledger)
        stored = check_store(machines.store, ledger, truth)
        errors = _complaints(folder)
    counts = Counter({f"told: {what}": number for what, number in ledger.counts.items()})
    counts += Counter({f"count: {what}": number for what, number in count.counts.items()})
    counts += Counter({f"fault: {what}": number for what, number in faults.counts.items()})
    counts += Counter({f"skipped: {what.partition(':')[0]}": 1 for what in made.absent})
    counts += Counter({f"targets: {what}": number for what, number in placed.items()})
    counts += Counter({f"store: {what}": number for what, number in stored.items()})
    counts += Counter({f"log: {what}": number for what, number in errors.items()})
    first: dict[str, list[str]] = {}
    for one in ledger.wrong:
        some = first.setdefault(one.kind, [])
        if len(some) < STORIES:
            some.append(ledger.story(one))
    return Result(counts, [story for some in first.values() for story in some])


def _show(ledger: Ledger, faults: Faults) -> None:
    answered = sum(number for what, number in ledger.counts.items() if what.endswith(" answered"))
    print(f"{ledger.now():7.0f} s  {answered:>7,} answered  {sum(faults.counts.values()):>4} faults", flush=True)


@contextlib.contextmanager
def _threads(works: Sequence[object], stops: Sequence[object]) -> Iterator[list[threading.Thread]]:
    threads = [threading.Thread(target=work, daemon=True) for work in works]  # type: ignore[arg-type]
    for one in threads:
        one.start()
    try:
        yield threads
    finally:
        for stop in stops:
            stop()  # type: ignore[operator]
        for one in threads:
            one.join(90)


def _complaints(folder: Path) -> Counter[str]:
    """Return what routers logged as errors, without times and numbers."""
    found: Counter[str] = Counter()
    for log in folder.glob("*.log"):
        for line in log.read_text(errors="replace").splitlines():
            if " ERROR " in line or line.startswith("Traceback"):
                found[re.sub(r"[0-9a-f]{8,}|\d+", "#", line.split("ERROR")[-1])[:200]] += 1
    return found


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = argparse.ArgumentParser(prog="python -m benchmarks.many_routers.run", description=__doc__.split("\n")[0])
    found.add_argument("--store", choices=("sqlite", "redis"), default="redis")
    found.add_argument("--minutes", type=float, default=10.0)
    found.add_argument("--routers", type=int, default=3)
    found.add_argument("--clients", type=int, default=32)
    found.add_argument("--fsync", choices=FSYNCS, default="always", help="Redis' appendfsync (%(default)s)")
    found.add_argument("--seed", type=int, default=0)
    found.add_argument("--folder", type=Path, help="where logs and the store stay")
    found.add_argument("--apart", action="store_true", help="prefill and decode workers, two of each")
    found.add_argument("--ranks", type=int, default=1, help="data-parallel ranks of each worker")
    found.add_argument("--images", action="store_true", help="a model that sees, and clients that show it pictures")
    found.add_argument("flags", nargs="*", help="further flags of the routers, behind --")
    return found


def main() -> int:
    """Run what the command line says."""
    args = parser().parse_args()
    plan = Plan(
        *(args.store, args.minutes, args.routers, args.clients),
        fsync=args.fsync,
        seed=args.seed,
        flags=args.flags,
        apart=args.apart,
        ranks=args.ranks,
        images=args.images,
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        result = run(plan, folder)
    for story in result.wrong:
        print(story)
    print(result)
    return 1 if result.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
