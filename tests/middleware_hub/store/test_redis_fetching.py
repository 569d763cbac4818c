"""Records that are fetched in rounds, while others forget them, and records that are stored under another id."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from middleware_hub.store.protocol import Found
from middleware_hub.store.records import Mark, encode
from middleware_hub.store.redis.connection import Command
from middleware_hub.store.redis.keys import Keys
from middleware_hub.store.redis.preparing import pack_mark
from middleware_hub.store.redis.searching import Fetch
from tests.middleware_hub.store.world import Turn, World

KEYS = Keys("t:")


class Server:
    """The hashes of conversations, as a server answers for them."""

    def __init__(self, *turns: Turn) -> None:
        self.hashes: dict[bytes, dict[bytes | str, bytes]] = {}
        self.rounds = 0
        self.forgotten: dict[int, bytes] = {}
        """Roots that are forgotten before a round."""
        for turn in turns:
            for record in turn.records:
                there = self.hashes.setdefault(KEYS.root(record.root), {"m": pack_mark(Mark(record.root, 1, "1"))})
                there[record.id] = encode(record)

    async def ask(self, commands: Sequence[Command]) -> list[Any]:
        self.rounds += 1
        self.hashes.pop(KEYS.root(self.forgotten.get(self.rounds, b"")), None)
        return [
            [self.hashes.get(key, {}).get(field) for field in fields]  # type: ignore[call-overload,misc]
            for _, key, *fields in commands
        ]


def fetched(server: Server, *turns: Turn) -> tuple[Found, Fetch]:
    fetch = Fetch(server.ask, KEYS, ())
    return asyncio.run(fetch.run([(turn.reply.root, turn.reply.id) for turn in turns])), fetch


def test_a_conversation_that_is_forgotten_between_two_rounds_is_gone_and_not_damaged() -> None:
    world = World()
    first = world.turn(None, "a", "b")
    second, other = world.turn(first, "c", "d"), world.turn(None, "e", "f")
    whole, fetch = fetched(Server(first, second, other), second, other)
    assert [record.id for record in whole.records] == [
        one.id for turn in (first, second, other) for one in turn.records
    ]
    assert not fetch.lacking
    server = Server(first, second, other)
    server.forgotten = {2: first.reply.root}
    found, fetch = fetched(server, second, other)
    assert (found.records, found.damaged) == (other.records, 0)
    assert found.marks.keys() == {other.reply.root}
    assert fetch.lacking


def test_a_record_that_is_stored_under_another_id_is_damaged(caplog: pytest.LogCaptureFixture) -> None:
    """It would be continued under the name of another reply."""
    world = World()
    first = world.turn(None, "a", "b")
    second = world.turn(first, "c", "d")
    server = Server(first, second)
    held = server.hashes[KEYS.root(first.reply.root)]
    held[second.reply.id] = held[first.reply.id]
    found, _ = fetched(server, second)
    assert (found.records, found.damaged) == ([], 1)
    assert f"record {first.reply.id.hex()} is stored as {second.reply.id.hex()}" in caplog.text
