"""Makes a connection: to a server, or to the present master."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Final

from middleware_hub.store.errors import StoreUnreachableError
from middleware_hub.store.redis.address import Address, Login
from middleware_hub.store.redis.connection import BrokenError, Command, Connection, RefusedError
from middleware_hub.store.redis.scripts import ALL
from middleware_hub.store.redis.servers import parse_info
from router.http.time_limits import patience

Pushed = Callable[[bytes, bytes], None]

_LOADED: Final[list[Command]] = [("SCRIPT", "LOAD", script.text) for script in ALL]


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
    """Return a connection to a server. Raises OSError, BrokenError, RefusedError."""
    loop = asyncio.get_running_loop()
    try:
        async with patience(address.connect_timeout):
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
    return [*commands, *(_LOADED if scripts else ()), ("INFO", "server")]


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
        except (OSError, BrokenError, RefusedError) as error:
            said.append(f"{host}:{port}: {error}")
            continue
        if found is not None:
            return found[0].decode(), int(found[1])
        said.append(f"{host}:{port} knows no master {address.name!r}")
    raise StoreUnreachableError(f"the store {address.shown}: no Sentinel names a master ({'; '.join(said)})")
