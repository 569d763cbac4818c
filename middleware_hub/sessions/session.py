"""A session: one message trie, what belongs to it, and what a client may still do with it.

                 generate   complete   finalize   trajectories
    active          yes        yes        yes         yes
    complete        yes        yes        yes         yes        its agent said that it is done
    finalized       409        yes        yes         yes        exported: the same answer again
    aborted         409        409        409         409        deleted, or forgotten after its time to live

Times are `time.monotonic()`, except `created_at`, which is `time.time()`.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Mapping
from typing import Any

from middleware_hub.chat.dialect import Dialect
from middleware_hub.chat.errors import SessionOverError, UnknownSessionError
from middleware_hub.chat.keys import KeyFunction
from middleware_hub.sessions.prompt.composed_prompt import ComposedPrompt
from middleware_hub.sessions.trie.memo import MOST_BODIES, MemoRoom, MessageMemo
from middleware_hub.sessions.trie.nodes import Checkpoint
from middleware_hub.sessions.trie.trie import MessageTrie
from middleware_hub.sessions.turn.exchange import Exchange, RequestKey

MAX_KEPT = 256
"""Exchanges that a session keeps track of, among them replies that did not reach their client and may be sent again."""


class SessionPhase(enum.Enum):
    """See the top of this file."""

    ACTIVE = "active"
    COMPLETE = "complete"
    FINALIZED = "finalized"
    ABORTED = "aborted"


class Act(enum.Enum):
    """What a client may do with a session."""

    GENERATE = "generate"
    COMPLETE = "complete"
    EXPORT = "export"


_ALLOWED: Mapping[Act, frozenset[SessionPhase]] = {
    Act.GENERATE: frozenset({SessionPhase.ACTIVE, SessionPhase.COMPLETE}),
    Act.COMPLETE: frozenset({SessionPhase.ACTIVE, SessionPhase.COMPLETE, SessionPhase.FINALIZED}),
    Act.EXPORT: frozenset({SessionPhase.ACTIVE, SessionPhase.COMPLETE, SessionPhase.FINALIZED}),
}


class Session:
    """See the top of this file.

    Attributes:
        lasting: whether it will be exported: then it keeps everything that a trainer needs, as long as it lives.
        sampling: `sampling_params` for requests that do not set them.
        response_budget: tokens that a branch may have behind its first prompt; None for no limit.
        ttl: seconds without a request after which it is forgotten.
        tokens: the tokens of its samples and of the contexts between them.
        samples: the number of its samples.
    """

    lasting = True
    most_bodies = MOST_BODIES

    def __init__(
        self,
        session_id: str,
        tenant: str,
        key: KeyFunction,
        *,
        ttl: float,
        sampling: dict[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
        response_budget: int | None = None,
    ) -> None:
        self.id = session_id
        self.tenant = tenant
        self.trie = MessageTrie(key)
        self.phase = SessionPhase.ACTIVE
        self.sampling = sampling or {}
        self.metadata = metadata
        self.response_budget = response_budget
        self.ttl = ttl
        self.reward_info: dict[str, Any] = {}
        self.tokens = 0
        self.samples = 0
        self.created_at = time.time()
        self.used = time.monotonic()
        self.exported = False
        self._memos: dict[str, MessageMemo] = {}
        self._done = asyncio.Event()
        self._exchanges: list[Exchange[Any]] = []

    def __repr__(self) -> str:
        return f"<Session {self.id}: {self.phase.value}, {self.trie!r}>"

    def memo(self, dialect: Dialect, room: MemoRoom) -> MessageMemo:
        name = type(dialect).__name__
        found = self._memos.get(name)
        if found is None:
            found = self._memos[name] = MessageMemo(self.trie.key, room, most=self.most_bodies)
        return found

    def require(self, act: Act) -> None:
        """Raise SessionOverError if the client may no longer do this."""
        if self.phase not in _ALLOWED[act]:
            raise SessionOverError(f"session {self.id!r} is {self.phase.value}")

    def touch(self) -> None:
        self.used = time.monotonic()

    def expired(self, now: float) -> bool:
        """Whether its time to live has passed. A generation in flight keeps it alive."""
        return not self.trie.in_flight and now - self.used > self.ttl

    # Exchanges ---------------------------------------------------------------------------------------------------------

    def adopt(self, key: RequestKey) -> Exchange[Any] | None:
        """Return the oldest exchange with this key whose client left before it had the whole reply."""
        return next((exchange for exchange in self._exchanges if exchange.key == key and exchange.adoptable), None)

    def begin(self, exchange: Exchange[Any]) -> None:
        """Keep track of an exchange as long as a client may want its reply."""
        self._exchanges.append(exchange)
        if len(self._exchanges) > MAX_KEPT:
            oldest = next((one for one in self._exchanges if one.over and not one.attached), None)
            if oldest is not None:
                self._forget(oldest)

    def settle(self, exchange: Exchange[Any]) -> None:
        """Forget an exchange that is over or has lost its client, unless a client may still want its reply."""
        open_to_requests = self.phase in _ALLOWED[Act.GENERATE]
        if exchange.over and not exchange.attached and not (open_to_requests and exchange.wanted):
            self._forget(exchange)

    def sweep(self, now: float) -> None:
        for exchange in [one for one in self._exchanges if one.stale(now)]:
            self._forget(exchange)

    def _forget(self, exchange: Exchange[Any]) -> None:
        if exchange in self._exchanges:
            self._exchanges.remove(exchange)
        exchange.release()

    def committed(self, prompt: ComposedPrompt, checkpoint: Checkpoint) -> int:
        """Count a commit; return how many tokens it adds."""
        added = len(checkpoint.span)
        context = prompt.span
        if not context.sampled:
            added += 0 if context.users else len(context)  # several generations of one prompt share it
            context.users += 1
        self.tokens += added
        self.samples += 1
        self.exported = False
        self.touch()
        return added

    # The end -----------------------------------------------------------------------------------------------------------

    def complete(self) -> None:
        """Mark the agent as done. Raises SessionOverError."""
        self.require(Act.COMPLETE)
        if self.phase is SessionPhase.ACTIVE:
            self.phase = SessionPhase.COMPLETE
        self._done.set()

    async def completed(self, seconds: float | None) -> bool:
        """Wait until the agent is done, or the session is over; return whether that happened in time."""
        try:
            async with asyncio.timeout(seconds):
                await self._done.wait()
        except TimeoutError:
            return False
        return True

    async def finalize(self) -> None:
        """Take no more turns. Generations in flight end with an error and are not kept. Raises SessionOverError."""
        self.require(Act.EXPORT)
        if self.phase is not SessionPhase.FINALIZED:
            self.phase = SessionPhase.FINALIZED
            self.trie.close()
            self._done.set()
            await self._end_exchanges()

    async def abort(self) -> None:
        self.phase = SessionPhase.ABORTED
        self.trie.close()
        self._done.set()
        try:
            await self._end_exchanges()
        finally:
            self.trie.clear()
            for memo in self._memos.values():
                memo.clear()
        self.tokens = self.samples = 0

    async def _end_exchanges(self) -> None:
        running = [exchange for exchange in self._exchanges if not exchange.over]
        if running:
            await asyncio.gather(*(exchange.abort() for exchange in running))
        for exchange in list(self._exchanges):
            self.settle(exchange)  # one that has a client is forgotten after its client was answered

    # Reading -----------------------------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        head = self.trie.head
        return {
            "session_id": self.id,
            "phase": self.phase.value,
            "current_head": None if head is None else head.id,
            "num_branches": len(self.trie.checkpoints(terminal=True)),
            "num_inflight_generations": self.trie.in_flight,
            "num_generations": len(self.trie.checkpoints()),
            "nodes": self.trie.nodes,
            "tokens": self.tokens,
            "reward_info": self.reward_info,
            "metadata": self.metadata,
            "created_at": self.created_at,
            "ttl_s": self.ttl,
        }

    def reward(self, info: dict[str, Any], branch: str | None) -> None:
        """Attach a reward to the session, or to one of its branches. Raises UnknownSessionError for an unknown branch."""
        self.require(Act.EXPORT)
        if branch is None:
            self.reward_info = {**self.reward_info, **info}
            return
        checkpoint = self.trie.checkpoint(branch)
        if checkpoint is None:
            raise UnknownSessionError(f"session {self.id!r} has no branch {branch!r}")
        checkpoint.reward = {**(checkpoint.reward or {}), **info}
