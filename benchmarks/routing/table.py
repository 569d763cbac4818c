"""The results of `benchmarks.routing.load`: medians, as JSON and as a table in a page."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.pages import machine, put_between
from benchmarks.routing.simulation import LOADS

HEAD = ("router", "policy", "busiest / mean", "turns on their worker", "prompt tokens cached", "CPU a request, ms")


@dataclass(frozen=True)
class Result:
    """The outcome of a run. Shares are of one, times in milliseconds, the length of the run in seconds."""

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
    """A router with one policy: its runs, by the load and the number in flight, or why there are none."""

    router: str
    policy: str
    results: dict[str, list[Result]] = field(default_factory=dict)
    missing: str = ""

    def median(self, cell: str) -> dict[str, float] | None:
        """Return the medians of the rounds in a cell; None if there was no run."""
        if cell not in self.results:
            return None
        rounds = [asdict(one) for one in self.results[cell]]
        return {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}


def write(rows: Sequence[Row], versions: Mapping[str, str], *, out: Path | None, page: Path | None) -> None:
    """Write the JSON and the table, each if it has a path."""
    if out:
        results = {"machine": machine(), "versions": versions, "rows": [asdict(row) for row in rows]}
        out.write_text(json.dumps(results, indent=1) + "\n")
    if page:
        put_between(page, "routing-load", f"\n{table(rows, versions)}\n")


def table(rows: Sequence[Row], versions: Mapping[str, str]) -> str:
    """Return a table for each load, with a row for each policy; a cell has a figure for each number in flight."""
    cells = list(dict.fromkeys(cell for row in rows for cell in row.results))
    lines = [", ".join([machine(), *(f"`{name}` {version}" for name, version in versions.items())]) + "."]
    for load in LOADS:
        lines += _of_load(rows, load, [cell for cell in cells if cell.split()[0] == load])
    lines += [f"\n{row.router} with `{row.policy}` did not run: {row.missing}" for row in rows if row.missing]
    failed = [(row, sum(one.failures for runs in row.results.values() for one in runs)) for row in rows]
    lines += [f"\n{row.router} with `{row.policy}` failed {count} requests." for row, count in failed if count]
    return "\n".join(lines)


def _of_load(rows: Sequence[Row], load: str, cells: Sequence[str]) -> list[str]:
    if not cells:
        return []
    shown = " / ".join(cell.split()[1] for cell in cells)
    lines = [
        "",
        f"*{load}*, in each cell: at {shown} in flight." if len(cells) > 1 else f"*{load}*, at {shown} in flight.",
    ]
    lines += ["", f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}"]
    formats: dict[str, Callable[[float], str]] = {
        "busiest": "{:.2f}".format,
        "kept": "{:.1%}".format,
        "cached": "{:.0%}".format,
        "cpu": "{:.2f}".format,
    }
    for row in rows:
        medians = [row.median(cell) for cell in cells]
        if any(medians):
            texts = [" / ".join(form(one[key]) if one else "-" for one in medians) for key, form in formats.items()]
            lines.append(f"| {row.router} | `{row.policy}` | {' | '.join(texts)} |")
    return lines
