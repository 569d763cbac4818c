"""Make the tables of docs/reference.md, the router's flags and metrics, from the code.

Usage: python -m scripts.make_reference [--check]

The script replaces what is between the marks of the page; the rest is written by hand. `--check` changes nothing and exits
with 1 if the page differs from the code. Nothing in the tables depends on the machine.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.registry import Collector

from middleware_hub.media.calls import MediaCollector
from middleware_hub.media.shelf import Shelf
from middleware_hub.media.stock import Stock
from middleware_hub.metrics import GroupsCollector, RadixMetrics, SessionMetrics
from middleware_hub.persistence import metrics as store_metrics
from middleware_hub.persistence.memory import Memory
from middleware_hub.persistence.spelling import Spelling
from middleware_hub.persistence.weight_versions import VersionLog
from middleware_hub.radix.tree import RadixTree
from middleware_hub.sessions.registry import SessionRegistry
from middleware_hub.spans.versions import VersionClock, WorkerVersions
from middleware_hub.store.opening import open_store
from middleware_hub.store.records import Serials
from router.flags import parser
from router.observability.kv_metrics import KvCollector
from router.observability.metrics import RouterMetrics, WorkerCollector
from router.peers.peers import Peers, PeersCollector
from router.policies import POLICIES, create_policy
from router.policies.base import HasMetrics
from router.processes.supervisor import ParentMetrics

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference.md"

_DEFAULT = re.compile(r"\s*\(([^()]*)\)$")
"""The end of a help text: what holds without the flag."""


def flags() -> Iterator[tuple[str, list[argparse.Action]]]:
    """Yield the parser's groups: title and flags, without `--help`."""
    for group in parser()._action_groups:
        actions = [a for a in group._group_actions if a.option_strings and not isinstance(a, argparse._HelpAction)]
        if actions:
            yield group.title or "", actions


class _Registry(CollectorRegistry):
    """A registry that keeps its collectors in the order of registration."""

    def __init__(self) -> None:
        super().__init__()
        self.collectors: list[Collector] = []

    def register(self, collector: Collector) -> None:
        super().register(collector)
        self.collectors.append(collector)


def metrics() -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    """Yield the name, type, labels and meaning of each metric. A counter's name ends in `_total`, as in /metrics."""
    registry = _Registry()
    RouterMetrics(registry)
    registry.register(WorkerCollector(lambda: ()))
    for policy in map(create_policy, POLICIES):
        if isinstance(policy, HasMetrics):
            registry.register(policy)
    registry.register(KvCollector(None, None))
    registry.register(PeersCollector(Peers()))
    ProcessCollector(registry=registry)
    measure: Any = None  # an empty tree has nothing to measure
    tree, store = RadixTree(measure), open_store("sqlite:none")
    RadixMetrics(registry, tree)
    registry.register(GroupsCollector({}, lambda: (0, 0)))
    registry.register(MediaCollector(Stock(Shelf(1))))
    log = VersionLog(store, VersionClock(), WorkerVersions())
    store_metrics.register(registry, Memory(tree, store, Serials(), log, Spelling(lambda _: "", lambda _: "", ())))
    SessionRegistry(SessionMetrics(registry), max_tokens=1)
    ParentMetrics(registry, int)
    for collector in registry.collectors:
        for metric in collector.collect():
            # Labels are public on samples only, and there may be none yet.
            labels = getattr(metric, "_labelnames", ()) or getattr(collector, "_labelnames", ())
            name = metric.name + ("_total" if metric.type == "counter" else "")
            yield name, metric.type, tuple(labels), metric.documentation


def flags_table() -> str:
    parts = []
    for title, actions in flags():
        rows = ["| flag | default | meaning |", "|---|---|---|"]
        for action in actions:
            meaning, default = _meaning_and_default(action)
            rows.append(f"| `{_spelled(action)}` | {default} | {_cell(meaning)} |")
        parts.append(f"### {_heading(title)}\n\n" + "\n".join(rows))
    return "\n\n".join(parts)


def metrics_table() -> str:
    rows = ["| name | type | labels | meaning |", "|---|---|---|---|"]
    for name, kind, labels, meaning in metrics():
        shown = ", ".join(f"`{label}`" for label in labels)
        rows.append(f"| `{name}` | {kind} | {shown} | {_cell(meaning.rstrip('.'))} |")
    return "\n".join(rows)


def made(page: str) -> str:
    """Return the page with new tables. Raise ValueError if the marks are missing."""
    for name, table in (("flags", flags_table()), ("metrics", metrics_table())):
        begin, end = f"<!-- begin: {name} -->\n", f"<!-- end: {name} -->"
        head, rest = page.split(begin)
        _, tail = rest.split(end)
        page = f"{head}{begin}\n{table}\n\n{end}{tail}"
    return page


def _heading(title: str) -> str:
    return {"options": "In general"}.get(title, title[:1].upper() + title[1:])


def _spelled(action: argparse.Action) -> str:
    """Return the flag with a placeholder for its value."""
    value = action.metavar or ""
    if action.choices is not None:
        value = f"{{{','.join(map(str, action.choices))}}}"
    return f"{action.option_strings[-1]} {value}{' ...' if action.nargs == '+' else ''}".rstrip()


def _meaning_and_default(action: argparse.Action) -> tuple[str, str]:
    help = (action.help or "").replace("%%", "%")
    found = _DEFAULT.search(help)
    if found is not None:
        return help[: found.start()], found[1]
    return help, "" if action.const is None else "off"


def _cell(text: str) -> str:
    """Return the text as Markdown, with flags, paths and headers as code."""
    text = text.replace("|", r"\|").replace("<", "&lt;")
    return re.sub(r"(?<![\w`])(--[a-z][\w-]*|/[a-z]\w+(?:/\w+)*|x-[a-z-]+)(?![\w`])", r"`\1`", text)


def main() -> None:
    options = argparse.ArgumentParser(description="Make the tables of docs/reference.md.")
    options.add_argument("--check", action="store_true", help="change nothing; exit with 1 if the page is out of date")
    check = options.parse_args().check
    page = PAGE.read_text(encoding="utf-8")
    fresh = made(page)
    if check:
        sys.exit(None if fresh == page else "docs/reference.md differs from the code: run `make reference`")
    PAGE.write_text(fresh, encoding="utf-8")


if __name__ == "__main__":
    main()
