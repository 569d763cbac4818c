"""The output: a terminal, or a file in its place."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Column, Table

_WIDTH = 110  # cells, where there is no terminal


def console() -> Console:
    """Return a console on standard output that prints texts unchanged: their brackets are not markup."""
    width = None if sys.stdout.isatty() else _WIDTH
    return Console(width=width, markup=False, emoji=False, highlight=False)


def plain_table(head: Sequence[str], rows: Iterable[Sequence[str]], foot: Sequence[str]) -> Table:
    """Return a table of numbers, with lines below its head and above its foot."""
    columns = (Column(title, total, justify="right") for title, total in zip(head, foot, strict=True))
    table = Table(*columns, box=box.SIMPLE, show_edge=False, pad_edge=False, show_footer=True)
    for row in rows:
        table.add_row(*row)
    return table
