"""A session: its message trie, its state, and the calls that its phase allows.

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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from middleware_hub.chat.dialect import Dialect
from middleware_hub.chat.errors import SessionOverError, UnknownSessionError
from middleware_hub.chat.keys import NAMED, KeyFunction
from middleware_hub.media.shelf import Shelf
from middleware_hub.sessions import events
from middleware_hub.sessions.exchange import ClientState, Exchange, RequestKey
from middleware_hub.sessions.prompt.composed_prompt import PromptIdsCache
from middleware_hub.sessions.request_defaults import NO_DEFAULTS, RequestDefaults
from middleware_hub.sessions.trie.memo import MOST_BODIES, MemoRoom, MessageMemo
from middleware_hub.sessions.trie.nodes import Checkpoint
from middleware_hub.sessions.trie.trie import MessageTrie, TrieClosedError

MAX_KEPT = 256
"""Exchanges that a session tracks; some are replies that did not reach their client and may be sent again."""
LOOK_SECONDS = 0.25
"""How often a call that waits for an agent checks whether another router has been told that it is done."""


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


_GENERATING = (SessionPhase.ACTIVE, SessionPhase.COMPLETE)
_ALLOWED: Mapping[Act, Sequence[SessionPhase]] = {
    Act.GENERATE: _GENERATING,
    Act.COMPLETE: (*_GENERATING, SessionPhase.FINALIZED),
    Act.EXPORT: (*_GENERATING, SessionPhase.FINALIZED),
}
"""Tuples, because CPython 3.11 takes a call in Python for the hash of a phase."""


class Session:
    """See the top of this file.

    Attributes:
        lasting: whether it will be exported: then it keeps everything that a trainer needs until it ends.
        group: the id of its group, and the namespace of that.
        defaults: what completes its requests.
        key_digest: of the key that names it; empty if no key does.
        response_budget: tokens that a branch may have after its first prompt; None for no limit.
        ttl: seconds without a request after which it is forgotten.
        log: where it is kept beyond this process; None if it is not.
        notes: where chats without a session are kept beyond this process; None for a session, and if they are not.
        tokens: the tokens of its samples and of the contexts between them.
        samples: the number of its samples.
        visitors: the number of requests that use it: it is not dropped meanwhile.
        orphans: exchanges whose client has left, as long as another client may want the reply.
        lost: generations that were answered and whose tokens are not here: the store has lost them, which only the router that
            answered knows, or the worker's reply contradicted itself, which is in the log.
        prompts: where the ids of its prompts are kept, until it ends; None before its first turn here.
    """

    lasting = True
    group: tuple[str, str] | None = None
    most_bodies = MOST_BODIES
    notes: events.TurnNotes | None = None

    def __init__(
        self,
        session_id: str,
        tenant: str,
        key: KeyFunction,
        *,
        ttl: float,
        defaults: RequestDefaults = NO_DEFAULTS,
        metadata: dict[str, Any] | None = None,
        response_budget: int | None = None,
        key_digest: bytes = b"",
    ) -> None:
        self.id = session_id
        self.tenant = tenant
        self.trie = MessageTrie(NAMED[defaults.match] if defaults.match else key)
        self.phase = SessionPhase.ACTIVE
        self.defaults = defaults
        self.metadata = metadata
        self.response_budget = response_budget
        self.key_digest = key_digest
        self.ttl = ttl
        self.reward_info: dict[str, Any] = {}
        self.tokens = self.samples = 0
        self.created_at = time.time()
        self.used = time.monotonic()
        self.exported = False
        self.log: events.SessionLog | None = None
        self.visitors = 0
        self.lost: tuple[str, ...] = ()
        self.prompts: PromptIdsCache | None = None
        self._finalizing = False
        self._memos: dict[str, MessageMemo] = {}
        self._done = asyncio.Event()
        self._exchanges: list[Exchange[Any]] = []
        self.orphans: set[Exchange[Any]] = set()
        self._pictures: set[str] = set()
        self._shelf: Shelf | None = None

    def __repr__(self) -> str:
        return f"<Session {self.id}: {self.phase.value}, {self.trie!r}>"

    def memo(self, dialect: Dialect, room: MemoRoom) -> MessageMemo:
        name = type(dialect).__name__
        if (found := self._memos.get(name)) is None:
            found = self._memos[name] = MessageMemo(self.trie.key, room, self.trie, most=self.most_bodies)
        return found

    @property
    def over(self) -> bool:
        """Whether it was deleted or forgotten."""
        return self.phase is SessionPhase.ABORTED

    @property
    def stale(self) -> bool:
        """Whether another router may have continued it while the store is unreachable."""
        return self.log is not None and self.log.stale

    def require(self, act: Act) -> None:
        """Raise SessionOverError if the client may no longer do this."""
        if self.phase not in _ALLOWED[act]:
            raise SessionOverError(f"session {self.id!r} is {self.phase.value}: POST /sessions makes a new one")

    def touch(self) -> None:
        self.used = time.monotonic()
        if self.log is not None:
            self.log.touched()

    @property
    def idle(self) -> bool:
        """Whether this process may drop it: no request, no generation and no reply kept for a resend needs it."""
        return self.stored and not self._exchanges

    @property
    def stored(self) -> bool:
        """Whether replies kept for a resend are all that only this process has of it: the rest can be read again."""
        busy = self.visitors or self.trie.in_flight or not all(one.over for one in self._exchanges)
        return not busy and (self.log is None or self.log.settled)

    def expired(self, now: float) -> bool:
        """Whether its time to live has passed. A generation in flight keeps it alive, and so does a request."""
        return not self.trie.in_flight and not self.visitors and now - self.used > self.ttl

    # Exchanges ---------------------------------------------------------------------------------------------------------

    def adopt(self, key: RequestKey) -> Exchange[Any] | None:
        """Return the oldest exchange with this key whose client left before it had the whole reply."""
        return next((exchange for exchange in self._exchanges if exchange.key == key and exchange.adoptable), None)

    def begin(self, exchange: Exchange[Any]) -> None:
        """Keep track of an exchange as long as a client may want its reply."""
        self._exchanges.append(exchange)
        if len(self._exchanges) > MAX_KEPT:
            oldest = next((one for one in self._exchanges if one.over and one.client is not ClientState.READING), None)
            if oldest is not None:
                self._forget(oldest)

    def leave_replies(self) -> list[Exchange[Any]]:
        """Return the exchanges, and let go of them: they go on in the same session, read again."""
        replies, self._exchanges = self._exchanges, []
        return replies

    def settle(self, exchange: Exchange[Any]) -> None:
        """Forget an exchange that is over or has lost its client, unless a client may still want its reply."""
        if exchange.client is ClientState.READING or not exchange.over:
            return
        if self.phase not in _GENERATING or not exchange.adoptable:
            self._forget(exchange)

    def sweep(self, now: float) -> None:
        for exchange in [one for one in self._exchanges if one.stale(now)]:
            self._forget(exchange)

    def _forget(self, exchange: Exchange[Any]) -> None:
        if exchange in self._exchanges:
            self._exchanges.remove(exchange)
        self.orphans.discard(exchange)
        exchange.release()

    def committed(self, checkpoint: Checkpoint) -> int:
        """Count a commit; return how many tokens it adds."""
        added = checkpoint.span.count
        context = checkpoint.span.parent
        if context is not None and context.versions is None:
            added += 0 if context.users else context.count  # several generations of one prompt share it
            context.users += 1
        self.tokens += added
        self.samples += 1
        self.exported = False
        self.used = time.monotonic()  # its log has the time of the turn, also where another router's is replayed here
        return added

    # Events ------------------------------------------------------------------------------------------------------------

    async def happen(self, event: events.AnyEvent) -> bool:
        """Apply an event to this session; if it has a log, append the event there first.

        Returns whether it is in the store, if it has to be. Raises SessionOverError and UnknownSessionError if the event is not
        allowed: then nothing has changed.
        """
        self.check(event)
        if self.log is not None:
            return await self.log.append(event)
        self.apply(event)
        return True

    def check(self, event: events.AnyEvent) -> None:
        """Raise SessionOverError, or UnknownSessionError for an unknown branch, if this event is not allowed (any more)."""
        match event:
            case events.Completed():
                self.require(Act.COMPLETE)
            case events.SessionRewarded(branch=branch):
                self.require(Act.EXPORT)
                if branch is not None and self.trie.checkpoint(branch) is None:
                    raise UnknownSessionError(f"session {self.id!r} has no branch {branch!r}")
            case events.TurnCommitted():
                if self.trie.closed:
                    raise TrieClosedError
            case _:
                self.require(Act.EXPORT)

    def needs(self, event: events.AnyEvent) -> bool:
        """Whether an event would change anything."""
        match event:
            case events.Completed():
                return self.phase is SessionPhase.ACTIVE
            case events.Finalized():
                return self.phase is not SessionPhase.FINALIZED
        return True

    def apply(self, event: events.AnyEvent) -> None:
        """Apply an event other than a turn, which `check` has allowed."""
        match event:
            case events.SessionRewarded(info=info, branch=branch):
                self._reward(events.object_of(info), branch)
            case events.BranchEnded(generation=generation):
                checkpoint = self.trie.checkpoint(generation)
                if checkpoint is not None:
                    checkpoint.finish = "length"
            case events.Completed():
                if self.phase is SessionPhase.ACTIVE:
                    self.phase = SessionPhase.COMPLETE
                self._done.set()
            case events.Touched(lost=str(generation)):
                self.lost = tuple(dict.fromkeys((*self.lost, generation)))
            case events.Exported(samples=samples):
                # A turn that was committed meanwhile has not been exported.
                self.exported = self.samples == samples
            case events.Finalized() | events.SessionEnded():
                self.phase = SessionPhase.FINALIZED if isinstance(event, events.Finalized) else SessionPhase.ABORTED
                self.trie.close()
                self._done.set()

    def _reward(self, info: dict[str, Any], branch: str | None) -> None:
        checkpoint = None if branch is None else self.trie.checkpoint(branch)
        if checkpoint is not None:
            checkpoint.reward = {**(checkpoint.reward or {}), **info}
        elif branch is None:
            self.reward_info = {**self.reward_info, **info}

    # The end -----------------------------------------------------------------------------------------------------------

    async def completed(self, seconds: float | None) -> bool:
        """Wait until the agent is done, or the session is over; return whether that happened in time."""
        until = None if seconds is None else time.monotonic() + seconds
        while True:
            left = None if until is None else max(0.0, until - time.monotonic())
            step = left if self.log is None else min(LOOK_SECONDS, LOOK_SECONDS if left is None else left)
            try:
                async with asyncio.timeout(step):
                    await self._done.wait()
                return True
            except TimeoutError:
                if self.log is None:
                    return False
            await self.log.read_on()
            if left is not None and left <= LOOK_SECONDS:
                return self._done.is_set()

    async def finalize(self) -> bool:
        """Take no more turns; return whether this call ended them. Generations in flight end with an error and are not kept.

        Raises SessionOverError.
        """
        self.require(Act.EXPORT)
        first = self.phase is not SessionPhase.FINALIZED and not self._finalizing
        self._finalizing = True
        try:
            await self.happen(events.Finalized(time=time.time()))
        finally:
            self._finalizing = False  # if the store has refused the end, the next call is the first
        await self.end_exchanges()
        return first

    async def abort(self) -> None:
        self.apply(events.SessionEnded(time=time.time(), why="aborted"))
        try:
            await self.end_exchanges()
        finally:
            if self.prompts is not None:
                self.prompts.forget(self.trie.checkpoints())
            self.trie.clear()
            self._need_no_pictures()
            for memo in self._memos.values():
                memo.clear()
        self.tokens = self.samples = 0

    def need(self, shelf: Shelf, digests: Iterable[str]) -> None:
        """Name pictures on the shelf until the session ends: others go first."""
        self._shelf = shelf
        for digest in digests:
            if digest not in self._pictures:
                self._pictures.add(digest)
                shelf.use(digest)

    def _need_no_pictures(self) -> None:
        if self._shelf is not None:
            for digest in self._pictures:
                self._shelf.free(digest)
            self._pictures.clear()

    async def end_exchanges(self) -> None:
        running = [exchange for exchange in self._exchanges if not exchange.over]
        if running:
            await asyncio.gather(*(exchange.abort() for exchange in running))
        for exchange in list(self._exchanges):
            self.settle(exchange)  # an exchange with a client is forgotten after that client was answered

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
            **msgspec.to_builtins(self.defaults),
            "created_at": self.created_at,
            "ttl_s": self.ttl,
            **({} if self.response_budget is None else {"response_budget": self.response_budget}),
            **({"group_id": self.group[0]} if self.group else {}),
            **({"lost_turns": self.lost} if self.lost else {}),
        }
