"""Writes measured figures into pages, between two marks."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path


def machine() -> str:
    """Return the line that describes this machine."""
    return f"{os.cpu_count()} cores, {platform.machine()}, CPython {platform.python_version()}"


def put_between(page: Path, name: str, content: str) -> None:
    """Replace the text between the marks `<!-- begin: NAME -->` and `<!-- end: NAME -->`."""
    begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
    head, found, rest = page.read_text().partition(begin)
    _, also_found, tail = rest.partition(end)
    if not (found and also_found):
        raise ValueError(f"{page} has no marks {begin} and {end}")
    page.write_text(f"{head}{begin}\n{content}\n{end}{tail}")


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return the median of rounds with their least and largest value, such as `0.31 (0.30-0.33)`."""
    middle, low, high = (f"{one:.{digits}f}" for one in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({low}-{high})" if len(values) > 1 else middle


def table(head: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """Return a table in Markdown. The first columns, as many as `words`, are of words, the others are of numbers."""
    rule = ["---" if column < words else "--:" for column in range(len(head))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))
