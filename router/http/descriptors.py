"""How many connections a process may have open: its limit of file descriptors, raised as far as it goes."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger(__name__)

SPARE = 64
"""Descriptors for all that is not a connection: logs, the tokenizer's files, the listening socket."""

PLENTY = 1 << 20
"""What a limit that is none, or is not known, counts as."""


def raise_limit() -> int:
    """Raise the soft limit of open files to the hard one, and return what is in force now."""
    if sys.platform == "win32":
        return PLENTY
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            logger.info("open files: the limit was %d, and is %s now", soft, _shown(hard, resource.RLIM_INFINITY))
            soft = hard
    except (OSError, ValueError) as error:  # some systems have a lower one that is not the process's
        logger.warning("open files: the limit stays at %d: %s", soft, error)
    return PLENTY if soft == resource.RLIM_INFINITY else soft


def connections_for(descriptors: int) -> int:
    """How many clients there may be: each of them may need a connection to a worker, too."""
    return max(1, (descriptors - SPARE) // 2)


def _shown(limit: int, infinity: int) -> str:
    return "none" if limit == infinity else str(limit)
