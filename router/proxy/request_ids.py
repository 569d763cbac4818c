"""Request ids for workers that replace those of clients.

A worker refuses an id that it is serving, still aborts an id for a while after its stream has ended, and aborts every request
whose id begins with the id in an abort. So the router replaces ids that a client chose on the way to the worker, and restores
them on the way to the client, in two cases. Where it serves more than one tenant, an id of one tenant could keep another's
generation out, or end it; the new ids cannot be guessed. And a worker that gets a request a second time needs other ids. Ids
that this router made up are not replaced.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from router.engines.form.fields import parse_object
from router.engines.form.worker_request import WorkerRequest, new_rid
from router.engines.json import is_null
from router.errors import BadRequestError

_STEM, _NUMBER = 24, 8
_PLAIN = re.compile(r"[A-Za-z0-9_.:-]+")


class RequestIds:
    """The names of one request's generations, and their ids at the worker: an editor of its reply.

    The ids of a request have a common stem, so that one search finds them all. Their made-up parts have the same length, so
    that no id begins another one.
    """

    def __init__(self, names: Sequence[str], *, begin_with_names: bool = False) -> None:
        """`begin_with_names`: each id is its name and a made-up end, if JSON has only one spelling of that name."""
        stem = new_rid()[:_STEM]
        rids, self._names = [], {}
        for number, name in enumerate(names):
            made_up = f"{stem}{number:0{_NUMBER}x}"
            opening = f"{name}-" if begin_with_names and _PLAIN.fullmatch(name) else ""
            rids.append(opening + made_up)
            self._names[made_up.encode()] = f'"{opening}'.encode(), msgspec.json.encode(name)
        self.rids = tuple(rids)
        self._stem = stem.encode()

    def event(self, data: bytes) -> bytes:
        return self.restored(data)

    def whole(self, _: int, body: bytes) -> bytes:
        return self.restored(body)

    def restored(self, reply: bytes) -> bytes:
        """Return a worker's JSON with the client's names. An id is always a whole string."""
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
    """Return a request under ids that no client can name; `request` is the parsed body, if there is one.

    Raises BadRequestError for ids that do not fit, and for a body that cannot be read: there may be an id in it.
    """
    fields = parse_object(body) if request is None else request.fields
    if is_null(fields.get("rid")):
        return body, request, None
    if request is None:
        return msgspec.json.encode({key: value for key, value in fields.items() if key != "rid"}), None, None
    if request.rids:
        ids = RequestIds(request.rids)
        request = request.with_rids(ids.rids)
        return request.body, request, ids
    if request.samples == 1:
        raise BadRequestError("`rid` must be a string, or for a batch a list of different strings, one a prompt")
    # The worker makes up ids for the samples of a group; the client's id is lost.
    request = request.without_rid()
    return request.body, request, None
