"""What runs of `benchmarks.routing_load` come to: medians, as JSON and as a table in a page."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.pages import machine, put_between

HEAD = ("router", "policy", "busiest / mean", "turns on their worker", "prompt tokens cached", "CPU a request, ms")


@dataclass(frozen=True)
class Result:
    """One run: shares of one, milliseconds; the run's length in seconds."""

    busiest: float  # served tokens of the busiest worker, by the mean
    kept: float  # later turns on the worker of the turn before
    cached: float  # prompt tokens that were cached
    cpu: float
    p50: float
    seconds: float
    inflight: float  # on average
    failures: int


@dataclass
class Row:
    """A router with one policy: its runs by what was in flight, or why there are none."""

    router: str
    policy: str
    results: dict[int, list[Result]] = field(default_factory=dict)
    missing: str = ""

    def median(self, inflight: int) -> dict[str, float] | None:
        """Of its rounds; None if there was no run."""
        if inflight not in self.results:
            return None
        rounds = [asdict(one) for one in self.results[inflight]]
        return {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}


def write(rows: Sequence[Row], versions: Mapping[str, str], *, out: Path | None, page: Path | None) -> None:
    """Both, as far as they are wanted."""
    if out:
        told = {"machine": machine(), "versions": versions, "rows": [asdict(row) for row in rows]}
        out.write_text(json.dumps(told, indent=1) + "\n")
    if page:
        put_between(page, "routing-load", f"\n{table(rows, versions)}\n")


def table(rows: Sequence[Row], versions: Mapping[str, str]) -> str:
    """A row for each policy, and in each cell what came of all that was in flight."""
    levels = sorted({level for row in rows for level in row.results})
    shown = " / ".join(map(str, levels))
    measured = ", ".join([machine(), *(f"`{name}` {version}" for name, version in versions.items())])
    lines = [f"{measured}. In each cell: at {shown} in flight.", ""]
    lines += [f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}"]
    formats: dict[str, Callable[[float], str]] = {
        "busiest": "{:.2f}".format,
        "kept": "{:.0%}".format,
        "cached": "{:.0%}".format,
        "cpu": "{:.2f}".format,
    }
    for row in (one for one in rows if one.results):
        medians = [row.median(level) for level in levels]
        cells = [" / ".join(form(one[key]) if one else "not run" for one in medians) for key, form in formats.items()]
        lines.append(f"| {row.router} | `{row.policy}` | {' | '.join(cells)} |")
    lines += [f"\n{row.router} with `{row.policy}` did not run: {row.missing}" for row in rows if row.missing]
    failed = [(row, sum(one.failures for runs in row.results.values() for one in runs)) for row in rows]
    lines += [f"\n{row.router} with `{row.policy}` failed {count} requests." for row, count in failed if count]
    return "\n".join(lines)
