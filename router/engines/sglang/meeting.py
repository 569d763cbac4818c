"""Where the two legs of a request meet that goes to a prefill and a decode worker of SGLang.

Both legs have the same JSON. Three fields of it say where the decode worker finds the prefill worker, and by which *room* both
know the request: one room for each prompt. Samples of one prompt would share its room, so no request for them is sent.
"""

from __future__ import annotations

import secrets
from urllib.parse import urlsplit

import msgspec

from router.engines.form.worker_request import WorkerRequest
from router.engines.json import JSON_ERRORS, decode_object

_ROOMS = 1 << 63
"""Rooms are below this: SGLang keeps them as int64."""
DEFAULT_PORT = 8998
"""SGLang's `--disaggregation-bootstrap-port` unless it is set."""


def with_meeting(body: bytes, request: WorkerRequest | None, prefill_url: str, port: int | None) -> bytes | None:
    """Return a body with the place where its legs meet; None if it is no JSON object, which every worker refuses.

    Args:
        body: the request for one sample of each prompt.
        request: the same as the router understands it; None if only a worker can decide what it means.
        prefill_url: of the prefill worker.
        port: where decode workers find it; None for SGLang's default.
    """
    batch = request is not None and request.batch
    count = 1 if request is None else request.prompts
    rooms = [secrets.randbelow(_ROOMS) for _ in range(count)]
    host = urlsplit(prefill_url).hostname or ""
    place = host, DEFAULT_PORT if port is None else port
    fields = {
        "bootstrap_host": [place[0]] * count if batch else place[0],
        "bootstrap_port": [place[1]] * count if batch else place[1],
        "bootstrap_room": rooms if batch else rooms[0],
    }
    if request is not None and fields.keys().isdisjoint(request.fields):
        return b"%b,%b" % (body[:-1], msgspec.json.encode(fields)[1:])
    try:
        return msgspec.json.encode({**decode_object(body), **fields})
    except JSON_ERRORS:
        return None
