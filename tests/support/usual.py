"""The usual ones of many values that a test is run with. `make test` has these, `make test-slow` the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def usual(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Return the values for `parametrize`, of which all but `kept` are marked slow. A tuple is a set of arguments."""
    marked = []
    for value in values:
        marks = [] if value in kept else [pytest.mark.slow]
        marked.append(pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks))
    return marked
