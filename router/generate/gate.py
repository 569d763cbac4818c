"""The beginning of a stream, held back until its first event shows whether it was aborted."""

from __future__ import annotations

from starlette.types import Message, Send

from router.engines.sglang.outcome import renamed, was_aborted, was_refused
from router.http.reply import EditedReply


class Gate:
    """Holds a stream back until its first event has come, and for good if that event only says `aborted`.

    Attributes:
        send: what the application inside calls.
        opened: whether the reply goes on to the client.
        refused: whether a later attempt brought an error instead of a stream.
        held: what the client did not get, while the gate is not open.
    """

    def __init__(self, client: Send, name: str | None, *, again: bool) -> None:
        """`name`: the id that events get, if the worker has another one. `again`: this is not the first attempt, and an aborted
        reply is better than a refused one.
        """
        self._client = client
        self._name = name
        self._again = again
        self._judged = False
        self._reply = EditedReply(self, self._hold)
        self.send = self._reply.send
        self.opened = False
        self.refused = False
        self.held: list[Message] = []

    def head(self, start: Message, *, stream: bool) -> Message:
        """Return the head unchanged. A reply that is not a stream is an error, which only a first attempt passes on."""
        if not stream:
            self._judged = True
            self.refused = self._again and start["status"] != 200
            self.opened = not self.refused
        return start

    def event(self, data: bytes) -> bytes:
        """Judge the first event, and return each under the client's id."""
        if not self._judged:
            self._judged = True
            self.refused = self._again and was_refused(data)
            self.opened = not self.refused and not was_aborted(data)
            if self.refused or (self.opened and self._name is None):
                self._reply.pass_on()
        if self._name is None or self.refused or not data.startswith(b"{"):
            return data
        return renamed(data, self._name)

    async def whole(self, start: Message, body: bytes) -> tuple[Message, bytes]:
        """Never called: no head is held back here."""
        raise AssertionError

    async def _hold(self, message: Message) -> None:
        if not self._judged and message["type"] == "http.response.body" and not message.get("more_body", False):
            self.opened = True  # a stream that ends without an event was not aborted
        self.held.append(message)
        if self.opened:
            held, self.held = self.held, []
            for one in held:
                await self._client(one)
