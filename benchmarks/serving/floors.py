"""What the calls of SQLite, or of a client of Redis, take for what a store asks of them.

`python -m benchmarks.serving.floors` has a store write and find what a router would: turns of 400 tokens and replies of 200, of
32 clients at once and of one, and conversations of 50 turns that it never saw. Each statement to SQLite, and each byte to
and from Redis, is noted. Then a loop that does nothing else makes the same calls, with the same values and in the same
transactions and pauses, on a copy of the file, or to an empty server: no record is made, encoded, hashed or decoded. So no code
around these calls makes them cheaper. The commands for Redis are packed already; `hiredis` reads the answers, which lead
to nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import shutil
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import apsw
import hiredis
import uvloop

from benchmarks.pages import machine, table
from benchmarks.test_store import Talk, text
from middleware_hub.store.opening import open_store
from middleware_hub.store.paths import PathState, TextPath
from middleware_hub.store.protocol import Batch, Query, Store
from middleware_hub.store.sqlite.file import connect
from tests.middleware_hub.store.world import NS, Turn
from tests.support.redis_server import redis_server

CLIENTS, ASKED, REPLIED = 32, 400, 200
TURNS = 4  # of a conversation under load
LONG = 50  # of a conversation that is found again
PAUSE = 0.002
"""Seconds before each piece of work, in which the processor does other things, as it does in a router."""
KINDS = ("one of 32 turns at once", "one turn", "a look-up of 50 turns")

Asked = tuple[Turn, PathState | None]


@dataclass
class Piece:
    """A piece of work that is timed as one: how many turns it has, and where its calls are among those that were noted."""

    kind: str
    turns: int
    first: int = 0
    end: int = 0


@dataclass
class Times:
    """Microseconds a turn of each piece, by its kind: of the processor, and by the clock."""

    cpu: dict[str, list[float]] = field(default_factory=dict)
    wall: dict[str, list[float]] = field(default_factory=dict)

    def add(self, piece: Piece, used: float, took: float) -> None:
        self.cpu.setdefault(piece.kind, []).append(1e6 * used / piece.turns)
        self.wall.setdefault(piece.kind, []).append(1e6 * took / piece.turns)

    def median(self, what: str, kind: str) -> float:
        each: dict[str, list[float]] = getattr(self, what)
        return statistics.median(each[kind])

    def medians(self) -> dict[str, dict[str, float]]:
        return {kind: {what: self.median(what, kind) for what in ("cpu", "wall")} for kind in self.cpu}


class Plan:
    """What a store is asked for, made beforehand: turns that are appended, and conversations that are found."""

    def __init__(self, groups: int, lone: int, found: int) -> None:
        talk = Talk()
        ends: list[Turn | None] = [None] * CLIENTS
        self.ready = [self._next(talk, ends, client)[0] for _ in range(TURNS) for client in range(CLIENTS)]
        self.long = [self._conversation(talk) for _ in range(found)]
        self.work: list[tuple[Piece, list[Asked]]] = []
        for _ in range(groups):
            turns = [self._next(talk, ends, client) for client in range(CLIENTS)]
            self.work.append((Piece(KINDS[0], CLIENTS), turns))
        self.work += [(Piece(KINDS[1], 1), [self._next(talk, ends, n % CLIENTS)]) for n in range(lone)]
        self.asked = [line[-1].text + text(talk.random, 100) for line in self.long]

    def _next(self, talk: Talk, ends: list[Turn | None], client: int) -> Asked:
        """Return the next turn of a client, and the hashes of the text before it, which a tree keeps."""
        before = ends[client]
        if before is not None and len(before.text) > 4 * TURNS * (ASKED + REPLIED) - 100:
            before = None
        ends[client] = turn = talk.next(before, ASKED, REPLIED)
        return turn, None if before is None else before.path.state(len(before.text))

    def _conversation(self, talk: Talk) -> list[Turn]:
        line: list[Turn] = []
        for _ in range(LONG):
            line.append(talk.next(line[-1] if line else None, 200, REPLIED))
        return line

    async def prepare(self, store: Store) -> None:
        """Append what is there before anything is timed."""
        for turns in ([turn] for turn in [*self.ready, *(turn for line in self.long for turn in line)]):
            await asyncio.gather(*(store.append(turn.batch) for turn in turns))

    async def run(self, store: Store, times: Times, place: Callable[[], int], *, alone: bool) -> list[Piece]:
        """Do the work, and return its pieces. `place` says how many calls were noted.

        `alone`: no other process has the store, so that nothing is looked for.
        """
        pieces = []

        async def timed(piece: Piece, work: Awaitable[Any]) -> None:
            piece.first = place()
            used, begun = time.process_time(), time.perf_counter()
            await work
            times.add(piece, time.process_time() - used, time.perf_counter() - begun)
            await asyncio.sleep(PAUSE)  # what came for someone else is noted with this piece
            piece.end = place()
            pieces.append(piece)

        async def one(turn: Turn, state: PathState | None) -> None:
            store.others()
            context = turn.context
            assert context is not None
            known = {record for record in (context.parent, context.line) if record is not None}
            path = TextPath(NS, turn.text[: turn.reply.start], state)
            await store.find(Query(path, context.start, known, complete=alone))
            await store.append(Batch(turn.records, {turn.reply.id: path.longer(turn.text)}))

        for piece, turns in self.work:
            await timed(
                Piece(piece.kind, piece.turns), asyncio.wait([asyncio.ensure_future(one(*turn)) for turn in turns])
            )
        for asked in self.asked:
            await timed(Piece(KINDS[2], 1), store.find(Query(TextPath(NS, asked))))
        return pieces


async def prepared(where: str, plan: Plan) -> None:
    """Make a store with what is there before anything is timed."""
    store = open_store(where)
    await store.open("bench")
    await plan.prepare(store)
    await store.close()


async def done(where: str, plan: Plan, place: Callable[[], int], *, alone: bool) -> tuple[Times, list[Piece]]:
    """Do the work in the store at an address."""
    store, times = open_store(where), Times()
    await store.open("bench")
    if not alone:
        await plan.prepare(store)
    pieces = await plan.run(store, times, place, alone=alone)
    await store.close()
    return times, pieces


@contextlib.contextmanager
def statements() -> Iterator[list[tuple[int, str, Any]]]:
    """Note each statement that a connection to SQLite is given which is made in this block: its number, the SQL, the values."""
    calls: list[tuple[int, str, Any]] = []
    numbers = itertools.count()

    def watch(connection: apsw.Connection) -> None:
        number = next(numbers)

        def note(_: object, sql: str, values: Any) -> bool:
            calls.append((number, sql, values))
            return True

        connection.exec_trace = note

    apsw.connection_hooks.append(watch)
    try:
        yield calls
    finally:
        apsw.connection_hooks.remove(watch)


def replayed(path: Path, calls: Sequence[tuple[int, str, Any]], pieces: Sequence[Piece]) -> Times:
    """Execute what was noted on a copy of the file as it was before, and time the pieces."""
    floor = Times()
    connections: dict[int, apsw.Connection] = {}

    def execute(some: Sequence[tuple[int, str, Any]]) -> None:
        for number, sql, values in some:
            connections[number].execute(sql, values).fetchall()

    at = pieces[0].first
    for piece in pieces:
        for number, _, _ in calls[at : piece.end]:
            if number not in connections:
                connections[number] = connect(path)
                # The only function of ours that SQLite calls: whether the one who asks has a record.
                connections[number].create_scalar_function("known", frozenset[bytes]().__contains__, 1)
        execute(calls[at : piece.first])
        time.sleep(PAUSE)
        used, begun = time.process_time(), time.perf_counter()
        execute(calls[piece.first : piece.end])
        floor.add(piece, time.process_time() - used, time.perf_counter() - begun)
        at = piece.end
    for connection in connections.values():
        connection.close()
    return floor


def sqlite(plan: Plan) -> tuple[Times, Times]:
    """Return what the store takes, and what SQLite's calls take for it."""
    with tempfile.TemporaryDirectory() as folder:
        first, noted, copy = (Path(folder, name) for name in ("first", "noted", "copy"))
        uvloop.run(prepared(f"sqlite:{first}/", plan))
        for other in (noted, copy):
            shutil.copytree(first, other)
        own, _ = uvloop.run(done(f"sqlite:{first}/", plan, lambda: 0, alone=True))
        with statements() as calls:
            _, pieces = uvloop.run(done(f"sqlite:{noted}/", plan, lambda: len(calls), alone=True))
        return own, replayed(copy / "store.sqlite3", calls, pieces)


class Wire:
    """Stands between a store and Redis, and notes what is sent, and how many answers come: of which connection, and when."""

    def __init__(self, port: int) -> None:
        self.calls: list[tuple[int, bytes, int]] = []
        self._port = port
        self._served: list[asyncio.Task[Any]] = []

    async def start(self) -> asyncio.Server:
        return await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def ended(self) -> None:
        """Wait until all connections are closed."""
        await asyncio.gather(*self._served)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(self._served)
        self._served.append(cast(asyncio.Task[Any], asyncio.current_task()))
        answers = hiredis.Reader()
        there, back = await asyncio.open_connection("127.0.0.1", self._port)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, sent: bool) -> None:
            while data := await source.read(1 << 20):
                if sent:
                    self.calls.append((number, data, 0))
                else:
                    answers.feed(data)
                    self.calls.append((number, b"", _answers(answers)))
                sink.write(data)
            sink.close()

        await asyncio.gather(pump(reader, back, sent=True), pump(there, writer, sent=False))


def _answers(reader: Any) -> int:
    """Return how many answers a reader has."""
    count = 0
    while reader.gets() is not False:
        count += 1
    return count


class Caller(asyncio.Protocol):
    """Sends what is packed, and reads answers, which lead to nothing."""

    def __init__(self) -> None:
        self._reader = hiredis.Reader()
        self._left = 0
        self._waits: asyncio.Future[None] | None = None
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transport is no subclass

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        self._left -= _answers(self._reader)
        if self._waits is not None and self._left <= 0:
            self._waits.set_result(None)
            self._waits = None

    async def answers(self, count: int) -> None:
        """Wait for as many more answers."""
        self._left += count
        if self._left > 0:
            self._waits = asyncio.get_running_loop().create_future()
            await self._waits


async def _again(port: int, calls: Sequence[tuple[int, bytes, int]], pieces: Sequence[Piece]) -> Times:
    """Send all that was noted to an empty server, and time the pieces."""
    loop, floor = asyncio.get_running_loop(), Times()
    callers: dict[int, Caller] = {}

    async def send(some: Sequence[tuple[int, bytes, int]]) -> None:
        for number, data, answers in some:
            caller = callers[number]
            if data:
                caller.transport.write(data)
            else:
                await asyncio.wait_for(caller.answers(answers), 20)

    for number in {number for number, _, _ in calls}:
        _, callers[number] = await loop.create_connection(Caller, "127.0.0.1", port)
    at = 0
    for piece in pieces:
        await send(calls[at : piece.first])
        await asyncio.sleep(PAUSE)
        used, begun = time.process_time(), time.perf_counter()
        await send(calls[piece.first : piece.end])
        floor.add(piece, time.process_time() - used, time.perf_counter() - begun)
        at = piece.end
    for caller in callers.values():
        caller.transport.close()
    return floor


def redis(plan: Plan) -> tuple[Times, Times]:
    """Return what the store takes, and what a client's calls take for it."""
    with tempfile.TemporaryDirectory() as folder, redis_server(Path(folder)) as server:

        async def noted() -> tuple[Wire, list[Piece]]:
            wire = Wire(server.port)
            async with await wire.start() as listening:
                port = listening.sockets[0].getsockname()[1]
                _, pieces = await done(f"redis://127.0.0.1:{port}/0", plan, lambda: len(wire.calls), alone=False)
                await wire.ended()
            return wire, pieces

        own, _ = uvloop.run(done(server.address, plan, lambda: 0, alone=False))
        server.say("FLUSHALL")
        wire, pieces = uvloop.run(noted())
        server.say("FLUSHALL")
        return own, uvloop.run(_again(server.port, wire.calls, pieces))


Both = dict[str, tuple[Times, Times]]


def floors(groups: int = 40, conversations: int = 12) -> Both:
    """Return for each kind of store what it takes, and what its calls take alone."""
    return {
        name: measure(Plan(groups, 10 * groups, conversations))
        for name, measure in (("sqlite", sqlite), ("redis", redis))
    }


def floor_table(found: Both) -> str:
    """Return a table of medians."""
    head = ["", "CPU of the store, us", "of its calls alone", "by the clock, us", "of its calls alone"]
    rows = []
    for name, both in found.items():
        for kind in KINDS:
            figures = (f"{one.median(what, kind):.0f}" for what in ("cpu", "wall") for one in both)
            rows += [[f"`{name}:`, {kind}", *figures]]
    return table(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=40, help="of 32 turns; ten times as many are alone (%(default)s)")
    parser.add_argument("--conversations", type=int, default=12, help="that are found (%(default)s)")
    args = parser.parse_args()
    print(f"{machine()}. The median.\n\n{floor_table(floors(args.groups, args.conversations))}")


if __name__ == "__main__":
    main()
