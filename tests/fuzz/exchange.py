"""One request through the application, without a server, and whether it kept to what a server wants of it."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message

from tests.fuzz.case import Case

_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9a-z-]+").fullmatch
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*").fullmatch


@dataclass
class Answer:
    """What came.

    Attributes:
        status: None if nothing did.
        error: what the application raised, which a server answers by closing the connection.
        seconds: until it was over.
        faults: what a server could not have sent, or not as it is.
    """

    status: int | None = None
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    whole: bool = False
    error: BaseException | None = None
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)

    def take(self, message: Message) -> None:
        """What the application sends."""
        if message["type"] == "http.response.start":
            if self.status is not None:
                self.faults.append("two heads")
            self.status = message["status"]
            for name, value in message["headers"]:
                if not _NAME(name) or not _VALUE(value):
                    self.faults.append(f"a header that cannot be sent: {name!r}: {value[:200]!r}")
                self.headers[name] = value
        elif self.status is None or self.whole:
            self.faults.append(f"{message['type']} before the head, or behind the end")
        else:
            self.body += message.get("body", b"")
            self.whole = not message.get("more_body", False)


async def exchange(app: ASGIApp, case: Case, seconds: float) -> Answer:
    """Send a request and wait for the end of its answer, so long at most."""
    answer, messages, over = Answer(), case.messages()[::-1], asyncio.Event()

    async def receive() -> Message:
        if messages:
            return messages.pop()
        if not case.leaves:
            await over.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        answer.take(message)

    begun = time.perf_counter()
    try:
        async with asyncio.timeout(seconds):
            await app(case.scope(), receive, send)
    except Exception as error:  # noqa: BLE001 - a server does the same; what it was is judged by the rules
        answer.error = error
    over.set()
    answer.seconds = time.perf_counter() - begun
    length = answer.headers.get(b"content-length")
    if answer.whole and length is not None and case.method != "HEAD" and int(length) != len(answer.body):
        answer.faults.append(f"content-length {length!r}, and {len(answer.body)} bytes")
    return answer
