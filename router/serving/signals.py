"""The signals on which a router drains.

A terminal that is closed sends SIGHUP, its shell may send one more, and some supervisors send one right behind SIGTERM. So
SIGHUP begins the draining and never counts as the second signal, which stops at once.

One of several processes is told to stop by its parent, and often by a supervisor as well that signals every process (Slurm, or
systemd by default). So for such a process no SIGTERM is the second one: its parent sends `HURRY`.
"""

from __future__ import annotations

import signal

HURRY: int | None = getattr(signal, "SIGUSR2", None)
"""Makes one of several processes stop at once."""


def stop_signals() -> list[signal.Signals]:
    """Return the signals to handle: SIGTERM, SIGINT, and SIGHUP unless this process ignores it, as under `nohup`."""
    found = [signal.SIGTERM, signal.SIGINT]
    hangup = getattr(signal, "SIGHUP", None)
    if hangup is not None and signal.getsignal(hangup) is not signal.SIG_IGN:
        found.append(hangup)
    return found


def is_hangup(number: int) -> bool:
    """Return whether a signal is SIGHUP."""
    return number == getattr(signal, "SIGHUP", None)
