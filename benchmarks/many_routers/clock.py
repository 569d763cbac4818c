"""A wall clock of its own for each router, which can be set. Its `CLOCK_MONOTONIC` stays, as when a machine's clock is set."""

from __future__ import annotations

import os
import sys
import tempfile
import zipfile
from functools import cache
from pathlib import Path

from tests.support.debian import CACHE
from tests.support.wheels import fetch

LIBRARY = "libfaketime==3.0.1"
"""Debian's 0.9.10 lets `time.sleep` fail with EINVAL when the monotonic clock is to stay as it is."""
_INSIDE = "libfaketime/vendor/libfaketime/src/libfaketime.so.1"


class NoClockError(Exception):
    """This machine cannot give a process a clock of its own; the message says why."""


class Clock:
    """A clock that is `seconds` ahead of that of the machine."""

    def __init__(self, file: Path) -> None:
        """`file`: what processes with this clock read. Raises NoClockError."""
        self._file = file
        library = _library()
        settings = {
            "LD_PRELOAD": library,
            "FAKETIME_TIMESTAMP_FILE": file,
            "FAKETIME_CACHE_DURATION": 1,  # seconds until they notice
            "FAKETIME_DONT_FAKE_MONOTONIC": 1,
        }
        self.command = ("env", *(f"{name}={value}" for name, value in settings.items()))
        self.seconds = 0
        self.set(0)

    def set(self, seconds: int) -> None:
        """Set it: `seconds` ahead of the machine's, or behind if negative."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{seconds:+d}\n")
        os.replace(new, self._file)  # nobody reads half of it
        self.seconds = seconds


def sweep() -> None:
    """Remove what libfaketime has left in the memory of the machine for processes that were killed."""
    for left in Path("/dev/shm").glob("*faketime_s[eh]m_*"):
        if not Path("/proc", left.name.rpartition("_")[2]).exists():
            left.unlink(missing_ok=True)


@cache
def _library() -> Path:
    """Return libfaketime, out of its wheel. Raises NoClockError."""
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        raise NoClockError("libfaketime's wheel is for Linux on x86_64")
    kept = CACHE.with_name("clocks") / Path(_INSIDE).name
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            try:
                with zipfile.ZipFile(fetch(LIBRARY, Path(folder), "a clock for each process")) as wheel:
                    os.replace(wheel.extract(_INSIDE, folder), kept)
            except RuntimeError as error:
                raise NoClockError(str(error)) from error
    return kept
