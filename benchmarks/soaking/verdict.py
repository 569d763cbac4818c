"""The rules that a run must satisfy, with the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.soaking.watch import Sample, Scrape, slope

LAG_MS = 20.0
GROWTH_MB_PER_HOUR = 20.0
LONG_ENOUGH = 600.0
"""Seconds after which the slope is meaningful: before that, memory is still filling."""
MORE_FDS, MORE_THREADS = 20, 8


@dataclass(frozen=True)
class Rule:
    """A rule. `held` is None if it is not judged: for comparison only, or too little data."""

    name: str
    value: str
    held: bool | None

    def __str__(self) -> str:
        mark = {True: "held", False: "BROKEN", None: "not judged"}[self.held]
        return f"{self.name:<58} {self.value:>28}   {mark}"


@dataclass(frozen=True)
class Finding:
    """The measurements of a run.

    Attributes:
        samples: the samples under load.
        lag: p50 and p99 of the event loop's lag over the whole run, in milliseconds.
        machine: the same for a process that only sleeps.
        idle: what was in flight when all clients had gone, by the place where it was counted.
        fds, threads: numbers before and after the load.
        asked: generations that clients asked for, without bad requests.
        chats: those of chats without a session: two memories judge their replies.
        last: /metrics at the end.
        retrieved: conversations that were compared.
        finalized: sessions whose trajectory was.
        wrong: complaints of clients and of the trouble.
        errors: error lines of the router's log.
        exit_code: the router's, after SIGTERM.
    """

    samples: Sequence[Sample]
    lag: tuple[float, float]
    machine: tuple[float, float]
    idle: dict[str, int]
    fds: tuple[int, int]
    threads: tuple[int, int]
    asked: int
    chats: int
    last: Scrape
    retrieved: int
    finalized: int
    wrong: Sequence[str]
    errors: Sequence[str]
    exit_code: int | None


def verdict(found: Finding) -> list[Rule]:
    """Return all rules."""
    half = found.samples[len(found.samples) // 2 :]
    growth = slope(half)
    long_enough = half[-1].at - half[0].at >= LONG_ENOUGH / 2
    outcomes = found.last.by("tito_router_generations_total", "outcome")
    known = sum(outcomes.values())
    kinds = ("tito_radix_replies_total", "tito_session_replies_total")
    recorded = sum(sum(found.last.by(name, "recorded").values()) for name in kinds) - found.chats
    evicted = found.samples[-1].evicted
    return [
        Rule("event loop lag, p50 and p99 over all of it", _both(found.lag), found.lag[1] < LAG_MS),
        Rule("the same of a process that only sleeps", _both(found.machine), None),
        Rule(
            "growth of memory in the second half",
            f"{growth:+.1f} MB an hour at {half[-1].rss:.0f} MB",
            growth < GROWTH_MB_PER_HOUR if long_enough else None,
        ),
        Rule(
            "open files, before and after", f"{found.fds[0]}, {found.fds[1]}", found.fds[1] <= found.fds[0] + MORE_FDS
        ),
        Rule(
            "threads, before and after",
            f"{found.threads[0]}, {found.threads[1]}",
            found.threads[1] <= found.threads[0] + MORE_THREADS,
        ),
        Rule("in flight when all clients have gone", str(sum(found.idle.values())), not any(found.idle.values())),
        Rule(
            "generations without exactly one outcome",
            f"{found.asked - known:.0f} of {found.asked}",
            found.asked == known,
        ),
        Rule("replies without a verdict of the memory", f"{known - recorded:.0f} of {known:.0f}", known == recorded),
        Rule("conversations compared token by token", str(found.retrieved), found.retrieved > 0),
        Rule("sessions whose trajectory was counted", str(found.finalized), found.finalized > 0),
        Rule("replies that were forgotten for want of room", str(evicted), evicted > 0 if long_enough else None),
        Rule("complaints of clients", str(len(found.wrong)), not found.wrong),
        Rule("errors in the router's log", str(len(found.errors)), not found.errors),
        Rule("exit code of the router after SIGTERM", str(found.exit_code), found.exit_code == 0),
    ]


def _both(quantiles: tuple[float, float]) -> str:
    return f"{quantiles[0]:.1f}, {quantiles[1]:.1f} ms"
