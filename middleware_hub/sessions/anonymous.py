"""What clients without a session talk about: a memory of their turns, from which the least recently used go.

A client that says nothing about itself sends its whole conversation, and is recognized by it: the same trie of messages that a
session has finds the turns that were sampled here. Nobody exports it, so a turn costs its ids and no logprobs; what is to be
retrieved is in the radix tree, where every one of these generations is recorded as any other `/generate` is.
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
        tenant: whose they are.
        key: when two messages are the same one.
        max_tokens: that may be held.
    """

    lasting = False
    most_bodies = MOST_BODIES

    def __init__(self, tenant: str, key: KeyFunction, *, max_tokens: int) -> None:
        super().__init__("", tenant, key, ttl=math.inf)
        self._max_tokens = max_tokens
        self._ends: OrderedDict[str, Checkpoint] = OrderedDict()
        """Where conversations end, the least recently used first; and some that have gone on since."""

    def committed(self, prompt: ComposedPrompt, checkpoint: Checkpoint) -> int:
        """Count what a commit adds, and make room."""
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
        """The end of the least recently used conversation; what was before it is the next one to go."""
        _, oldest = self._ends.popitem(last=False)
        if oldest.users:
            # Something goes on from it. If that comes to nothing it is an end again.
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
