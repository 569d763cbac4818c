"""The conversations of the radix tree, newest last, for each tenant.

The first look reads the tree, in steps. From then on the tree reports each reply that comes or goes, so a later look reads only
what is new. After `IDLE` seconds without a look nothing is kept. Their groups and rewards are in the ledgers, with the entries
of other routers.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from middleware_hub.inspector.conversations.text_conversation import Spell, Standing, TextConversation, name_of
from middleware_hub.radix.node import Generation
from middleware_hub.radix.records import Namespace
from middleware_hub.radix.tree import RadixTree
from middleware_hub.spans.chain import TokenSpan, links
from middleware_hub.trajectories.groups import Groups
from router.errors import RouterError

STEP = 0.002
"""Seconds of the event loop that one step of reading the tree takes."""
MOST_WAITING = 1_000
"""Changes that wait for a look before they are taken in without one."""
IDLE = 600.0
"""Seconds without a look after which nothing is kept."""


class TenantTexts:
    """The conversations of one tenant.

    Attributes:
        order: `(updated, id)` of each, the newest last.
        tokens: the number in all of them; tokens that two of them share count twice.
        changes: grows with every reply that comes or goes.
    """

    def __init__(self, changes: int) -> None:
        self.conversations: dict[TokenSpan, TextConversation] = {}
        self.ids: dict[str, TextConversation] = {}
        self.order: list[tuple[int, str]] = []
        self.tokens = 0
        self.changes = changes

    def moved(self, conversation: TextConversation, before: int) -> None:
        """Move a conversation to the place of its last change."""
        if before:
            at = bisect_left(self.order, (before, conversation.id))
            del self.order[at]
        if len(conversation):
            insort(self.order, (conversation.updated, conversation.id))

    def newest_first(self, before: tuple[int, str] | None) -> Iterator[tuple[tuple[int, str], TextConversation]]:
        """Yield the conversations after a place in the order. Those that change meanwhile are left out."""
        at = len(self.order) if before is None else bisect_left(self.order, before)
        while at:
            key = self.order[at - 1]
            yield key, self.ids[key[1]]
            at = bisect_left(self.order, key)


class Texts:
    """Finds the conversations of the radix tree. See the top of this file.

    Args:
        spell: returns the text of the ids of a prompt.
    """

    def __init__(self, tree: RadixTree, spell: Spell, standing: Standing = lambda *_: None) -> None:
        self._tree = tree
        self._spell = spell
        self._standing = standing
        self._shelves: dict[str, TenantTexts] = {}
        self._of: dict[TokenSpan, TextConversation] = {}
        self._waiting: list[Generation] = []
        self._reading: asyncio.Task[None] | None = None
        self._looked = 0.0
        self._epoch = time.time_ns() // 1_000_000  # so that no number of an earlier process recurs

    async def shelf(self, tenant: str) -> TenantTexts:
        """Return the conversations of a tenant, as they are now."""
        self._looked = time.monotonic()
        if self._reading is None or (self._reading.done() and self._reading.exception() is not None):
            self.forget()
            self._reading = asyncio.create_task(self._read())
        await asyncio.shield(self._reading)
        await self._take_in()
        return self._shelves.get(tenant) or TenantTexts(self._epoch)

    def of(self, generation: Generation) -> TextConversation | None:
        """Return the conversation of a reply."""
        return self._of.get(generation.span)

    def forget(self) -> None:
        """Drop everything until the next look."""
        self._tree.watcher = None
        if self._reading is not None:
            self._reading.cancel()
        self._reading = None
        self._epoch = max([self._epoch, *(one.changes for one in self._shelves.values())]) + 1
        self._shelves, self._of, self._waiting = {}, {}, []

    async def _read(self) -> None:
        self._tree.watcher = self._note
        until = time.perf_counter() + STEP
        for generation in self._tree.each_generation():
            if generation is not None:
                self._put(generation)
            if time.perf_counter() > until:
                await asyncio.sleep(0)
                until = time.perf_counter() + STEP

    def _note(self, generation: Generation) -> None:
        self._waiting.append(generation)
        if len(self._waiting) == MOST_WAITING:
            if time.monotonic() - self._looked > IDLE:
                self.forget()
            else:
                asyncio.get_running_loop().call_soon(self._take_in_now)

    def _take_in_now(self) -> None:
        waiting, self._waiting = self._waiting, []
        for generation in waiting:
            self._put(generation)

    async def _take_in(self) -> None:
        while self._waiting:
            some = self._waiting[:MOST_WAITING]
            del self._waiting[:MOST_WAITING]
            for generation in some:
                self._put(generation)
            if self._waiting:
                await asyncio.sleep(0)

    def _put(self, generation: Generation) -> None:
        """Note that a reply came or went."""
        span = generation.span
        there = span.owner is generation
        conversation = self._of.get(span)
        if there is (conversation is not None):
            return
        if conversation is None:
            conversation = self._conversation_of(generation)
            before, tokens = conversation.updated if len(conversation) else 0, conversation.tokens
            conversation.add(generation)
            self._of[span] = conversation
        else:
            before, tokens = conversation.updated, conversation.tokens
            conversation.remove(generation)
            del self._of[span]
        shelf = self._shelves[generation.namespace[0]]
        shelf.moved(conversation, before)
        shelf.tokens += conversation.tokens - tokens
        shelf.changes += 1
        if not len(conversation):
            del shelf.conversations[conversation.first]
            del shelf.ids[conversation.id]

    def _conversation_of(self, generation: Generation) -> TextConversation:
        span, first = generation.span, generation.span
        for part, _ in links(span.parent, span.take):
            if part.sampled:
                known = self._of.get(part)
                if known is not None:
                    return known
                first = part
        shelf = self._shelves.setdefault(generation.namespace[0], TenantTexts(self._epoch))
        found = shelf.conversations.get(first)
        if found is None:
            owner = first.owner if isinstance(first.owner, Generation) else generation
            name = name_of(owner, frozenset())
            if f"text:{name}" in shelf.ids:
                name = f"{name}~{owner.serial}"
            found = shelf.conversations[first] = TextConversation(
                first, generation.namespace, name, self._spell, self._standing
            )
            shelf.ids[found.id] = found
        return found


MOST_NAMESPACES: Final = 64
"""Namespaces of a tenant whose ledgers are read for one look."""
PATIENCE: Final = 0.1
"""Seconds that a look waits for the store. What comes later is in the next look."""


class Standings:
    """Reads the new events of a tenant's ledgers, one ledger after the other.

    Args:
        known: returns the namespaces of the texts that are remembered.
    """

    def __init__(self, ledgers: Groups, known: Callable[[], Iterable[Namespace]]) -> None:
        self._ledgers = ledgers
        self._known = known
        self._reading: dict[str, asyncio.Task[None]] = {}

    async def look(self, tenant: str) -> int:
        """Read on, for as long as a look may take; return a number that changes with every group and reward."""
        reading = self._reading.get(tenant)
        if reading is None:
            reading = self._reading[tenant] = asyncio.create_task(self._read(tenant))
        await asyncio.wait([reading], timeout=PATIENCE)
        return self._ledgers.events(tenant)

    async def _read(self, tenant: str) -> None:
        names = sorted({place[2] for place in self._known() if place[0] == tenant})
        try:
            await self._ledgers.read_on(tenant, names[:MOST_NAMESPACES])
        except RouterError:
            pass  # the store is away, which is reported elsewhere: the known groups stay
        finally:
            del self._reading[tenant]
