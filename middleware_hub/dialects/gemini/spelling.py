"""The two spellings of a field. Google's servers read `functionCall` and `function_call`, and libraries send both."""

from __future__ import annotations

import re
from typing import Any

_BEHIND = re.compile(r"(?<=[a-z0-9])_([a-z0-9])")


def camel(name: str) -> str:
    return _BEHIND.sub(lambda found: found[1].upper(), name) if "_" in name else name


def spelled(given: dict[str, Any]) -> dict[str, Any]:
    """Return an object with its own keys, and not those inside, in camel case, and without those that are null."""
    return {camel(name): value for name, value in given.items() if value is not None}


def listed(given: Any) -> Any:
    """Return a list for what may be written as its only entry, as Google's servers read it."""
    return [given] if type(given) is dict else given
