"""Request ids at the workers that no client chose.

A worker refuses an id that it is serving, still aborts an id for a while after its stream has ended, and ends whatever begins
with the id that it is told to end. So ids of a client's choice are replaced on the way to the worker, and put back on the way
to the client, in two cases. Where more than one tenant is served, an id of one tenant could keep another's generation out, or
end it: the new ids cannot be guessed. And a worker that is asked a second time has to be given other ids. Ids that this router
made up need none of that.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
from starlette.types import Message

from router.engines.sglang.json import is_null, parse_object
from router.engines.sglang.worker_request import WorkerRequest, new_rid
from router.errors import BadRequestError

_STEM, _NUMBER = 24, 8
_PLAIN = re.compile(r"[A-Za-z0-9_.:-]+")


class RequestIds:
    """The names of one request's generations, and the ids that stand for them at the worker: an editor of its reply.

    The ids of a request have a stem in common, so that one search finds them all. The part that is made up has one length, so
    that no id begins another one.
    """

    def __init__(self, names: Sequence[str], *, begin_with_names: bool = False) -> None:
        """`begin_with_names`: each id is its name and a made-up end, where all JSON spells that name in one way."""
        stem = new_rid()[:_STEM]
        rids, self._names = [], {}
        for number, name in enumerate(names):
            made_up = f"{stem}{number:0{_NUMBER}x}"
            opening = f"{name}-" if begin_with_names and _PLAIN.fullmatch(name) else ""
            rids.append(opening + made_up)
            self._names[made_up.encode()] = f'"{opening}'.encode(), msgspec.json.encode(name)
        self.rids = tuple(rids)
        self._stem = stem.encode()

    def head(self, start: Message, *, stream: bool) -> Message | None:
        """Return the head of a stream as it is: there are no ids in it."""
        return start if stream else None

    def event(self, data: bytes) -> bytes:
        return self.restored(data)

    async def whole(self, start: Message, body: bytes) -> tuple[Message, bytes]:
        return start, self.restored(body)

    def restored(self, reply: bytes) -> bytes:
        """Return JSON of a worker with the client's names in it. An id is the whole of a string, wherever it stands."""
        pieces: list[bytes] = []
        begin = found = 0
        while (found := reply.find(self._stem, found)) >= 0:
            end = found + _STEM + _NUMBER
            opening, name = self._names.get(reply[found:end], (b"", b""))
            start = found - len(opening)
            if not opening or start < begin or not reply.startswith(opening, start) or reply[end : end + 1] != b'"':
                found += 1
                continue
            pieces += (reply[begin:start], name)
            begin = found = end + 1
        return b"".join((*pieces, reply[begin:])) if pieces else reply


def with_private_ids(
    body: bytes, request: WorkerRequest | None
) -> tuple[bytes, WorkerRequest | None, RequestIds | None]:
    """Return a request under ids that no client can name; `request` is what is known of the body.

    Raises BadRequestError for ids that do not fit, and for a body that cannot be looked at: there may be an id in it.
    """
    fields = parse_object(body) if request is None else request.fields
    if is_null(fields.get("rid")):
        return body, request, None
    if request is None:
        return msgspec.json.encode({key: value for key, value in fields.items() if key != "rid"}), None, None
    if request.rids:
        ids = RequestIds(request.rids)
        return body, request.with_rids(ids.rids), ids
    if request.samples == 1:
        raise BadRequestError("`rid` must be a string, or for a batch a list of different strings, one a prompt")
    # The samples of a group get ids of the worker's own, and the one that the client gave is lost.
    return body, request.without_rid(), None
