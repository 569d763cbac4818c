"""The store: what a turn costs, whether look-ups stay flat, bytes on disk, opening a large store, reloading a conversation.

Aims: append and look-up of a turn of 200 tokens 90 us of processor, threads included; <= 12 bytes a token plus text plus 1 KB a
turn; 50 turns of 20,000 tokens reloaded in 5 ms; opening does not depend on what is stored.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Iterator
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.conftest import WORDS
from middleware_hub.store.media import MediaFile
from middleware_hub.store.opening import open_store
from middleware_hub.store.paths import TextPath
from middleware_hub.store.protocol import Query, Store
from middleware_hub.store.records import encode, identified
from middleware_hub.store.sqlite.file import connect
from tests.middleware_hub.store.world import NS, Turn, World, address_of, closed, ids

TOKENS = 200
"""Of a reply; a token is four characters."""


POOL = " ".join(random.Random(0).choices(WORDS, k=100_000))


def text(source: random.Random, tokens: int) -> str:
    """Return words of this many tokens, out of half a million characters."""
    at = source.randrange(len(POOL) - 4 * tokens)
    return POOL[at : at + 4 * tokens]


class Talk(World):
    """Turns whose ids are a quarter as many as their characters."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.random = random.Random(seed)

    def next(self, line: Turn | None, asked: int, replied: int = TOKENS, start: str = "") -> Turn:
        number = f"{self.random.getrandbits(128):032x}"
        made = self.turn(
            line,
            start + text(self.random, asked),
            text(self.random, replied),
            names=(number,),
            each=4,
        )
        self.turns.clear()
        return made


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture
def store(loop: asyncio.AbstractEventLoop, tmp_path: Path) -> Iterator[Store]:
    store = open_store(f"sqlite:{tmp_path}/")
    loop.run_until_complete(store.open("bench"))
    yield store
    loop.run_until_complete(store.close())


async def fill(store: Store, turns: Iterator[Turn], together: int = 200) -> None:
    some: list[Awaitable[Any]] = []
    for turn in turns:
        some.append(store.append(turn.batch))
        if len(some) == together:
            await asyncio.gather(*some)
            some.clear()
    await asyncio.gather(*some)


@pytest.mark.parametrize("clients", [1, 32])
@pytest.mark.parametrize("complete", [True, False])
def test_turn(
    benchmark: BenchmarkFixture, loop: asyncio.AbstractEventLoop, store: Store, clients: int, complete: bool
) -> None:
    """A look-up of the prompt and an append of the reply: wall clock, and processor of all threads.

    `complete`: the tree has evicted nothing and no other process writes, so look-ups are spared.
    """
    talk = Talk()
    rounds, per_round = 20, 5
    ends: list[Turn | None] = [None] * clients
    prepared = iter(
        [[[talk_next(talk, ends, c) for _ in range(per_round)] for c in range(clients)] for _ in range(rounds)]
    )
    spent: list[float] = []

    async def client(turns: list[tuple[Turn, TextPath, int, set[bytes]]]) -> None:
        for turn, state, known_from, known in turns:
            path = TextPath(NS, turn.text[: turn.reply.start], state)
            await store.find(Query(path, known_from, known, complete=complete))
            await store.append(type(turn.batch)(turn.records, {turn.reply.id: path.longer(turn.text)}))

    async def all_clients(work: list[Any]) -> None:
        await asyncio.gather(*(client(turns) for turns in work))

    def run(work: list[Any]) -> None:
        started = time.process_time()
        loop.run_until_complete(all_clients(work))
        spent.append((time.process_time() - started) / clients / per_round)

    benchmark.pedantic(run, setup=lambda: ((next(prepared),), {}), rounds=rounds)
    benchmark.extra_info["processor us a turn"] = round(1e6 * sorted(spent)[len(spent) // 2])
    benchmark.extra_info["wall us a turn"] = round(1e6 * benchmark.stats.stats.median / clients / per_round)
    print(benchmark.extra_info)


def talk_next(talk: Talk, ends: list[Turn | None], client: int) -> tuple[Turn, Any, int, set[bytes]]:
    line = ends[client]
    turn = talk.next(line, 100)
    ends[client] = turn if len(turn.text) < 20_000 else None
    if line is None:
        return turn, None, 0, set()
    return turn, line.path.state(len(line.text)), len(line.text), {record.id for record in line.records}


@pytest.mark.parametrize("conversations", [10, 1_000, 100_000])
@pytest.mark.parametrize("what", ["hit", "new"])
def test_find_among_conversations(
    benchmark: BenchmarkFixture, loop: asyncio.AbstractEventLoop, store: Store, conversations: int, what: str
) -> None:
    """Conversations share a system prompt of 4,000 characters. A hit continues one that is known; a new one knows nothing."""
    talk = Talk()
    system = text(talk.random, 1_000)
    lengths = random.Random(1)
    turns: list[Turn] = []

    def some() -> Iterator[Turn]:
        for _ in range(conversations):
            turn = talk.next(None, lengths.randrange(5, 100), lengths.randrange(5, 50), start=system)
            if len(turns) < 100:
                turns.append(turn)
            yield turn

    loop.run_until_complete(fill(store, some()))
    turn = turns[len(turns) // 2]
    if what == "hit":
        state, known_from, known = turn.path.state(len(turn.text)), len(turn.text), {r.id for r in turn.records}
        asked = turn.text + text(talk.random, 100)
    else:
        state, known_from, known, asked = None, 0, set[bytes](), system + text(talk.random, 100)

    def find() -> None:
        found = loop.run_until_complete(store.find(Query(TextPath(NS, asked, state), known_from, known)))
        assert not found.cut_off

    benchmark.pedantic(find, rounds=300, warmup_rounds=20)


def test_reload(benchmark: BenchmarkFixture, loop: asyncio.AbstractEventLoop, store: Store) -> None:
    """A conversation of 50 turns and 20,000 tokens at a router that never saw it, among 1,000 others."""
    talk = Talk()

    def conversation(turns: int) -> Iterator[Turn]:
        line: Turn | None = None
        for _ in range(turns):
            line = talk.next(line, 200)
            yield line

    for _ in range(20):
        loop.run_until_complete(fill(store, conversation(50), together=1))
    last = list(conversation(50))
    loop.run_until_complete(fill(store, iter(last), together=1))
    asked = last[-1].text + text(talk.random, 100)

    def find() -> int:
        found = loop.run_until_complete(store.find(Query(TextPath(NS, asked))))
        assert closed(found)
        assert last[-1].reply.id in ids(found)
        return len(found.records)

    assert benchmark.pedantic(find, rounds=50, warmup_rounds=3) == 100


@pytest.mark.parametrize("tokens", [200, 2_000])
def test_bytes(benchmark: BenchmarkFixture, loop: asyncio.AbstractEventLoop, tmp_path: Path, tokens: int) -> None:
    """Bytes on disk of 5,000 turns (500 long ones) in conversations of ten."""
    talk = Talk()
    store = open_store(f"sqlite:{tmp_path}/")
    count = {"turns": 0, "tokens": 0, "text": 0}

    def turns() -> Iterator[Turn]:
        for _ in range(500 if tokens < 1_000 else 50):
            line = None
            for _ in range(10):
                line = talk.next(line, tokens // 2, tokens)
                count["turns"] += 1
                count["tokens"] += sum(record.count for record in line.records)
                count["text"] += sum(len(record.text) for record in line.records)
                yield line

    async def run() -> None:
        await store.open("bench")
        await fill(store, turns())
        await store.close()

    benchmark.pedantic(lambda: loop.run_until_complete(run()), rounds=1)
    size = os.stat(tmp_path / "store.sqlite3").st_size
    benchmark.extra_info["bytes a token, without text"] = round((size - count["text"]) / count["tokens"], 2)
    beyond = (size - count["text"] - 12 * count["tokens"]) / count["turns"]
    benchmark.extra_info["beyond 12 a token and text, a turn"] = round(beyond)
    print(benchmark.extra_info)
    assert beyond < 1_000


SCREENSHOT = 300_000
"""Bytes of the file of a picture."""


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
@pytest.mark.parametrize("forks", ["at the last turn", "anywhere"])
def test_pictures_of_branches(
    benchmark: BenchmarkFixture, loop: asyncio.AbstractEventLoop, tmp_path: Path, kind: str, forks: str
) -> None:
    """Bytes of a session of ten turns with a screenshot in each, and of 1,000 branches of it, beyond those of its records.

    A branch has another text before its screenshots, from the turn on at which it leaves the others: 1,000 or 5,500 turns.
    """
    pictures = [random.Random(number).randbytes(SCREENSHOT) for number in range(10)]
    size = dict[str, int]()

    async def run(what: str) -> int:
        (tmp_path / what).mkdir()
        store, talk = open_store(address_of(kind, tmp_path / what)), Talk()
        await store.open("bench")
        line: list[Turn] = []
        for branch in range(1_001):
            line = line[: 9 if forks == "at the last turn" else branch % 10]
            while len(line) < 10:
                content = pictures[len(line)]
                turn = talk.next(line[-1] if line else None, 30, 60)
                if what != "text":
                    turn = showing(turn, content)
                files = [file_of(content)] if what == "pictures" else []
                await store.append(msgspec.structs.replace(turn.batch, media=files))
                line.append(turn)
        stats = await store.stats()
        if what == "pictures":
            assert stats.media == 10
            assert not [finding async for finding in store.verify()]
        await store.close()
        return stats.bytes

    def all_three() -> None:
        size.update({what: loop.run_until_complete(run(what)) for what in ("text", "spans", "pictures")})

    benchmark.pedantic(all_three, rounds=1)
    more = (size["pictures"] - size["spans"]) / (10 * SCREENSHOT)
    benchmark.extra_info["bytes of the text alone"] = size["text"]
    benchmark.extra_info["with spans of ten pictures"] = size["spans"]
    benchmark.extra_info["with their files, 3,000,000 bytes"] = size["pictures"]
    benchmark.extra_info["what the files cost, times their bytes"] = round(more, 3)
    if kind == "sqlite":
        benchmark.extra_info["file on disk"] = os.stat(tmp_path / "pictures" / "store.sqlite3").st_size
    print(benchmark.extra_info)
    assert more < 1.1
    if forks == "at the last turn":
        assert size["pictures"] - size["text"] < 1.1 * 10 * SCREENSHOT


def file_of(content: bytes) -> MediaFile:
    digest = f"sha256:{sha256(content).hexdigest()}"
    return MediaFile("", digest, "image/png", 1280, 800, True, len(content), content)


def showing(turn: Turn, content: bytes) -> Turn:
    """Return a turn whose context has a picture."""
    assert turn.context is not None
    context = identified(msgspec.structs.replace(turn.context, media=((0, 1, file_of(content).digest),)))
    linked = msgspec.structs.replace(turn.reply, parent=context.id, base=context.id, root=context.root)
    return Turn(linked, context, turn.text)


@pytest.mark.slow
@pytest.mark.parametrize("turns", [10, 1_000_000])
def test_open(benchmark: BenchmarkFixture, loop: asyncio.AbstractEventLoop, tmp_path: Path, turns: int) -> None:
    """Opening a store, and the first look-up in it. The million is two turns and their index entries, copied with other ids."""
    talk = Talk()
    store = open_store(f"sqlite:{tmp_path}/")
    turn = talk.next(None, 100)

    async def make() -> None:
        await store.open("bench")
        await store.append(turn.batch)
        await store.close()

    loop.run_until_complete(make())
    body = encode(turn.reply)
    with closing(connect(tmp_path / "store.sqlite3")) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("PRAGMA cache_size = -500000")
        connection.execute("BEGIN")
        count = f"WITH RECURSIVE n(n) AS (SELECT 3 UNION ALL SELECT n + 1 FROM n WHERE n < {turns})"
        connection.execute(f"{count} INSERT INTO records SELECT n, randomblob(16), n, NULL, NULL, ? FROM n", (body,))
        connection.execute(f"{count} INSERT INTO roots SELECT n, n, '1', 0 FROM n")
        for kind in range(4):
            connection.execute(
                f"{count} INSERT INTO places SELECT randomblob(12), n % 9999, randomblob(8), {kind}, n FROM n"
            )
        connection.execute("COMMIT")

    async def run() -> None:
        store = open_store(f"sqlite:{tmp_path}/")
        await store.open("bench")
        found = await store.find(Query(TextPath(NS, turn.text + " and on")))
        assert len(found.records) == 2
        await store.close()

    benchmark.pedantic(lambda: loop.run_until_complete(run()), rounds=5)
