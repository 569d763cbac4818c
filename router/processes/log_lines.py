"""One log from several processes: whole lines, each with the number of its process."""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict

LONGEST_LINE = 1 << 20
"""Bytes after which a line is written in pieces: a process that never ends its line must not fill the parent's memory."""


class LineWriter:
    """Writes the lines of processes to stderr, those of process 2 after `2| `; lines of JSON hold the number themselves."""

    def __init__(self, *, numbered: bool) -> None:
        self._numbered = numbered
        self._rest: defaultdict[int, bytes] = defaultdict(bytes)

    def write(self, number: int, data: bytes) -> None:
        """Take what a process has written, and write the lines that are complete."""
        whole, newline, rest = (self._rest[number] + data).rpartition(b"\n")
        if len(rest) > LONGEST_LINE:
            whole, newline, rest = whole + newline + rest, b"\n", b""
        self._rest[number] = rest
        if newline:
            self._out(number, whole)

    def end(self, number: int) -> None:
        """Write what is left of a process that has ended."""
        if rest := self._rest.pop(number, b""):
            self._out(number, rest)

    def _out(self, number: int, lines: bytes) -> None:
        if self._numbered:
            mark = b"%d| " % number
            lines = mark + lines.replace(b"\n", b"\n" + mark)
        with contextlib.suppress(OSError):  # as logging does: stderr has no reader any more
            sys.stderr.flush()
            sys.stderr.buffer.write(lines + b"\n")
            sys.stderr.buffer.flush()
