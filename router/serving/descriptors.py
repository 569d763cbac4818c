"""How many connections a process may have open: the limit of its file descriptors, raised as far as possible."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger(__name__)

SPARE = 64
"""Descriptors for everything but connections: logs, the tokenizer's files, the listening socket."""

PLENTY = 1 << 20
"""Stands for a limit that is infinite or unknown."""


def raise_limit() -> int:
    """Raise the soft limit of open files to the hard one, and return the limit in force."""
    if sys.platform == "win32":
        return PLENTY
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            logger.info("open files: the limit was %d, and is %s now", soft, _shown(hard, resource.RLIM_INFINITY))
            soft = hard
    except (OSError, ValueError) as error:  # some systems have a lower limit elsewhere
        logger.warning("open files: the limit stays at %d: %s", soft, error)
    return PLENTY if soft == resource.RLIM_INFINITY else soft


def connections_for(descriptors: int) -> int:
    """Return how many clients fit: each of them may need a connection to a worker, too."""
    return max(1, (descriptors - SPARE) // 2)


def _shown(limit: int, infinity: int) -> str:
    return "none" if limit == infinity else str(limit)
