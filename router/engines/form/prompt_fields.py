"""Fields that hold prompts: one, or a list of them.

The prompts of a list are decoded one by one: a large batch at once would block the event loop.
"""

from __future__ import annotations

from msgspec import Raw

from router.engines.form.fields import check_items, decoded
from router.engines.form.limits import PromptLimits
from router.engines.json import NULL, is_list, is_nested, is_null
from router.engines.json_cost import check_weight

_TEXTS = "a string, or a list of strings"
_IDS = "a list of token ids, or a list of such lists"


def read_texts(fields: dict[str, Raw], key: str, limits: PromptLimits) -> tuple[list[str] | None, bool]:
    """Return the texts of a field that is a string or a list of strings, and whether it is a list; None if it is absent.

    Raises BadRequestError, TextTooLongError.
    """
    raw = fields.get(key)
    if raw is None or raw == NULL:
        return None, False
    if not is_list(raw):
        return [_text(raw, key, limits)], False
    check_weight(bytes(raw))
    return [_text(one, key, limits) for one in decoded(raw, key, list[Raw], _TEXTS)], True


def read_ids(fields: dict[str, Raw], key: str, limits: PromptLimits) -> tuple[list[list[int]] | None, bool]:
    """Return the prompts of a field that is a list of ids or a list of such lists, and whether it is the latter.

    They are None if the field is absent. Raises BadRequestError, BodyTooLargeError.
    """
    raw = fields.get(key)
    if raw is None or is_null(raw):
        return None, False
    if not is_nested(raw):
        return [_ids(raw, key, limits)], False
    limits.check_replies(bytes(raw).count(b"[") - 1)
    return [_ids(one, key, limits) for one in decoded(raw, key, list[Raw], _IDS)], True


def _text(raw: Raw, key: str, limits: PromptLimits) -> str:
    long = len(memoryview(raw)) > limits.characters  # no text has more characters than its JSON has bytes
    if long:
        limits.check_raw_text(raw)
    text: str = decoded(raw, key, str, _TEXTS)
    if long:
        limits.check_text(text)
    return text


def _ids(raw: Raw, key: str, limits: PromptLimits) -> list[int]:
    check_items(raw, limits.tokens, f"`{key}` has a prompt of more tokens", "--max-text-tokens")
    ids: list[int] = decoded(raw, key, list[int], _IDS)
    return ids
