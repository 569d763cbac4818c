"""The prompt of a generation, for whoever chooses its worker: nothing is checked, and what cannot be read is no prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec

_Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class _Prompt(msgspec.Struct):
    text: str | list[str] | None = None
    input_ids: list[_Id | list[_Id]] | None = None


_decoder = msgspec.json.Decoder(_Prompt)


class PromptOf(NamedTuple):
    """The text and the ids of a request, of a batch the first one's; None for what there is not. `alone`: it is no batch."""

    text: str | None = None
    ids: Sequence[int] | None = None
    alone: bool = False


def prompt_of(body: bytes) -> PromptOf:
    """Read a body of `/generate`."""
    try:
        asked = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return PromptOf()
    text = asked.text if isinstance(asked.text, str) or not asked.text else asked.text[0]
    ids, alone = asked.input_ids, text is asked.text
    if ids and isinstance(ids[0], list):
        ids, alone = ids[0], False  # type: ignore[assignment]  # a list of ids, by its first member
    elif ids and not all(isinstance(one, int) for one in ids):
        ids = None
    return PromptOf(text or None, ids or None, alone)  # type: ignore[arg-type]  # ids only, as was just seen
