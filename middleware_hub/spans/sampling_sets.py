"""The tokens that each sampled token was drawn from, as engines report them for a reply, and joined along a chain.

SGLang (0.5.23) writes `output_token_sampling_mask`, a list of ids for each sampled token; slime's SGLang writes two strings of
base64, `top_p_token_ids` and `top_p_token_offsets`. Both become two arrays of int32:

    sampled       a        b    c
    drawn from    a x y    b    c x
    ids           a x y b c x
    offsets       0 3 4 6
"""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from msgspec import Raw

from middleware_hub.spans.per_token import numbers_from

SET_FIELDS: Final = ("output_token_sampling_mask", "top_p_token_ids", "top_p_token_offsets")
"""The fields of `meta_info` that say it."""
_lists = msgspec.json.Decoder(list[list[int]])


class TurnSets(NamedTuple):
    """The sets of a turn; `start` to `end` are its tokens in the sequence, perhaps fewer than it has sets for."""

    request_id: str
    start: int
    end: int
    ids: bytes
    offsets: bytes


def reported_sets(told: Mapping[str, Raw], tokens: int) -> tuple[bytes, bytes] | None:
    """Return ids and offsets of a reply of this many tokens; None if its fields do not say them."""
    ids, offsets = told.get("top_p_token_ids"), told.get("top_p_token_offsets")
    if ids is not None and offsets is not None:
        flat, ends = numbers_from(ids, 0), numbers_from(offsets, 0)
        if flat is None or ends is None:
            return None
    else:
        try:
            rows = _lists.decode(told.get("output_token_sampling_mask", Raw(b"null")))
            flat = np.array([one for row in rows for one in row], "<i4").tobytes()
        except (msgspec.DecodeError, OverflowError):
            return None
        ends = np.array([0, *accumulate(map(len, rows))], "<i4").tobytes()
    bounds, count = np.frombuffer(ends, "<i4"), len(flat) // 4
    if len(bounds) != tokens + 1 or bounds[0] != 0 or bounds[-1] != count or (np.diff(bounds) < 0).any():
        return None
    return flat, ends


def joined_sets(turns: Sequence[TurnSets], tokens: int, name: str = "request_id") -> dict[str, Any] | None:
    """Return the sets of a sequence of this many tokens, ready to be encoded as JSON; None if no turn has any.

    A token that no turn reported a set for, as of context, has an empty one. `name` is the key of a turn's id.
    """
    if not turns:
        return None
    counts = np.zeros(tokens + 1, np.int64)
    pieces = []
    for turn in turns:
        offsets = np.frombuffer(turn.offsets, "<i4")[: turn.end - turn.start + 1]
        counts[turn.start + 1 : turn.end + 1] = np.diff(offsets)
        pieces.append(turn.ids[: 4 * int(offsets[-1])])
    return {
        "dtype": "int32",
        "told": [{name: turn.request_id, "start": turn.start, "end": turn.end} for turn in turns],
        "token_ids": _base64(b"".join(pieces)),
        "offsets": _base64(counts.cumsum().astype("<i4").tobytes()),
    }


def _base64(numbers: bytes) -> Raw:
    return Raw(b'"%b"' % b2a_base64(numbers, newline=False))
