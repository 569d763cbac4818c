"""`prompt_segments` of `/generate`: a prompt in parts, each a text to encode or ids to take as they are.

The field is the router's own: the worker gets ids instead.
"""

from __future__ import annotations

import msgspec
from msgspec import Raw

from router.engines.form.fields import decoded
from router.engines.form.limits import PromptLimits
from router.engines.json import is_nested, is_null
from router.engines.json_cost import check_weight
from router.errors import BadRequestError

FIELD = "prompt_segments"

Segment = str | list[int]
"""A text to encode, or ids to take as they are."""

_OTHERS = ("text", "input_ids", "input_embeds")
_EXPECTED = 'a list of segments, each {"text": a string} or {"ids": a list of token ids}, or a list of such lists'


class _Written(msgspec.Struct, forbid_unknown_fields=True):
    text: str | None = None
    ids: list[int] | None = None


def read(fields: dict[str, Raw], limits: PromptLimits) -> tuple[list[list[Segment]], bool] | None:
    """Return the prompts of a body and whether they are a batch; None if the body has no segments.

    Raises BadRequestError, which names the faulty segment, and TextTooLongError.
    """
    if is_null(fields.get(FIELD)):
        return None
    other = next((key for key in _OTHERS if not is_null(fields.get(key))), None)
    if other is not None:
        raise BadRequestError(
            f"`{FIELD}` is a whole prompt, and `{other}` another one: give exactly one of `text`, `input_ids` and `{FIELD}`"
        )
    batch = is_nested(fields[FIELD])
    # Decode prompt by prompt: decoding a large batch at once would block the event loop.
    raws = decoded(fields[FIELD], FIELD, list[Raw], _EXPECTED) if batch else [fields[FIELD]]
    limits.check_replies(len(raws))
    prompts: list[list[_Written]] = []
    for raw in raws:
        check_weight(bytes(raw), ids=True)
        prompts.append(decoded(raw, FIELD, list[_Written], _EXPECTED))
        limits.check_tokens(sum(len(one.ids or ()) for one in prompts[-1]))
        limits.check_text("".join(one.text or "" for one in prompts[-1]))
    if not all(prompts):
        raise BadRequestError(f"`{FIELD}` is empty, or has an empty prompt in it: give at least one segment")
    return [
        [_segment(one, place(number, at, batch=batch)) for at, one in enumerate(prompt)]
        for number, prompt in enumerate(prompts)
    ], batch


def place(prompt: int, segment: int, *, batch: bool) -> str:
    """Return the name of a segment in an error: `prompt_segments[2]`, in a batch `prompt_segments[0][2]`."""
    return f"{FIELD}[{prompt}][{segment}]" if batch else f"{FIELD}[{segment}]"


def _segment(written: _Written, name: str) -> Segment:
    text, ids = written.text, written.ids
    if text is not None and ids is not None:
        raise BadRequestError(f"`{name}` has both `text` and `ids`: make two segments of it")
    if text is not None:
        if not text:
            raise BadRequestError(f"`{name}.text` is empty: give at least one character, or leave the segment out")
        return text
    if ids is None:
        raise BadRequestError(f"`{name}` has neither `text` nor `ids`")
    if not ids:
        raise BadRequestError(f"`{name}.ids` is empty: give at least one token id, or leave the segment out")
    return ids
