"""The data-parallel rank of a request, as SGLang 0.5.23 takes it (`io_struct.py`), and the rank in its replies.

A request, also a batch, has one `routed_dp_rank`; `data_parallel_rank` is its older name, which counts if the first is absent.
A reply says in `meta_info.dp_rank` which rank has served it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Raw

from router.engines.json import JSON_ERRORS, decode_object, is_null
from router.errors import BadRequestError

_FIELD = b"routed_dp_rank"
_NAMES = ("routed_dp_rank", "data_parallel_rank")
FIELDS = frozenset(_NAMES)
_HEADERS = b"x-override-routed-dp-rank", b"x-data-parallel-rank"
HEADERS = frozenset(_HEADERS)
"""SGLang's header (which it reads with `SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES`), and vLLM's."""

_rank = msgspec.json.Decoder(Annotated[int, msgspec.Meta(ge=0)]).decode
_DIGITS = re.compile(rb"\d{1,9}")
_IN_REPLY = re.compile(rb'[{,]\s*"dp_rank"\s*:\s*(\d+)')
"""A quote inside of a JSON string has a backslash before it, so this is a key."""


def rank_in(fields: Mapping[str, Raw]) -> int | None:
    """Return the rank that a body names; None if it names none. Raises BadRequestError."""
    for name in _NAMES:
        if name in fields and not is_null(fields[name]):
            try:
                rank: int = _rank(fields[name])
            except JSON_ERRORS as error:
                said = f"`{name}` must be a data-parallel rank, one integer from 0 on for the whole request: {error}"
                raise BadRequestError(said) from error
            return rank
    return None


def rank_in_body(body: bytes | None) -> int | None:
    """Return the rank that a body names that nobody has read yet. Raises BadRequestError."""
    if body is None or not any(name.encode() in body for name in _NAMES):
        return None
    try:
        return rank_in(decode_object(body))
    except JSON_ERRORS:
        return None


def rank_in_headers(named: Mapping[bytes, bytes]) -> int | None:
    """Return the rank that a header names; None if none does. Raises BadRequestError: engines ignore what is no number."""
    for name in _HEADERS:
        value = named.get(name)
        if value is None:
            continue
        if not _DIGITS.fullmatch(value):
            raise BadRequestError(f"the header {name.decode()} must be a data-parallel rank, a number from 0 on")
        return int(value)
    return None


def with_rank(body: bytes, rank: int) -> bytes:
    """Return a JSON object with this rank; unchanged if it is none, which its worker refuses."""
    end = body.rstrip()
    if end.startswith(b"{") and end.endswith(b"}") and b'"' in end and _FIELD not in body:
        return b"".join((memoryview(end)[:-1], b',"routed_dp_rank":%d}' % rank))
    try:
        fields = decode_object(body)
    except JSON_ERRORS:
        return body
    return msgspec.json.encode({**fields, _NAMES[0]: rank})


def ranks_in_reply(reply: bytes) -> list[int]:
    """Return the ranks that a reply, or an event, names: one for each generation that tells it."""
    return [int(found) for found in _IN_REPLY.findall(reply)] if b'"dp_rank"' in reply else []
