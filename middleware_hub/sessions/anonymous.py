"""The memory of chats without a session, which drops the least recently used conversations.

A client that names no session sends its whole conversation and is recognized by it: a trie of messages, as a session has, finds
the turns that were sampled here. It is never exported, so a turn costs its ids and no logprobs. For retrieval, the radix tree
records each of these generations like any other `/generate`.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from middleware_hub.chat.keys import KeyFunction
from middleware_hub.sessions.prompt.composed_prompt import ComposedPrompt
from middleware_hub.sessions.session import Session
from middleware_hub.sessions.trie.nodes import Checkpoint

MOST_BODIES = 32


class AnonymousSession(Session):
    """All conversations of one tenant and namespace that belong to no session.

    Args:
        tenant: the owner of the conversations.
        key: tells when two messages are the same.
        max_tokens: how many tokens it may hold.
    """

    lasting = False
    most_bodies = MOST_BODIES

    def __init__(self, tenant: str, key: KeyFunction, *, max_tokens: int) -> None:
        super().__init__("", tenant, key, ttl=math.inf)
        self._max_tokens = max_tokens
        self._ends: OrderedDict[str, Checkpoint] = OrderedDict()
        """The ends of conversations, least recently used first, and some checkpoints that were continued since."""

    def committed(self, prompt: ComposedPrompt, checkpoint: Checkpoint) -> int:
        """Count a commit and make room; return how many tokens it adds."""
        added = super().committed(prompt, checkpoint)
        if checkpoint.parent is not None:
            self._ends.pop(checkpoint.parent.id, None)
        self._ends[checkpoint.id] = checkpoint
        for _ in range(len(self._ends)):
            if self.tokens <= self._max_tokens:
                break
            self._drop_oldest()
        return added

    def _drop_oldest(self) -> None:
        """Drop the end of the least recently used conversation. The turn before it is the next to go."""
        _, oldest = self._ends.popitem(last=False)
        if oldest.users:
            # A generation in flight continues it. If that fails, it is an end again.
            self._ends[oldest.id] = oldest
            return
        parent, context = oldest.parent, oldest.span.parent
        self.tokens -= len(oldest.span)
        self.samples -= 1
        if context is not None and not context.sampled:
            context.users -= 1
            if not context.users:
                self.tokens -= len(context)
        before = oldest.node.parent
        self.trie.drop(oldest)
        if before is not None and before.contexts is not None and context is not None and not context.users:
            before.contexts = [one for one in before.contexts if one is not context] or None
        if parent is not None and not parent.users:
            self._ends[parent.id] = parent
            self._ends.move_to_end(parent.id, last=False)
