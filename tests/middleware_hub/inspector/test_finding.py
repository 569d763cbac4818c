"""The list of conversations is in order, and a long one is made in steps."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from middleware_hub.inspector import finding
from middleware_hub.inspector.finding import SORTED, ConversationFilter, Key, find

COUNT = 4 * SORTED + 1


@dataclass
class Listed:
    """A session as far as the list needs it."""

    id: str
    updated: int
    opened = None

    def summary(self) -> dict[str, Any]:
        return {"id": self.id}


def wanted(cursor: Key | None = None, limit: int = 500) -> ConversationFilter:
    return ConversationFilter(limit, cursor, None, None, None, None, ())


def sessions() -> list[Any]:
    return [Listed(f"session:{number}", 7919 * number % 50) for number in range(COUNT)]


def test_pages_have_all_sessions_newest_first() -> None:
    async def read() -> list[str]:
        found, cursor = await find(wanted(), lambda _: [], sessions(), None)  # type: ignore[arg-type]
        while cursor is not None:
            moment, _, name = cursor.partition("~")
            page, cursor = await find(wanted((int(moment), name)), lambda _: [], sessions(), None)  # type: ignore[arg-type]
            found += page
        return [one["id"] for one in found]

    told = sorted(((one.updated, one.id) for one in sessions()), reverse=True)
    assert asyncio.run(read()) == [name for _, name in told]


def test_a_search_that_takes_long_answers_with_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """And with a cursor: a call always comes on by one conversation at least."""
    monkeypatch.setattr(finding, "SEARCH_SECONDS", -1.0)

    async def read() -> list[str]:
        found: list[str] = []
        cursor: Key | None = None
        while True:
            page, following = await find(wanted(cursor), lambda _: [], sessions()[:5], None)  # type: ignore[arg-type]
            assert len(page) == 1
            found.append(page[0]["id"])
            if following is None:
                return found
            moment, _, name = following.partition("~")
            cursor = int(moment), name

    assert sorted(asyncio.run(read())) == [f"session:{number}" for number in range(5)]


def test_other_requests_are_served_while_sessions_are_put_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "STEP", -1.0)  # each step has taken long enough

    async def work() -> int:
        served, over = 0, False

        async def serve() -> None:
            nonlocal served
            while not over:
                served += 1
                await asyncio.sleep(0)

        other = asyncio.create_task(serve())
        await asyncio.sleep(0)
        assert len((await find(wanted(limit=1), lambda _: [], sessions(), None))[0]) == 1  # type: ignore[arg-type]
        over = True
        await other
        return served

    assert asyncio.run(work()) > COUNT // SORTED
