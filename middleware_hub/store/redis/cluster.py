"""The nodes of a cluster: each command goes to the node that has its key.

Why no client library does this: redis-py learns slots and masters only over connections of its own, which then also carry the
commands. A pipeline of three commands costs it 77 us of processor time, and 4 us here (redis-py 8.1, 32 pipelines at once).
"""

from __future__ import annotations

import asyncio
import logging
import math
from binascii import crc_hqx
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any, Final, NamedTuple

from xxhash import xxh3_64_hexdigest

from middleware_hub.store.errors import StoreUnreachableError
from middleware_hub.store.redis.address import Address
from middleware_hub.store.redis.connection import BrokenError, Command, CommandRefusedError, Connection, trouble
from middleware_hub.store.redis.last_written import has_to_wait
from middleware_hub.store.redis.server import Server, dial, parse_info
from middleware_hub.store.redis.servers import Heard, questions, scanned

logger = logging.getLogger(__name__)

_SLOTS: Final = 16_384
_MOVING: Final = ("MOVED", "ASK", "TRYAGAIN")
_PAUSE: Final = 0.05
_LEARN_EVERY: Final = 0.5
"""Seconds between two looks at which node has which slots."""

Place = tuple[str, int]


class _Node(NamedTuple):
    reads: Server
    writes: Server


class Cluster:
    """`Servers` of a cluster."""

    together = False

    def __init__(self, address: Address) -> None:
        self.replaced: Callable[[], None] = lambda: None
        self._address = address
        self._nodes: dict[Place, _Node] = {}
        self._lives: dict[Place, str] = {}
        self._owners: list[Place] = []
        self._places: tuple[Place, ...] = ()
        """The owners, each once."""
        self._left: list[Sequence[Command]] = []
        """The last writes to nodes that have no slots any more: the new owners may lack them."""
        self._learned = -_LEARN_EVERY
        self._learning = asyncio.Lock()
        self._listeners: dict[Place, tuple[Connection, set[bytes]]] = {}
        self._heard: Heard | None = None
        self._closed = False

    async def read(self, commands: Sequence[Command]) -> list[Any]:
        return await self._ask(commands, None, writes=False)

    async def write(self, commands: Sequence[Command], again: Sequence[Command] | None = None) -> list[Any]:
        return await self._ask(commands, again, writes=True)

    async def _ask(self, commands: Sequence[Command], again: Sequence[Command] | None, *, writes: bool) -> list[Any]:
        if not self._owners:
            await self._learn()
        parts: dict[Place, list[int]] = {}
        for number, command in enumerate(commands):
            parts.setdefault(self._owners[slot_of(_key_of(command))], []).append(number)
        replies: list[Any] = [None] * len(commands)
        retries = commands if again is None else again

        async def part(owner: Place, numbers: list[int]) -> None:
            some = [commands[number] for number in numbers]
            try:
                found = await self._server(owner, writes).call(some, [retries[number] for number in numbers])
            except CommandRefusedError as error:
                if not str(error).startswith(_MOVING):
                    raise trouble(str(error), self._address.shown) from error
            except StoreUnreachableError:
                await self._learn()
                if all(self._owners[slot_of(_key_of(command))] == owner for command in some):
                    raise
            else:
                for number, reply in zip(numbers, found, strict=True):
                    replies[number] = reply
                return
            for number in numbers:  # in order: a batch may build on the batch before it
                replies[number] = await self._follow(retries[number], writes=writes)

        if len(parts) == 1:
            await part(*parts.popitem())
        else:
            await _all(part(owner, numbers) for owner, numbers in parts.items())
        return replies

    async def _follow(self, command: Command, *, writes: bool) -> Any:
        """Ask the node that has a key, which may be on its way from one node to another."""
        end = monotonic() + self._address.timeout
        named: Place | None = None
        asking: list[Command] = []
        while True:
            place = named or self._owners[slot_of(_key_of(command))]
            try:
                *_, reply = await self._server(place, writes).call([*asking, command])
                return reply
            except CommandRefusedError as error:
                why, _, rest = str(error).partition(" ")
                if why not in _MOVING or monotonic() > end:
                    raise trouble(str(error), self._address.shown) from error
                asking = [("ASKING",)] if why == "ASK" else []
                named = None if why == "TRYAGAIN" else _place(rest, place)
                if why != "ASK":
                    await asyncio.sleep(_PAUSE)
                    await self._learn()

    async def _learn(self) -> None:
        """Learn which node has which slots, from any node that answers."""
        if self._closed:
            raise StoreUnreachableError(f"the store {self._address.shown} is not open")
        async with self._learning:
            if self._owners and monotonic() - self._learned < _LEARN_EVERY:
                return
            said = []
            for host, port in dict.fromkeys((*self._nodes, *self._address.hosts)):
                try:
                    node = await dial(self._address, host, port, db=0, scripts=False)
                    try:
                        (ranges,) = await node.call([("CLUSTER", "SLOTS")])
                    finally:
                        node.close()
                except CommandRefusedError as error:
                    said.append(str(trouble(str(error), f"{host}:{port}")))
                except (OSError, BrokenError) as error:
                    said.append(f"{host}:{port}: {error}")
                else:
                    self._take(ranges, host)
                    return
            raise StoreUnreachableError(f"the store {self._address.shown}: no node answers ({'; '.join(said)})")

    def _take(self, ranges: Sequence[Any], asked: str) -> None:
        parts = [
            (first, last + 1, ((node[0].decode() if node[0] else asked), node[1])) for first, last, node, *_ in ranges
        ]
        owners: list[Place] = [parts[0][2] if parts else self._address.hosts[0]] * _SLOTS
        for first, end, place in parts:
            owners[first:end] = [place] * (end - first)
        before, self._owners, self._learned = set(self._places), owners, monotonic()
        self._places = tuple(dict.fromkeys(owners))
        if before and before != set(self._places):
            # A replica that became a master may lack what it had not yet been sent, and slots without an owner that were given
            # to another node are empty.
            self.replaced()

    def _answers(self, place: Place, life: str) -> None:
        if self._lives.setdefault(place, life) != life:
            self._lives[place] = life
            self.replaced()

    def _server(self, place: Place, writes: bool) -> Server:
        node = self._nodes.get(place)
        if node is None:
            made = partial(
                Server,
                partial(dial, self._address, *place),
                f"{place[0]}:{place[1]}",
                self._address.timeout,
                answers=partial(self._answers, place),
            )
            node = self._nodes[place] = _Node(made(), made(writes=True))
        return node.writes if writes else node.reads

    async def life(self) -> str:
        self._learned = -math.inf  # ask for the present owners
        await self._learn()
        infos = [parse_info(*await self._of(place, [("INFO", "server")])) for place in await self._masters()]
        return xxh3_64_hexdigest(" ".join(sorted(info["run_id"] for info in infos)).encode())

    async def attend(self) -> None:
        if self._away():
            await self._learn()
            if away := self._away():
                raise StoreUnreachableError(f"the store {self._address.shown}: {', '.join(away)} cannot be reached")

    def _away(self) -> list[str]:
        """Return the nodes with slots that are known to be away."""
        there = ((place, self._nodes.get(place)) for place in self._places)
        return [f"{host}:{port}" for (host, port), node in there if node and (node.reads.away or node.writes.away)]

    async def complete(self) -> bool:
        for place, node in self._nodes.items():
            if place not in self._places:
                self._left += node.writes.leave()
        left, self._left = self._left, []
        try:
            while left:
                if any(map(has_to_wait, await self.write(left[0]))):
                    self._left.append(left[0])
                del left[0]
        finally:
            self._left += left
        done = [await self._server(place, writes=True).complete() for place in self._places]
        return all(done) and not self._left

    async def listen(self, key: bytes, heard: Heard) -> None:
        if not self._owners:
            await self._learn()
        self._heard = heard
        place = self._owners[slot_of(key)]
        listener, keys = self._listeners.get(place, (None, set[bytes]()))
        if listener is None or listener.broken is not None:
            try:
                listener = await dial(self._address, *place, pushed=self._pushed)
            except (OSError, BrokenError, CommandRefusedError) as error:
                raise StoreUnreachableError(f"the store {self._address.shown} cannot be reached: {error}") from error
            keys = set()
            self._listeners[place] = listener, keys
        if key not in keys:
            keys.add(key)
            listener.send([("SSUBSCRIBE", key)])

    def _pushed(self, key: bytes, _: bytes) -> None:
        if self._heard is not None:
            self._heard(key)

    async def scan(self, pattern: bytes) -> AsyncIterator[list[bytes]]:
        for place in await self._masters():
            async for found in scanned(partial(self._of, place), pattern):
                yield found

    async def infos(self, *, settings: bool) -> list[Mapping[str, str]]:
        asked = questions(settings=settings)
        return [parse_info(*await self._of(place, asked)) for place in await self._masters()]

    async def _masters(self) -> list[Place]:
        if not self._owners:
            await self._learn()
        return list(self._places)

    async def _of(self, place: Place, commands: Sequence[Command]) -> list[Any]:
        try:
            return await self._server(place, writes=False).call(commands)
        except CommandRefusedError as error:
            raise trouble(str(error), self._address.shown) from error

    async def close(self) -> None:
        self._closed = True
        for node in self._nodes.values():
            await node.reads.close()
            await node.writes.close()
        for listener, _ in self._listeners.values():
            listener.close()


async def _all(parts: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Wait for all parts; raise the error of the first part that failed."""
    for done in await asyncio.gather(*parts, return_exceptions=True):
        if isinstance(done, BaseException):
            raise done


def slot_of(key: bytes) -> int:
    """Return the slot of a key: that of the part between its first braces, if there is one.

    https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/#hash-tags
    """
    begin = key.find(b"{") + 1
    end = key.find(b"}", begin) if begin else -1
    return crc_hqx(key[begin:end] if end > begin > 0 else key, 0) % _SLOTS


def _place(named: str, asked: Place) -> Place:
    """Return the node that a refusal of a node names, as `SLOT HOST:PORT`. Without a host it is at the host of that node."""
    host, _, port = named.split(" ")[-1].rpartition(":")
    return host or asked[0], int(port)


def _key_of(command: Command) -> bytes:
    """Return the key of a command, or the first of a script."""
    key = command[3] if command[0] == "EVALSHA" else command[1]
    return key if isinstance(key, bytes) else str(key).encode()
