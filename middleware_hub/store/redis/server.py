"""A server that should always be there: a lost connection is made again, and its commands are sent again.

connecting --> there --> lost: connecting again; requests wait for that, once
     |           |
     +-----------+--> away, or hangs: each request fails at once, and a task tries again and again in the background

If another process answers than before, the last writes are repeated before anything is asked (`last_written`).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, Final

from middleware_hub.store.errors import StoreError, StoreUnreachableError
from middleware_hub.store.redis.address import Address, Login
from middleware_hub.store.redis.connection import (
    BrokenError,
    Command,
    CommandRefusedError,
    Connection,
    HungError,
    passing,
    trouble,
)
from middleware_hub.store.redis.last_written import LastWritten
from middleware_hub.store.redis.scripts import ALL
from router.http.time_limits import patience as time_limit

logger = logging.getLogger(__name__)

_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 2.0
"""Seconds between two tries to reach a server that is away."""
_PASSING_PAUSE: Final = 0.1
_LOAD: Final[list[Command]] = [("SCRIPT", "LOAD", script.text) for script in ALL]

Dial = Callable[[], Awaitable[Connection]]
Pushed = Callable[[bytes, bytes], None]


class Server:
    """One server, or the present master.

    Args:
        dial: makes a connection. It raises StoreError, BrokenError, CommandRefusedError, or OSError.
        shown: its address in messages.
        patience: seconds that a request may take, with all its tries.
        writes: whether the commands sent here must survive a kill and restart of the server.
        answers: called with the process that answers (`Connection.life`), before any caller gets its answer.
    """

    def __init__(
        self,
        dial: Dial,
        shown: str,
        patience: float,
        *,
        writes: bool = False,
        answers: Callable[[str], None] | None = None,
    ) -> None:
        self._dial = dial
        self._shown = shown
        self._patience = patience
        self._connection: Connection | None = None
        self._dialing: asyncio.Task[Connection] | None = None
        self._trouble: StoreError | None = None
        self._mending: asyncio.Task[None] | None = None
        self._closed = False
        self._written = LastWritten() if writes else None
        self._answers = answers
        self._life = ""
        self._returning: asyncio.Task[None] | None = None

    async def call(self, commands: Sequence[Command], again: Sequence[Command] | None = None) -> list[Any]:
        """Return the replies of commands, which may be sent more than once; repeats are sent as in `again`.

        Raises StoreError, CommandRefusedError.
        """
        end = monotonic() + self._patience
        while True:
            connection = await self._connected_now()
            try:
                replies = await connection.call(commands)
            except BrokenError as error:
                if isinstance(error, HungError):
                    self._give_up(self._away(error))
                if self._closed or self._trouble is not None or monotonic() >= end:
                    raise self._away(error) from error
                logger.warning("%s: %s: connecting again", self._shown, error)
            except CommandRefusedError as error:
                await self._mend(connection, str(error), end)
            else:
                if self._written is not None:
                    self._written.keep(commands if again is None else again)
                return replies
            commands = commands if again is None else again

    async def _mend(self, connection: Connection, refusal: str, end: float) -> None:
        """Wait until a refused command may be sent again. Raises the refusal's error if it is final or this takes too long."""
        if refusal.startswith("NOSCRIPT"):
            with suppress(BrokenError, CommandRefusedError):
                await connection.call(_LOAD)
            return
        if not passing(refusal):
            raise CommandRefusedError(refusal)
        if monotonic() >= end:
            raise trouble(refusal, self._shown)
        connection.close()
        await asyncio.sleep(_PASSING_PAUSE)

    async def connection(self) -> Connection:
        """Return a separate connection for the caller."""
        try:
            return await self._dial()
        except (OSError, BrokenError, CommandRefusedError) as error:
            raise self._away(error) from error

    async def _connected(self) -> Connection:
        if self._closed:
            raise StoreUnreachableError(f"the store {self._shown} is not open")
        if self._trouble is not None:
            raise type(self._trouble)(self._trouble.message)
        if self._dialing is None:
            self._dialing = asyncio.create_task(self._dialed())
        return await asyncio.shield(self._dialing)

    async def _dialed(self) -> Connection:
        connection: Connection | None = None
        try:
            connection = await self._dial()
            if self._answers is not None:
                self._answers(connection.life)
            if self._written is not None and self._life not in ("", connection.life):
                await self._written.again(connection, self._shown)
            connection.lost = self._hear_of_loss
            self._life = connection.life
        except (OSError, BrokenError, CommandRefusedError) as error:
            found = self._away(error)
        except StoreError as error:
            found = error
        else:
            self._connection, self._trouble = connection, None
            return connection
        finally:
            self._dialing = None
            if connection is not None and connection is not self._connection:
                connection.close()  # the last writes could not be repeated over it
        self._give_up(found)
        raise found

    async def complete(self) -> bool:
        """Write what waits for other routers, as far as the server takes it now; return whether nothing waits any more.

        Raises StoreError.
        """
        if self._written is None or not self._written.waiting:
            return True
        try:
            await self._written.go_on(await self._connected_now(), self._shown)
        except (BrokenError, CommandRefusedError) as error:
            raise self._away(error) from error
        return not self._written.waiting

    @property
    def away(self) -> bool:
        """Return whether the server was unreachable at the last try, or did not answer."""
        return self._trouble is not None

    def leave(self) -> list[Sequence[Command]]:
        """Return the last writes, for the server that has the keys now, and forget them."""
        return [] if self._written is None else self._written.leave()

    async def _connected_now(self) -> Connection:
        connection = self._connection
        return await self._connected() if connection is None or connection.broken is not None else connection

    def _hear_of_loss(self) -> None:
        """Connect again before the next command: other routers may miss what the server has lost."""
        if not self._closed and self._dialing is None and self._trouble is None:
            self._returning = asyncio.create_task(self._return())

    async def _return(self) -> None:
        with suppress(StoreError):
            await self._connected()

    def _give_up(self, trouble: StoreError) -> None:
        """Fail all requests at once until a task has reached the server."""
        self._trouble = trouble
        if self._mending is None and not self._closed:
            self._mending = asyncio.create_task(self._try_on())

    async def _try_on(self) -> None:
        pause = _FIRST_PAUSE
        while self._trouble is not None:
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            with suppress(StoreError):
                await self._dialed()
        self._mending = None
        logger.warning("%s answers again", self._shown)

    def _away(self, error: BaseException) -> StoreError:
        if isinstance(error, CommandRefusedError):
            return trouble(str(error), self._shown)
        why = str(error) or type(error).__name__
        return StoreUnreachableError(f"the store {self._shown} cannot be reached: {why}")

    async def close(self) -> None:
        self._closed = True
        for task in (self._dialing, self._mending, self._returning):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        if self._connection is not None:
            self._connection.close()


async def dial(
    address: Address,
    host: str,
    port: int,
    *,
    login: Login | None = None,
    db: int | None = None,
    pushed: Pushed | None = None,
    scripts: bool = True,
) -> Connection:
    """Return a connection to a server. Raises OSError, BrokenError, CommandRefusedError."""
    loop = asyncio.get_running_loop()
    try:
        async with time_limit(address.connect_timeout):
            context = None if address.tls is None else address.tls.context()
            transport, connection = await loop.create_connection(
                lambda: Connection(address.timeout, pushed), host, port, ssl=context
            )
            raw = transport.get_extra_info("socket")
            if raw is not None:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            try:
                greeting = _greeting(address, login or address.login, address.db if db is None else db, scripts)
                connection.life = parse_info((await connection.call(greeting))[-1]).get("run_id", "")
            except BaseException:
                connection.close()
                raise
            return connection
    except TimeoutError:
        raise BrokenError(f"{host}:{port} does not answer within {address.connect_timeout:g} seconds") from None


def _greeting(address: Address, login: Login, db: int, scripts: bool) -> list[Command]:
    who = () if login.password is None else ("AUTH", login.user or "default", login.password)
    commands: list[Command] = [("HELLO", 2, *who, "SETNAME", "tito-router")]
    if db:
        commands.append(("SELECT", db))
    return [*commands, *(_LOAD if scripts else ()), ("INFO", "server")]


async def dial_first(address: Address, *, pushed: Pushed | None = None) -> Connection:
    """Return a connection to the server of an address, or to the master that its Sentinels name."""
    if address.kind != "redis+sentinel":
        (host, port), *more = address.hosts
        if more:
            raise StoreUnreachableError(
                f"the store {address.shown}: more than one host is for redis+sentinel or redis+cluster"
            )
        return await dial(address, host, port, pushed=pushed)
    host, port = await _master(address, address.hosts)
    connection = await dial(address, host, port, pushed=pushed)
    try:
        (role,) = await connection.call([("ROLE",)])
        if role[0] != b"master":
            raise BrokenError(f"{host}:{port} is not the master any more")
    except BaseException:
        connection.close()
        raise
    return connection


async def _master(address: Address, sentinels: Sequence[tuple[str, int]]) -> tuple[str, int]:
    """Return the address of the master, from the first Sentinel that answers."""
    said = []
    for host, port in sentinels:
        try:
            sentinel = await dial(address, host, port, login=address.sentinel_login, db=0, scripts=False)
            try:
                (found,) = await sentinel.call([("SENTINEL", "GET-MASTER-ADDR-BY-NAME", address.name)])
            finally:
                sentinel.close()
        except (OSError, BrokenError, CommandRefusedError) as error:
            said.append(f"{host}:{port}: {error}")
            continue
        if found is not None:
            return found[0].decode(), int(found[1])
        said.append(f"{host}:{port} knows no master {address.name!r}")
    raise StoreUnreachableError(f"the store {address.shown}: no Sentinel names a master ({'; '.join(said)})")


def parse_info(text: bytes, setting: Sequence[bytes] = ()) -> dict[str, str]:
    """Return what a server answered, by name."""
    lines = (line.partition(":") for line in text.decode("utf-8", "replace").splitlines())
    found = {name: value for name, colon, value in lines if colon}
    return found | ({"appendfsync": setting[1].decode()} if setting else {})
