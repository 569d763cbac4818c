"""How long a client may take to send the body of its request, at any route.

Only the time between two pieces counts, and only while a handler waits for one: a large body over a slow line may take
minutes, and the client is not at fault while the router does not read.
"""

from __future__ import annotations

from collections.abc import Awaitable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.errors import RequestTimeoutError
from router.http.disconnect import ClientMessages, served_client
from router.http.time_limits import patience


class BodyTimeout:
    """Stands in front of all routes. Reading a body raises RequestTimeoutError when the next piece does not come in time."""

    def __init__(self, app: ASGIApp, seconds: float) -> None:
        self._app = app
        self._seconds = seconds

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] == "http":
            client = served_client(scope)
            # Nearly all requests are here as a whole when their turn comes, and need no limit.
            here = client is not None and client.all_here
            receive = ClientMessages(receive, client) if here else self._in_time(receive)
        return self._app(scope, receive, send)

    def _in_time(self, receive: Receive) -> Receive:
        more = True

        async def receive_in_time() -> Message:
            nonlocal more
            if not more:
                return await receive()  # now it is the client that waits
            try:
                async with patience(self._seconds):
                    message = await receive()
            except TimeoutError:
                raise RequestTimeoutError(
                    f"no piece of the request body came for {self._seconds:g} s (--body-timeout-secs)"
                ) from None
            more = message.get("more_body", False)
            return message

        return receive_in_time
