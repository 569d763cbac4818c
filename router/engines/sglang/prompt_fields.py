"""Fields that hold prompts: one, or a list of them."""

from __future__ import annotations

from typing import Any

from msgspec import Raw

from router.engines.json import is_list, is_null
from router.engines.sglang.fields import check_items, decoded
from router.engines.sglang.limits import PromptLimits
from router.http.json_cost import check_weight


def each_prompt(
    fields: dict[str, Raw], key: str, kind: Any, expected: str, limits: PromptLimits, *, nested: bool
) -> list[Any] | None:
    """Return the prompts of a field; None if it is absent. Decodes one by one: a large batch would block the event loop."""
    raw = fields.get(key)
    if raw is None or is_null(raw):
        return None
    if nested and kind is str:
        check_weight(bytes(raw))
    elif nested:
        limits.check_replies(bytes(raw).count(b"[") - 1)
    found = []
    for one in decoded(raw, key, list[Raw], expected) if nested else [raw]:
        if kind is str:
            limits.check_raw_text(one)
        else:
            check_items(one, limits.tokens, f"`{key}` has a prompt of more tokens", "--max-text-tokens")
        found.append(decoded(one, key, kind, expected))
        if kind is str:
            limits.check_text(found[-1])
    return found


def read_texts(fields: dict[str, Raw], key: str, limits: PromptLimits) -> tuple[list[str] | None, bool]:
    """Return the texts of a field that is a string or a list of strings, and whether it is a list.

    Raises BadRequestError, TextTooLongError.
    """
    listed = is_list(fields.get(key))
    return each_prompt(fields, key, str, "a string, or a list of strings", limits, nested=listed), listed
