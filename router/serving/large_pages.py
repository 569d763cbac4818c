"""Moves the router's memory into pages of 2 MB.

A request touches libraries, the interpreter's objects and the tables of a vocabulary: hundreds of megabytes, while the TLB has
entries for some thousand pages. With pages of 4 KB, TLB misses take a tenth of a request's time on a virtual machine. Linux can
move memory into large pages afterwards (MADV_COLLAPSE, since 6.1). Where it cannot or must not, nothing changes.
"""

from __future__ import annotations

import ctypes
import logging
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

DELAY_SECONDS = 2.0
"""By then, threads have loaded the rest, such as a chat template's engine."""

PAUSE_SECONDS = 0.002
"""Between two pages: while one is moved, the event loop may have to wait when it needs new memory."""

_SYSTEM = Path("/sys/kernel/mm/transparent_hugepage")
_COLLAPSE = 25


def use_later() -> threading.Event:
    """Move the memory that is in use some seconds from now, in a thread that ends when the returned event is set.

    A system that has to make room for each page moves only some in a second, and the end of a process waits for them.
    """
    ended = threading.Event()
    if sys.platform == "linux":
        threading.Thread(target=_use, args=(ended,), name="large pages", daemon=True).start()
    return ended


def _use(ended: threading.Event) -> None:
    if ended.wait(DELAY_SECONDS):
        return
    try:
        if "[never]" in (_SYSTEM / "enabled").read_text():
            raise OSError("transparent_hugepage/enabled is never")
        size = int((_SYSTEM / "hpage_pmd_size").read_text())
        moved = move(list(places(Path("/proc/self/smaps").read_text(), size)), size, ended)
    except (OSError, AttributeError) as error:  # a system without them
        logger.info("memory stays in small pages: %s", error)
    else:
        logger.info("%d MB of memory are in large pages", moved * size >> 20)


def places(smaps: str, size: int) -> Iterator[int]:
    """Yield the address of each large page within memory that this process has for itself. `smaps`: `/proc/self/smaps`.

    What it shares with a process that it was forked from would be copied.
    """
    for begin, end, facts in _MAPPING.findall(smaps):
        if _SHARED.search(facts) is None:
            yield from range(-(-int(begin, 16) // size) * size, int(end, 16) - size + 1, size)


_MAPPING = re.compile(r"^(\w+)-(\w+) rw-p \S+ \S+ 0 .*\n((?:[A-Z].*\n)+)", re.MULTILINE)
"""Memory that can be written and belongs to no file, with the lines about it."""
_SHARED = re.compile(r"^Shared_\w+: +[1-9]", re.MULTILINE)


def move(pages: Iterable[int], size: int, ended: threading.Event) -> int:
    """Move the memory at these addresses into large pages, and return how many there are now. Unused memory stays unused.

    It goes on until `ended` is set.
    """
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    moved = 0
    for page in pages:
        moved += advise(page, size, _COLLAPSE) == 0
        if ended.wait(PAUSE_SECONDS):
            break
    return moved
