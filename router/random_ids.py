"""Random ids, drawn from the system for many requests at a time, because the system call costs more than the rest."""

from __future__ import annotations

import os

ID_BYTES = 16
AT_ONCE = 256

_drawn: list[str] = []
os.register_at_fork(after_in_child=_drawn.clear)  # or two processes would give the same ids


def random_id() -> str:
    """Return 32 hexadecimal digits that cannot be guessed, a new id each time. Threads may call it."""
    try:
        return _drawn.pop()
    except IndexError:
        digits = os.urandom(ID_BYTES * AT_ONCE).hex()
        new = [digits[at : at + 2 * ID_BYTES] for at in range(0, len(digits), 2 * ID_BYTES)]
        last = new.pop()
        _drawn.extend(new)
        return last
