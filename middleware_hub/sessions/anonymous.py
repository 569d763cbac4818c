"""Chats without a session: recognized by their messages, as in a session.

All conversations of one tenant and namespace share a memory, which drops the least recently used ones. It is never exported, so
a turn costs its ids and no logprobs: for retrieval, the radix tree records each of these generations like any other
`/generate`. With a store, a note beside each record brings the conversation back, here and at other routers (`log.chat_notes`).
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial

from middleware_hub.chat.keys import KeyFunction, canonical
from middleware_hub.sessions.log.chat_notes import ChatNotes
from middleware_hub.sessions.session import Session
from middleware_hub.sessions.trie.nodes import Checkpoint
from middleware_hub.sessions.trie.trie import MessageTrie
from middleware_hub.store.protocol import Refill

SHARE = 8
"""Chats without a session may hold this fraction of what sessions may, for each tenant and namespace."""
MOST_BODIES = 32
"""How many bodies a memory of chats remembers."""
MOST_NAMESPACES = 64
"""How many namespaces have a memory of their own."""

Committed = Callable[[Checkpoint], object]
"""Called with each turn that another process sampled."""


class AnonymousSession(Session):
    """All conversations of one tenant and namespace that belong to no session.

    Args:
        notes: makes what keeps them in a store; None without a store.
        max_tokens: how many tokens they may hold.
    """

    lasting = False
    most_bodies = MOST_BODIES
    notes: ChatNotes | None = None

    def __init__(
        self,
        tenant: str,
        key: KeyFunction,
        notes: Callable[[MessageTrie, Committed], ChatNotes] | None = None,
        *,
        max_tokens: int,
    ) -> None:
        super().__init__("", tenant, key, ttl=math.inf)
        if notes is not None:
            self.notes = notes(self.trie, self.restored)
        self._max_tokens = max_tokens
        self._ends: OrderedDict[str, Checkpoint] = OrderedDict()
        """The ends of conversations, least recently used first, and some checkpoints that were continued since."""

    def committed(self, checkpoint: Checkpoint) -> int:
        """Count a commit and make room; return how many tokens the commit adds."""
        added = self.restored(checkpoint)
        self.make_room()
        return added

    def make_room(self) -> None:
        """Drop the ends of conversations, least recently used first, as long as they hold too much."""
        used = 0
        while self.tokens > self._max_tokens and used < len(self._ends):
            used += not self._drop_oldest()

    def restored(self, checkpoint: Checkpoint) -> int:
        """Count a turn that another process sampled. Room is made after the turn that needs it, or before the next request."""
        added = super().committed(checkpoint)
        if checkpoint.parent is not None:
            self._ends.pop(checkpoint.parent.id, None)
        self._ends[checkpoint.id] = checkpoint
        return added

    def _drop_oldest(self) -> bool:
        """Drop the end of the least recently used conversation, unless it is used. The turn before it is the next to go."""
        _, oldest = self._ends.popitem(last=False)
        if self.notes is not None:
            self.notes.whole = False
        if oldest.users:
            # A generation in flight continues it. If that fails, it is an end again.
            self._ends[oldest.id] = oldest
            return False
        parent, context = oldest.parent, oldest.span.parent
        self.tokens -= len(oldest.span)
        self.samples -= 1
        if context is not None and not context.sampled:
            context.users -= 1
            if not context.users:
                self.tokens -= len(context)
        before = oldest.node.parent
        if self.prompts is not None:
            self.prompts.forget((oldest,))
        self.trie.drop(oldest)
        if before is not None and before.contexts is not None and context is not None and not context.users:
            before.contexts = [one for one in before.contexts if one is not context] or None
        if parent is not None and not parent.users:
            self._ends[parent.id] = parent
            self._ends.move_to_end(parent.id, last=False)
        return True


class OpenChats:
    """The chats without a session, of all tenants and namespaces. Those of the least recently used namespace are dropped.

    Args:
        notes: makes what keeps the chats of a tenant and a namespace in a store; None without a store.
        max_tokens: how many tokens sessions may hold.
    """

    def __init__(
        self,
        key: KeyFunction = canonical,
        notes: Callable[[str, str, MessageTrie, Committed], ChatNotes] | None = None,
        *,
        max_tokens: int,
    ) -> None:
        self._key = key
        self._notes = notes
        self._max_tokens = max_tokens // SHARE
        self._found: dict[tuple[str, str], AnonymousSession] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._dropped = False

    def __iter__(self) -> Iterator[AnonymousSession]:
        return iter(self._found.values())

    def of(self, tenant: str, namespace: str) -> AnonymousSession:
        """Return the chats of a tenant and a namespace, with room for the turns of a request."""
        found = self._found.pop((tenant, namespace), None)
        if found is None:
            if len(self._found) >= MOST_NAMESPACES:
                # Clients choose the namespaces, so their number must be bounded.
                self._drop(self._found.pop(next(iter(self._found))))
            notes = None if self._notes is None else partial(self._notes, tenant, namespace)
            found = AnonymousSession(tenant, self._key, notes, max_tokens=self._max_tokens)
            if found.notes is not None:
                found.notes.whole = not self._dropped  # it may have been there before
        found.make_room()  # a request that commits nothing may have brought turns: it failed, or counted tokens
        self._found[tenant, namespace] = found
        return found

    async def refill(self, store: Refill) -> None:
        """Note again what a store has lost and this process knows of all chats. Raises StoreUnreachableError."""
        for session in list(self):
            if session.notes is not None:
                await session.notes.refill(store)

    def _drop(self, session: AnonymousSession) -> None:
        self._dropped = True
        task = asyncio.get_running_loop().create_task(session.abort())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
