"""One connection to one server, shared by all concurrent callers. The only file that knows the client library.

`hiredis` reads the protocol, writes short commands, and does nothing else: a round trip costs 8 to 13 us of processor time
with it, a quarter of what complete clients take (measured, 3 commands in a pipeline: redis-py 75 us, valkey-glide 35 us).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

from middleware_hub.store.errors import StoreError, StoreMismatchError, StoreUnreachableError
from router.http.time_limits import LATE, TICKS

try:
    import hiredis
except ImportError as error:
    from router.errors import BadRequestError

    raise BadRequestError("a store in Redis needs a library: pip install 'tito-router[redis]'") from error

Command = tuple[bytes | str | int, ...]
"""A command and its arguments."""
_PUSHED: Final = (b"smessage", b"ssubscribe", b"sunsubscribe")
_SHORT: Final = 16
"""A command of so many arguments is packed by `hiredis`, which copies each argument three times."""
_LONG: Final = 512
"""An argument of so many bytes is sent as it is, without a copy."""


_PASSING: Final = ("LOADING", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "UNBLOCKED", "BUSY ")
"""These end in a moment: a server that starts, a failover."""
_WORDS: Final = {
    "NOAUTH": "it wants a password: write redis://:PASSWORD@HOST:PORT/DB, or redis://USER:PASSWORD@...",
    "WRONGPASS": "the user or the password is wrong",
    "NOPERM": "this user may not do what the store needs: see the ACL in docs/memory.md",
    "OOM": "its memory is full (maxmemory): give it more, or set --store-max-bytes below that",
    "MISCONF": "it takes no writes because it cannot save to its disk: make room there, or look at its log",
    "NOREPLICAS": "it takes no writes because too few replicas are there (min-replicas-to-write)",
    "LOADING": "it is reading its data from disk",
    "READONLY": "it is a replica, which takes no writes: name the master, or the Sentinels",
    "CLUSTERDOWN": "a part of the cluster has no master",
    "MASTERDOWN": "its master is down",
    "BUSY": "a script of another client is running in it for too long",
    "MOVED": "it is part of a cluster: write redis+cluster://HOST:PORT",
    "CROSSSLOT": "it is part of a cluster: write redis+cluster://HOST:PORT",
}
_TEXTS: Final = {
    "invalid DB index": "it has no such database: look at `databases` in its configuration",
    "DB index is out of range": "it has no such database: look at `databases` in its configuration",
    "SELECT is not allowed in cluster mode": "it is part of a cluster: write redis+cluster://HOST:PORT",
    "unknown command 'HELLO'": "it is too old: Redis 7.0, Valkey 7.2 or later is needed",
    "called with the client already authenticated": _WORDS["NOAUTH"],
    "AUTH <password> called without any password configured": "it has no password, and the address names one",
    "can't run this command": _WORDS["NOPERM"],
    "can't access": _WORDS["NOPERM"],
    "cluster support disabled": "it is no cluster: write redis://HOST:PORT/DB",
    "max number of clients reached": "it has too many clients (maxclients)",
}


class BrokenError(Exception):
    """The connection broke, or was too slow. It is unknown whether the commands were executed."""


class HungError(BrokenError):
    """The server took the connection, and did not answer in time."""


class CommandRefusedError(Exception):
    """The server refused a command; the text is the server's, and begins with a word that says why."""


class _Call:
    __slots__ = ("count", "future", "refused", "replies", "sent")

    def __init__(self, count: int, future: asyncio.Future[list[Any]], sent: float) -> None:
        self.count = count
        self.future = future
        self.replies: list[Any] = []
        self.refused: str | None = None
        self.sent = sent


class Connection(asyncio.Protocol):
    """Sends all commands of one turn of the event loop in one write. Answers come in the order of the commands.

    Args:
        timeout: seconds in which nothing is sent or received, while an answer is due, before the connection counts as broken.
            A large record takes longer than that on a slow line, and would never arrive if each attempt were cut off.
        pushed: called with what a server sends without being asked: the key and the message.

    Attributes:
        broken: why nothing can be asked any more; None as long as it can.
        lost: called when that happens.
        life: identifies the process that answers; another process may have lost what its predecessor had.
    """

    def __init__(self, timeout: float, pushed: Callable[[bytes, bytes], None] | None = None) -> None:
        self.broken: str | None = None
        self.lost: Callable[[], None] | None = None
        self.life = ""
        self._timeout = timeout
        self._pushed = pushed
        self._reader = hiredis.Reader()
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._calls: deque[_Call] = deque()
        self._out: list[bytes] = []
        self._watch: asyncio.TimerHandle | None = None
        self._given = 0  # bytes that the transport got from here
        self._sent = 0  # how many of them it had sent at the last look
        self._moved = 0.0  # when bytes were last seen to move

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class is no subclass of it

    def connection_lost(self, exc: Exception | None) -> None:
        self._break(str(exc or "the server closed the connection"))

    def call(self, commands: Sequence[Command]) -> asyncio.Future[list[Any]]:
        """Send commands; the future has their replies. It fails with BrokenError or, if any is refused, CommandRefusedError."""
        future: asyncio.Future[list[Any]] = self._loop.create_future()
        if self.broken is not None:
            future.set_exception(BrokenError(self.broken))
            return future
        if not commands:
            future.set_result([])
            return future
        self.send(commands)
        now = self._loop.time()
        self._calls.append(_Call(len(commands), future, now))
        if self._watch is None:
            self._watch = self._loop.call_at(now + self._timeout, self._look)
        return future

    def send(self, commands: Sequence[Command]) -> None:
        """Send commands that are not answered, or by a push."""
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out += packed(commands)

    def close(self) -> None:
        self._break("it is closed")

    def _flush(self) -> None:
        out, self._out = self._out, []
        if self._transport is None or self.broken is not None:
            return
        goes_on = self._transport.get_write_buffer_size() > 0
        self._given += sum(map(len, out))
        self._transport.writelines(out)
        if unsent := self._transport.get_write_buffer_size():
            if not goes_on:
                self._sent = self._given - unsent
            self._look_soon(self._loop.time())

    def resume_writing(self) -> None:
        """Note that the last of a large write is on its way."""
        self._moved = self._loop.time()

    def data_received(self, data: bytes) -> None:
        self._moved = self._loop.time()
        reader, calls = self._reader, self._calls
        try:
            reader.feed(data)
            while (reply := reader.gets()) is not False:
                if self._pushed is not None and isinstance(reply, list) and reply and reply[0] in _PUSHED:
                    self._pushed(reply[1], reply[2] if isinstance(reply[2], bytes) else b"")
                    continue
                call = calls[0]
                if isinstance(reply, hiredis.ReplyError):
                    call.refused = call.refused or str(reply)
                call.replies.append(reply)
                if len(call.replies) == call.count:
                    calls.popleft()
                    _settle(call)
        except (hiredis.ProtocolError, IndexError) as error:
            self._break(f"this is no Redis, or its answer was damaged: {error}")

    def _look(self) -> None:
        """Break what hangs. A loop that was late itself may have sent or read nothing meanwhile: look again a little later."""
        watch, self._watch = self._watch, None
        if not self._calls or self.broken is not None or watch is None:
            return
        now = self._loop.time()
        unsent = self._transport.get_write_buffer_size() if self._transport is not None else 0
        if unsent and self._given - unsent > self._sent:
            self._sent, self._moved = self._given - unsent, now
        end = max(self._calls[0].sent, self._moved) + self._timeout
        if end > now and unsent:
            self._look_soon(now)
        elif end > now:
            self._watch = self._loop.call_at(end, self._look)
        elif now - watch.when() > LATE:
            self._watch = self._loop.call_at(now + self._timeout / TICKS, self._look)
        else:
            self._break(f"no answer within {self._timeout:g} seconds", HungError)

    def _look_soon(self, now: float) -> None:
        """Look several times within the time limit whether a large write goes on."""
        soon = now + self._timeout / TICKS
        if self._watch is None or self._watch.when() > soon:
            if self._watch is not None:
                self._watch.cancel()
            self._watch = self._loop.call_at(soon, self._look)

    def _break(self, why: str, kind: type[BrokenError] = BrokenError) -> None:
        if self.broken is not None:
            return
        self.broken = why
        if self._watch is not None:
            self._watch.cancel()
        if self._transport is not None:
            self._transport.abort()
        calls, self._calls = self._calls, deque()
        for call in calls:
            if not call.future.done():
                call.future.set_exception(kind(why))
                call.future.exception()  # a waiting caller gets the error; there may be none
        if self.lost is not None:
            self.lost()


def _settle(call: _Call) -> None:
    if call.future.done():
        return
    if call.refused is None:
        call.future.set_result(call.replies)
    else:
        call.future.set_exception(CommandRefusedError(call.refused))


def packed(commands: Sequence[Command]) -> list[bytes]:
    """Return commands as the protocol has them, in few pieces.

    https://redis.io/docs/latest/develop/reference/protocol-spec/#sending-commands-to-a-redis-server
    """
    pieces: list[bytes] = []
    short: list[bytes] = []
    for command in commands:
        if len(command) <= _SHORT and command[0] != "HSET":  # which may have the file of a picture
            short.append(hiredis.pack_command(command))  # type: ignore[arg-type]  # a tuple of any length
            continue
        short.append(b"*%d\r\n" % len(command))
        for one in command:
            data = one if isinstance(one, bytes) else str(one).encode()
            if len(data) < _LONG:
                short.append(b"$%d\r\n%b\r\n" % (len(data), data))
            else:
                pieces += (b"".join(short) + b"$%d\r\n" % len(data), data)
                short = [b"\r\n"]
    return [*pieces, b"".join(short)]


def passing(refusal: str) -> bool:
    """Return whether a refusal will end in a moment."""
    return refusal.startswith(_PASSING)


def trouble(refusal: str, shown: str) -> StoreError:
    """Return the error for a refusal."""
    for text, words in _TEXTS.items():
        if text.lower() in refusal.lower():
            return StoreUnreachableError(f"the store {shown}: {words} ({refusal})")
    words = _WORDS.get(refusal.partition(" ")[0], "")
    if refusal.startswith("WRONGTYPE"):
        return StoreMismatchError(f"the store {shown}: another program uses keys of this prefix ({refusal})")
    if words:
        return StoreUnreachableError(f"the store {shown}: {words} ({refusal})")
    return StoreUnreachableError(f"the store {shown} refused a command: {refusal}")
