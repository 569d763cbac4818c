"""The per-token data of engines for a retrieved sequence, put together from its replies; see `spans.extras`.

It is fetched only for a request that asks for it: from this process, or from the store.
"""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from msgspec import Raw

from middleware_hub.spans.chain import STORE_UNREACHABLE, TokenSpan
from middleware_hub.spans.extras import TOP_P_IDS, TOP_P_OFFSETS, Extra, Extras
from middleware_hub.spans.per_token import ROW_FIELDS, TOP_P, TurnRows, joined, written
from middleware_hub.spans.trajectory import SampledTurn, TokenTrajectory
from router.http.offload import offload

UNLIKE_ROWS: Final = "unlike_rows"
"""The reason if replies of one sequence have rows of different widths: they are not joined."""
Fetch = Callable[[TokenSpan, Sequence[str]], Awaitable[Mapping[str, Extra] | None]]
_Found = Sequence[tuple[SampledTurn, Mapping[str, Extra]]]


async def per_token_fields(
    here: Extras, fetch: Fetch | None, flat: TokenTrajectory, wanted: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """Return the wanted fields of an answer, and the reasons for which they may be incomplete.

    A field is null if no reply of the sequence has it.

    Args:
        here: the data in this process. `fetch` returns the data in a store, and None if the store cannot be read.
        wanted: some of `ROW_FIELDS` and `TOP_P`.
    """
    names = [name for one in wanted for name in ((TOP_P_IDS, TOP_P_OFFSETS) if one == TOP_P else (one,))]
    found, reasons = [], []
    for turn in flat.turns:
        extras = here.of(turn.span)
        if not extras and fetch is not None:
            fetched = await fetch(turn.span, names)
            if fetched is None:
                reasons = [STORE_UNREACHABLE]
            extras = fetched or {}
        found.append((turn, extras))
    if not any(extras for _, extras in found):
        return dict.fromkeys(wanted), reasons
    fields = await offload(True, _fields, found, len(flat.token_ids), wanted)
    unlike = [name for name in wanted if fields[name] is None and any(name in extras for _, extras in found)]
    return fields, [*reasons, UNLIKE_ROWS] if unlike else reasons


def _fields(found: _Found, tokens: int, wanted: Sequence[str]) -> dict[str, Any]:
    return {name: _top_p(found, tokens) if name == TOP_P else _rows(found, tokens, name) for name in wanted}


def _rows(found: _Found, tokens: int, name: str) -> dict[str, Any] | None:
    assert name in ROW_FIELDS
    having = [(turn, extras[name]) for turn, extras in found if name in extras]
    widths = {extra.shape[1] for _, extra in having}
    if len(widths) != 1:
        return None
    array = joined(
        [
            TurnRows(turn.request_id, turn.span.offset + turn.span.count, turn.end, Raw(written(extra.data)))
            for turn, extra in having
        ],
        tokens,
        widths.pop(),
    )
    if array is None:
        return None
    return {**array.described("request_id"), "base64": Raw(b'"%b"' % b"".join(array.as_base64()))}


def _top_p(found: _Found, tokens: int) -> dict[str, Any] | None:
    counts = np.zeros(tokens + 1, np.int64)
    pieces, reported = [], []
    for turn, extras in found:
        if TOP_P_OFFSETS in extras:
            offsets = np.frombuffer(extras[TOP_P_OFFSETS].data, "<i4")[: turn.end - turn.start + 1]
            counts[turn.start + 1 : turn.end + 1] = np.diff(offsets)
            pieces.append(extras[TOP_P_IDS].data[: 4 * int(offsets[-1])])
            reported.append({"request_id": turn.request_id, "start": turn.start, "end": turn.end})
    if not reported:
        return None
    return {
        "dtype": "int32",
        "told": reported,
        "token_ids": _base64(b"".join(pieces)),
        "offsets": _base64(counts.cumsum().astype("<i4").tobytes()),
    }


def _base64(numbers: bytes) -> Raw:
    return Raw(b'"%b"' % b2a_base64(numbers, newline=False))
