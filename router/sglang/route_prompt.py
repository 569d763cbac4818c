"""The prompt of a generation, for whoever chooses its worker: nothing is checked, and what cannot be read is no prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

_Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class _Prompt(msgspec.Struct):
    text: str | list[str] | None = None
    input_ids: list[_Id | list[_Id]] | None = None


_decoder = msgspec.json.Decoder(_Prompt)


def prompt_of(body: bytes) -> tuple[str | None, Sequence[int] | None]:
    """The text and the ids of a body of `/generate`, of a batch the first one's; None for what there is not."""
    try:
        asked = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None, None
    text = asked.text if isinstance(asked.text, str) or not asked.text else asked.text[0]
    ids = asked.input_ids
    if ids and isinstance(ids[0], list):
        ids = ids[0]  # type: ignore[assignment]  # a list of ids, by its first member
    elif ids and not all(isinstance(one, int) for one in ids):
        ids = None
    return text or None, ids or None  # type: ignore[return-value]  # ids only, as was just seen
