"""What is remembered of renderings, by the options of a request: few sets of them, and little of each."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

REMEMBERED = 1024
"""How many sets of options, and of tool names, are remembered. Clients choose both."""
_LONGEST = 1024
"""Characters of a set of options that is remembered as it is; of a longer one a digest is."""


def options_key(options: Mapping[str, Any]) -> tuple[object, ...]:
    """Return what a tail may depend on: the value of a plain option, the presence of a list or object (`documents`)."""
    if not options:
        return ()
    key = tuple(
        (name, repr(value) if value is None or isinstance(value, str | int | float) else None)
        for name, value in sorted(options.items())
    )
    spelled = str(key)  # surrogates are escaped
    return key if len(spelled) <= _LONGEST else (blake2b(spelled.encode()).digest(),)


def remember(memory: dict[tuple[object, ...], Any], key: tuple[object, ...], value: object) -> None:
    """Store something in a memory of limited size."""
    if len(memory) >= REMEMBERED:
        memory.clear()
    memory[key] = value
