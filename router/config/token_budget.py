"""The default budget of remembered tokens, and the default limit of a reply's size."""

from __future__ import annotations

import os
from pathlib import Path

DEFAULT_BUDGET = "a quarter of the memory, at 16 bytes a token"

_BYTES_PER_TOKEN = 16
"""8 of id and logprob, about 4 of text, the rest of bookkeeping."""

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""The limit of the container that this process runs in, in version 2 and in version 1 of control groups."""


def token_budget(max_tokens: int | None) -> int:
    """Return `max_tokens`; for None, the tokens that fit into a quarter of the memory."""
    return _memory() // 4 // _BYTES_PER_TOKEN if max_tokens is None else max_tokens


def reply_budget(max_bytes: int | None) -> int:
    """Return `max_bytes`; for None, a sixteenth of the memory: while a reply is read, it takes two to three times its size."""
    return _memory() // 16 if max_bytes is None else max_bytes


MEDIA_BUDGET = "an eighth of the memory"


def media_budget(max_bytes: int | None) -> int:
    """Return `max_bytes`; for None, an eighth of the memory."""
    return _memory() // 8 if max_bytes is None else max_bytes


def _memory() -> int:
    """Return the bytes of memory of the machine, or of the container."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _CGROUP_LIMITS:
        try:
            limit = Path(path).read_text().strip()
        except OSError:
            continue
        if limit.isdigit():  # without a limit it is `max`
            memory = min(memory, int(limit))
    return memory
