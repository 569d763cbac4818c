"""The calls of custom tools: tools whose calls are a text. Their functions have the text as the only argument, `input`."""

from __future__ import annotations

from router.engines.json import JSON_ERRORS, decode_any


def custom_input(arguments: str) -> str:
    """Return the text of a call of a custom tool. A call without one gives its arguments as they were sampled."""
    try:
        found = decode_any(arguments)
    except JSON_ERRORS:
        return arguments
    text = found.get("input") if isinstance(found, dict) else None
    return text if isinstance(text, str) else arguments
