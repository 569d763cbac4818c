"""Writes measured figures into pages, between two marks."""

from __future__ import annotations

import os
import platform
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
