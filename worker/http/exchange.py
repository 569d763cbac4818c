"""One HTTP request and its reply, and the application that finds who answers it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Literal
from urllib.parse import parse_qs

import msgspec

from worker.engine.engine import EmbeddedEngine
from worker.engine.records import ControlRecord, WorkerLog

Shape = Literal["message", "error", "object"]


class Refused(Exception):
    """SGLang refuses the request with a 400, in one of three shapes.

    Its tokenizer manager answers with `message`, its request contract with `error`, and FastAPI with `object`.
    """

    def __init__(self, message: str, shape: Shape = "message") -> None:
        super().__init__(message)
        self.message = message
        self.shape = shape

    def body(self) -> dict[str, Any]:
        """Return the JSON of the 400."""
        if self.shape == "object":
            return {"object": "error", "message": self.message, "type": "Bad Request", "param": None, "code": 400}
        return {"error": self.message if self.shape == "error" else {"message": self.message}}


class OutOfRange(Refused):
    """The request is outside of SGLang's valid range: a router must not send it. It is noted, and refused with a 400."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "error")


Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

JSON = "application/json"
PLAIN = "text/plain; charset=utf-8"
EVENTS = "text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"


class HttpExchange:
    """A request whose body has been read, and the way to reply to it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, raw: bytes) -> None:
        self.raw = raw
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self.client = tuple(scope["client"])
        self.server: tuple[str, int] = tuple(scope["server"])  # where it is answered
        self._query = scope["query_string"]
        self._receive = receive
        self._send = send

    @property
    def query(self) -> dict[str, list[str]]:
        return parse_qs(self._query.decode("latin-1"))

    def json_object(self) -> dict[str, Any]:
        """Return the body.

        Raises:
            Refused: it is not a JSON object, or its content type is not JSON.
        """
        if self.headers.get("content-type", "").split(";")[0].strip() != JSON:
            raise Refused("Input should be a dictionary or an instance of the request's class", "object")
        try:
            body = msgspec.json.decode(self.raw)
        except (ValueError, RecursionError) as error:
            raise Refused(f"JSON decode error: {error}", "object") from None
        if not isinstance(body, dict):
            raise Refused("Input should be a dictionary or an instance of the request's class", "object")
        return body

    async def disconnected(self) -> None:
        """Return when the client has left."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def start(
        self, status: int, content_type: str | None, length: int | None = None, more: Iterable[tuple[bytes, bytes]] = ()
    ) -> None:
        headers = [(b"content-type", content_type.encode())] if content_type else []
        if length is not None:
            headers.append((b"content-length", b"%d" % length))
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *more]})

    async def part(self, content: bytes, *, last: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": content, "more_body": not last})

    async def answer(
        self, status: int, content: Any = b"", content_type: str | None = JSON, more: Iterable[tuple[bytes, bytes]] = ()
    ) -> None:
        """Send a whole reply: bytes as they are, everything else as JSON."""
        raw = content if isinstance(content, bytes) else msgspec.json.encode(content)
        await self.start(status, content_type if raw else None, len(raw), more)
        await self.part(raw, last=True)


Handler = Callable[[HttpExchange], Awaitable[None]]


def event(payload: Any) -> bytes:
    """Return a server-sent event. Bytes are JSON already, everything else is encoded."""
    return b"data: %b\n\n" % (payload if isinstance(payload, bytes) else msgspec.json.encode(payload))


async def read(receive: Receive) -> bytes | None:
    """Return the body of a request; None if the client left before its end."""
    parts: list[bytes] = []
    while (message := await receive())["type"] == "http.request":
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return parts[0] if len(parts) == 1 else b"".join(parts)
    return None


class EngineApp:
    """Passes requests to two handlers, and makes their failures into replies.

    Args:
        engine: wakes its waiters after each request.
        journal: counts the requests to generate, and takes a record of each other one.
        generating: the methods that generate, by path.
        generate: answers these.
        control: answers everything else.
    """

    def __init__(
        self,
        engine: EmbeddedEngine,
        journal: WorkerLog,
        generating: Mapping[str, Sequence[str]],
        generate: Handler,
        control: Handler,
    ) -> None:
        self._engine = engine
        self._journal = journal
        self._generating = generating
        self._generate = generate
        self._control = control

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (raw := await read(receive)) is None:
            return
        exchange = HttpExchange(scope, receive, send, raw)
        try:
            if exchange.method in self._generating.get(exchange.path, ()):
                self._journal.received += 1
                await self._generate(exchange)
            else:
                record = ControlRecord(exchange.method, exchange.path, exchange.query, exchange.headers, raw)
                self._journal.add_request(record)
                await self._control(exchange)
        except Refused as refused:
            if isinstance(refused, OutOfRange):
                self._journal.add_out_of_range(str(refused))
            await exchange.answer(400, refused.body())
        finally:
            self._engine.changed()
