"""The terminal, or the file that takes its place."""

from __future__ import annotations

import sys

from rich import box
from rich.console import Console
from rich.table import Table

_WIDTH = 110  # cells, where there is no terminal


def console() -> Console:
    """Return a console on standard output that prints texts as they are: their brackets are not markup."""
    width = None if sys.stdout.isatty() else _WIDTH
    return Console(width=width, markup=False, emoji=False, highlight=False)


def plain_table() -> Table:
    """Return an empty table with lines below its head and above its foot."""
    return Table(box=box.SIMPLE, show_edge=False, pad_edge=False, show_footer=True)
