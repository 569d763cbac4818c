"""Requests that are open at once: each is matched when it begins, and recorded when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from middleware_hub.radix.match import PrefixMatch
from tests.middleware_hub.persistence.lives import Ask, Life, Lives


@dataclass(frozen=True, eq=False)
class Open:
    """A request that has begun: its match in the life that never ends, and in that of this number."""

    ask: Ask
    number: int
    life: Life
    expected: PrefixMatch
    found: PrefixMatch


async def begin(lives: Lives, number: int, ask: Ask) -> Open:
    """Begin a request. What is recorded before it ends is not in its prompt."""
    life = lives.lives[number % lives.count]
    return Open(ask, number % lives.count, life, await lives.one.match(ask), await life.match(ask))


async def end(lives: Lives, some: Sequence[Open]) -> list[str]:
    """End requests at one moment, recorded in this order, and return their whole texts.

    All are of the current version: another router may not have heard of a newer one yet.
    """
    version = lives.one.tree.clock.current
    asks = [one.ask if version is None else replace(one.ask, version=version) for one in some]
    expected = [await lives.one.answer(ask, one.expected) for ask, one in zip(asks, some, strict=True)]
    found = await asyncio.gather(*(one.life.answer(ask, one.found) for ask, one in zip(asks, some, strict=True)))
    for its, other in zip(found, expected, strict=True):
        assert {**its, "version": None} == {**other, "version": None}
    return [str(one["text"]) for one in found]


def drop(lives: Lives, one: Open) -> None:
    """End a request without a reply: its router was killed."""
    lives.one.tree.unpin(one.expected)
    one.life.tree.unpin(one.found)
