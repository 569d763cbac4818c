"""Progress bars on standard error: only on a terminal, and only if `rich` is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int], None]
"""Called with the amount of further progress."""


@contextmanager
def bar(title: str, total: int) -> Iterator[Advance]:
    """Show a bar for the length of the block; yield the function that moves it."""
    if not sys.stderr.isatty():
        yield _nothing
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield _nothing
        return
    with Progress(console=Console(stderr=True), transient=True) as progress:
        number = progress.add_task(title, total=total)
        (task,) = progress.tasks

        def advance(count: int) -> None:
            progress.advance(number, count)
            if task.finished:  # 100% would say that the work is done, and it goes on: a pulse instead
                task.total = task.finished_time = None

        yield advance


def _nothing(_: int) -> None:
    pass
