"""Where the two legs of a request meet that goes to a prefill and a decode worker of SGLang.

Both legs have the same JSON. Three fields of it say where the decode worker finds the prefill worker, and by which *room* both
know the request: one room for each prompt. Samples of one prompt would share its room, so no request for them is sent.
"""

from __future__ import annotations

import secrets
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from router.engines.form.worker_request import WorkerRequest
from router.engines.json import JSON_ERRORS, decode_object

_ROOMS = 1 << 63
"""Rooms are below this: SGLang keeps them as int64."""
DEFAULT_PORT = 8998
"""SGLang's `--disaggregation-bootstrap-port` unless it is set."""
_NO_CACHE = (b"Decode handshake failed", b"Decode transfer failed")
"""How SGLang's decode workers begin to say that a prefill worker did not hand over (`disaggregation/decode.py`)."""


class MeetingPlace(NamedTuple):
    """The rank of a prefill worker at which legs meet.

    Attributes:
        url: the worker's.
        port: where decode workers find it; None for SGLang's default.
        rank: the rank.
        ranks: the number of its ranks.
    """

    url: str
    port: int | None
    rank: int = 0
    ranks: int = 1


def with_meeting(body: bytes, request: WorkerRequest | None, place: MeetingPlace) -> bytes | None:
    """Return a body with the place where its legs meet; None if it is no JSON object, which every worker refuses.

    Args:
        body: the request for one sample of each prompt.
        request: the same as the router understands it; None if only a worker can decide what it means.
        place: where they meet.
    """
    batch = request is not None and request.batch
    count = 1 if request is None else request.prompts
    # A prefill server finds the rank of a room by itself, and fails if that is not the rank that the request names.
    of_rank = _ROOMS // place.ranks
    rooms = [secrets.randbelow(of_rank) * place.ranks + place.rank for _ in range(count)]
    host, port = urlsplit(place.url).hostname or "", place.port or DEFAULT_PORT
    fields = {
        "bootstrap_host": [host] * count if batch else host,
        "bootstrap_port": [port] * count if batch else port,
        "bootstrap_room": rooms if batch else rooms[0],
    }
    if request is not None and fields.keys().isdisjoint(request.fields):
        return b"%b,%b" % (body[:-1], msgspec.json.encode(fields)[1:])
    try:
        return msgspec.json.encode({**decode_object(body), **fields})
    except JSON_ERRORS:
        return None


def with_prefill_rank(body: bytes, rank: int) -> bytes:
    """Return a body for the decode worker, which has to know the rank of the prefill worker. `body` is a JSON object."""
    return msgspec.json.encode({**decode_object(body), "disagg_prefill_dp_rank": rank})


def lacks_cache(error: bytes) -> bool:
    """Return whether a decode worker's error says that it did not get the cache of the prompt from the prefill worker."""
    return any(words in error for words in _NO_CACHE)
