"""The messages between the parent and its processes, and the socket pair that carries them, which no other process can reach.

Both ends may ask: a question and its answer have the same number.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import Awaitable, Callable

import msgspec

logger = logging.getLogger(__name__)

_LENGTH_BYTES = 4


class MetricSample(msgspec.Struct, array_like=True):
    """A value of a metric, with its whole name (`..._bucket`) and its labels."""

    name: str
    labels: dict[str, str]
    value: float


class Family(msgspec.Struct, array_like=True):
    """A metric with all its samples; `kind` is `counter`, `gauge` or `histogram`."""

    name: str
    kind: str
    text: str
    samples: list[MetricSample]


class Ready(msgspec.Struct, tag=True):
    """A process has started, and could serve."""


class Failed(msgspec.Struct, tag=True):
    """A process cannot start, for a reason that it shares with all the others."""

    message: str


class Start(msgspec.Struct, tag=True):
    """Accept connections. The answer is `Ready`: it does."""


class Heartbeat(msgspec.Struct, tag=True):
    """Report that you are there, and your counts."""


class HeartbeatReply(msgspec.Struct, tag=True):
    """The answer to a `Heartbeat`."""

    families: list[Family]


class Scrape(msgspec.Struct, tag=True):
    """Report the counts of all processes together."""


class Scraped(msgspec.Struct, tag=True):
    """The answer to a `Scrape`, as Prometheus text."""

    text: bytes


class ProcessQuery(msgspec.Struct, tag=True):
    """Answer this GET. From a process to the parent: let all the others answer it."""

    path: str
    query: bytes


class QueryResult(msgspec.Struct, tag=True):
    """The answer of one process to a `ProcessQuery`."""

    number: int
    status: int
    body: bytes


class QueryResults(msgspec.Struct, tag=True):
    """The answers of the processes that answered in time."""

    answers: list[QueryResult]


Message = (
    Ready | Failed | Start | Heartbeat | HeartbeatReply | Scrape | Scraped | ProcessQuery | QueryResult | QueryResults
)


class Frame(msgspec.Struct, array_like=True):
    """A message on its way. A question and its answer have the same number; a message that wants no answer has 0."""

    number: int
    answers: bool
    message: Message


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


def framed(data: bytes) -> bytes:
    """Return the bytes with their length in front."""
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


def send_last(connection: socket.socket, message: Message) -> None:
    """Send a message through a blocking socket."""
    connection.sendall(framed(_encoder.encode(Frame(0, False, message))))


def receive_first(connection: socket.socket) -> bytes:
    """Return the first bytes from a blocking socket. Raise EOFError if the other end is gone."""

    def exactly(count: int) -> bytes:
        parts = b""
        while len(parts) < count:
            part = connection.recv(count - len(parts))
            if not part:
                raise EOFError
            parts += part
        return parts

    return exactly(int.from_bytes(exactly(_LENGTH_BYTES), "big"))


class MessageChannel:
    """One end. `answer` gets each message that is not an answer, and returns the answer to it, or None for none."""

    def __init__(self, connection: socket.socket, answer: Callable[[Message], Awaitable[Message | None]]) -> None:
        self._connection = connection
        self._answer = answer
        self._asked: dict[int, asyncio.Future[Message]] = {}
        self._numbers = itertools.count(1)
        self._answering: set[asyncio.Task[None]] = set()
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None

    async def open(self) -> None:
        """Begin to send, in the running loop."""
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._connection)

    async def run(self) -> None:
        """Read until the other end is gone."""
        reader = self._reader
        assert self._writer is not None
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
                    self._heard(_decoder.decode(await reader.readexactly(length)))
        finally:
            self._writer.close()
            self._writer = None
            for asked in self._asked.values():
                asked.cancel()

    def tell(self, message: Message) -> None:
        """Send a message. Where the other end is gone, nothing happens."""
        self._send(Frame(0, False, message))

    def tell_first(self, data: bytes) -> None:
        """Send bytes for `receive_first`."""
        assert self._writer is not None
        self._writer.write(framed(data))

    async def ask(self, message: Message, seconds: float) -> Message | None:
        """Return the answer; None if there was none within these seconds, or the other end is gone."""
        if self._writer is None:
            return None
        number = next(self._numbers)
        asked = self._asked[number] = asyncio.get_running_loop().create_future()
        self._send(Frame(number, False, message))
        try:
            await asyncio.wait((asked,), timeout=seconds)
            return asked.result() if asked.done() and not asked.cancelled() else None
        finally:
            del self._asked[number]

    def _send(self, frame: Frame) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(framed(_encoder.encode(frame)))

    def _heard(self, frame: Frame) -> None:
        if frame.answers:
            asked = self._asked.get(frame.number)
            if asked is not None and not asked.done():
                asked.set_result(frame.message)
            return
        task = asyncio.ensure_future(self._reply(frame))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _reply(self, frame: Frame) -> None:
        try:
            answer = await self._answer(frame.message)
        except Exception:
            logger.exception("a message of another process was not answered: %s", type(frame.message).__name__)
            return
        if answer is not None and frame.number:
            self._send(Frame(frame.number, True, answer))
