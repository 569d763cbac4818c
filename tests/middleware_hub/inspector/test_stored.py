"""Sessions of the store are read for a look, and what they took of the memory is given back once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from middleware_hub.inspector.conversations.sessions import SessionConversation, StoredSessions
from middleware_hub.sessions.request_defaults import RequestDefaults
from middleware_hub.sessions.trie.trie import MessageTrie
from middleware_hub.store.errors import DamagedRecordError


class Kept:
    """A session, and how it looks as a conversation."""

    id = "session:a"
    updated = 1
    tokens = 7

    def __init__(self) -> None:
        self.ended = False

    async def abort(self) -> None:
        self.ended = True

    def summary(self) -> dict[str, Any]:
        return {}

    def branches(self) -> Iterator[Any]:
        return iter(())


class Archive:
    """Two sessions in the store. The first one cannot be read."""

    events = 1

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def listed(self, tenant: str) -> AsyncIterator[tuple[str, int]]:
        yield "0", 1
        yield "a", self.events

    async def find(self, tenant: str, session_id: str) -> Any:
        if session_id == "0":
            raise DamagedRecordError("it cannot be read whole")
        self._registry.read.append(Kept())
        self._registry.tokens += Kept.tokens
        return self._registry.read[-1]


class Registry:
    """The session may be in memory, too."""

    def __init__(self) -> None:
        self.archive = Archive(self)
        self.tokens = 0
        self.held: Any = None
        self.read: list[Kept] = []

    def find(self, tenant: str, session_id: str) -> Any:
        return self.held if session_id == "a" else None


def test_what_was_read_is_given_back_and_what_others_use_is_left_alone() -> None:
    async def work() -> None:
        registry = Registry()
        describe: Any = lambda session: session  # noqa: E731
        stored = StoredSessions(registry, describe)
        while not (await stored.of("t"))[0]:
            pass
        (one,), _ = await stored.of("t")
        async with one.opened() as opened:
            assert opened == registry.read[-1]
            assert registry.tokens == Kept.tokens
        assert registry.tokens == 0
        assert registry.read[-1].ended
        registry.held = used = Kept()
        async with one.opened() as opened:
            assert opened == used
            registry.held = None  # it leaves the memory, as sessions do
        assert registry.tokens == 0
        assert not used.ended

    asyncio.run(work())


def test_a_session_is_read_again_when_it_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("middleware_hub.inspector.conversations.sessions.AGAIN", -1.0)

    async def work() -> None:
        registry = Registry()
        describe: Any = lambda session: session  # noqa: E731
        stored = StoredSessions(registry, describe)
        for events, reads in ((1, 1), (1, 1), (2, 2)):
            registry.archive.events = events
            for _ in range(3):  # each look reads the list once more
                await stored.of("t")
            assert len(registry.read) == reads

    asyncio.run(work())


def test_a_session_of_which_turns_cannot_be_read_says_so() -> None:
    session: Any = SimpleNamespace(
        id="a",
        trie=MessageTrie(),
        stale=True,
        lost=0,
        metadata=None,
        reward_info={},
        defaults=RequestDefaults(lora_path="a"),
        created_at=1.0,
        phase=SimpleNamespace(value="open"),
    )
    summary = SessionConversation(session).summary()
    assert (summary["exact"], summary["reasons"]) == (False, ["store_unreachable"])
    assert summary["adapter"] == "a"
