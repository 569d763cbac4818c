"""One request on its way to the workers: to one, or to several of them one after the other.

A worker that is asked a second time has to be told other ids: SGLang refuses one that it is serving, and still aborts one for a
while after its stream has ended. Of these nobody else learns.
"""

from __future__ import annotations

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.engines.sglang.attempt import Attempt
from router.generate.request_ids import Disguise
from router.http.asgi import replay, with_body
from router.http.reply import EditedReply
from router.proxy.in_flight import FLIGHT, Flight


async def send_on(
    app: ASGIApp, scope: Scope, receive: Receive, send: Send, flight: Flight, attempt: Attempt | bytes
) -> None:
    """Have the application inside serve a request that is known, or a body of which nothing is known."""
    flight.renew = None
    if isinstance(attempt, bytes):
        body = attempt
    else:
        body = attempt.encode()
        if attempt.rids:
            renewal = _Renewal(flight, attempt, send)
            flight.renew, send = renewal.body, renewal.send
    inner = with_body(scope, body)
    inner["state"][FLIGHT] = flight
    await app(inner, replay(body, receive), send)


class _Renewal:
    """Makes the request anew, and puts its ids back into the reply."""

    def __init__(self, flight: Flight, attempt: Attempt, send: Send) -> None:
        self._flight = flight
        self._attempt = attempt
        self._outward = self._send = send

    def body(self) -> bytes:
        """The request under new ids, each of which begins with the old one."""
        disguise = Disguise(self._attempt.rids, begin_with_names=True)
        self._flight.rids = dict(zip(self._flight.rids, disguise.rids, strict=True))
        self._send = EditedReply(disguise, self._outward).send
        return msgspec.structs.replace(self._attempt, rids=disguise.rids).encode()

    async def send(self, message: Message) -> None:
        """What the application inside calls."""
        await self._send(message)
