"""Regular expressions that a worker is to search with: which of them are none.

They are parsed, and not compiled: that can take a second, and everybody would wait for it.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

_parser: Any = re._parser  # type: ignore[attr-defined]  # what `re.compile` itself begins with; nothing public does only that


def fault(pattern: str) -> str | None:
    """What is wrong with a pattern; None if it can be searched with."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what may mean something else one day
            parsed = _parser.parse(pattern)
        for lookbehind in _lookbehinds(parsed):
            low, high = lookbehind.getwidth()
            if low != high:
                return "look-behind requires fixed-width pattern"
    except (re.error, OverflowError) as error:
        return str(error)
    except RecursionError:
        return "it is nested too deeply"
    return None


def _lookbehinds(part: Any) -> Iterator[Any]:
    """Those in a parsed pattern: it consists of pairs of an operation and what that is about, which may hold patterns again."""
    if not isinstance(part, list | tuple | _parser.SubPattern):
        return
    # `is`, for an operation is an int that equals others.
    if len(part) == 2 and (part[0] is _parser.ASSERT or part[0] is _parser.ASSERT_NOT) and part[1][0] < 0:
        yield part[1][1]
    for inner in part:
        yield from _lookbehinds(inner)
