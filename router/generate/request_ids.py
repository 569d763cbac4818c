"""Request ids at the workers that no client can name, where more than one tenant is served.

A worker refuses an id that it is serving already, and ends whatever begins with the id that it is told to end. So an id of one
tenant's choice could keep another's generation out, or end it. Here every id that a client has chosen is replaced on the way to
the worker by one that nobody can guess, and put back on the way to the client. Ids that this router made up need none of that.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
from starlette.types import Message

from router.engines.sglang.attempt import Attempt, new_rid
from router.engines.sglang.json import is_null, parse_object
from router.errors import BadRequestError

_STEM, _NUMBER = 24, 8
_PLAIN = re.compile(r"[A-Za-z0-9_.:-]+")


class Disguise:
    """The names of one request's generations, and the ids that stand for them at the worker.

    The ids of a request have a stem in common, so that one search finds them all, and what is made up of each is of one length,
    so that none begins another one.
    """

    def __init__(self, names: Sequence[str], *, begin_with_names: bool = False) -> None:
        """`begin_with_names`: each id is its name with something behind it, where any JSON spells that name in one way."""
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
        """Return an event under the client's names."""
        return self.taken_off(data)

    async def whole(self, start: Message, body: bytes) -> tuple[Message, bytes]:
        """Return a reply in one piece under the client's names."""
        return start, self.taken_off(body)

    def taken_off(self, reply: bytes) -> bytes:
        """JSON of a worker with the client's names in it: an id is the whole of a string, wherever it stands."""
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


def disguised(body: bytes, attempt: Attempt | None) -> tuple[bytes, Attempt | None, Disguise | None]:
    """A request under ids that nobody can name; `attempt` is what is known of the body.

    Raises BadRequestError for ids that do not fit, and for a body that cannot be looked at: then there may be one in it.
    """
    fields = parse_object(body) if attempt is None else attempt.fields
    if is_null(fields.get("rid")):
        return body, attempt, None
    if attempt is not None and attempt.rids:
        disguise = Disguise(attempt.rids)
        return body, msgspec.structs.replace(attempt, rids=disguise.rids), disguise
    if attempt is not None and attempt.samples == 1:
        raise BadRequestError("`rid` must be a string, or for a batch a list of different strings, one a prompt")
    # The samples of a group get ids of the worker's own, and the one that is given here is lost.
    fields = {key: value for key, value in fields.items() if key != "rid"}
    if attempt is not None:
        attempt = msgspec.structs.replace(attempt, fields=fields)
    return msgspec.json.encode(fields), attempt, None
