"""Where most of the prompt is cached already, as far as the load allows.

What a worker was given is what it has cached: a tree of prompts remembers that, one of ids and one of texts. A prompt then
goes where its longest known beginning went. Taken literally that rule ruins a run in which all prompts begin alike: whoever was
first has the system prompt, so everybody is sent there. Three things stand against it:

- A beginning only speaks for a worker if others lack it. What more than half of the fleet holds is everybody's, and shares are
  those of the rest: of a prompt behind its system prompt.
- A prompt that continues a conversation stays, whatever share of it is known (`remembered_prompts`). Replies that pass through
  the router are remembered behind their prompts, so that samples of one prompt are told apart.
- A worker that was given too much lately gets no new conversations for the cache's sake; and if it has too much in flight as
  well, no further turns of old ones.

Workers that publish what they have cached are believed rather than the tree, which does not know what they had to give up.

Nobody learns from a decision what others have sent: each tenant's prompts stand in the trees behind a beginning of their own.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import AnyStr

import blake3
import msgspec

from router.config import CacheAwareConfig
from router.kv_cache.index import KvIndex
from router.policies.base import ENOUGH_CHARACTERS, ENOUGH_IDS, Decision, RouteQuery
from router.policies.recent_work import RecentWork
from router.prefix_tree.remembered_prompts import COMMON, Known, RememberedPrompts
from router.prefix_tree.snapshot import SnapshotError
from router.prefix_tree.tree import ExactTokenTree, Key, StringTree, Walk
from router.workers.worker import Worker

_SLIP_IDS = 48
_SLIP_CHARACTERS = 160
"""Of the end of a prompt, that its history may drop: a generation prompt, an open thought. Where that much of a prompt is not
everybody's, it is no chance."""

_SALT = 16
"""Units that the prompts of a tenant begin with in a tree."""

_BOUND = 1.15
"""Times the mean of what was routed lately. The bound of a run is 1.25, and one request may be long."""

_SLACK = 4
"""Requests in flight that a worker may have more than the least loaded one, whatever was routed lately."""

_FEW = 2
"""Prompts that a worker may have been given more than the mean: it takes some for a mean to mean something."""

_MANY = 16
"""The same for turns of conversations that it has: a group of samples that all come back at once is no lack of balance."""

_HALF_LIFE = 2048.0
"""Decisions after which what was routed counts half."""

_AT_ONCE = 1 << 13
"""Units of a worker that is gone which are forgotten without letting anybody else have a turn."""

_EQUALS = 8
"""How many of the least loaded workers are compared by what they were given lately."""


class CacheAware:
    """Balance first, then the longest cached prefix that tells workers apart, then the least loaded."""

    def __init__(self, config: CacheAwareConfig | None = None, index: KvIndex | None = None) -> None:
        """`index`: what workers say that they have cached; made if the configuration wants it."""
        self._config = config or CacheAwareConfig()
        self.index = index or (KvIndex() if self._config.kv_events else None)
        self.texts = StringTree()
        self.ids = ExactTokenTree()
        self._texts = RememberedPrompts(self.texts, _SLIP_CHARACTERS)
        self._ids = RememberedPrompts(self.ids, _SLIP_IDS)
        self._recent = RecentWork(_HALF_LIFE)
        self._leaving: set[str] = set()
        self._next = 0
        self._offered: Sequence[Worker] = ()
        self._by_url: dict[str, Worker] = {}

    def select(self, workers: Sequence[Worker], query: RouteQuery) -> Decision:
        """One of them, with the reason.

        `continued`: it has what this prompt continues. `cached`: it has enough of this prompt. `spilled`: who has it was given
        too much. `imbalance`: the fleet is out of balance. `least_loaded`: nobody in particular has it.
        """
        if query.token_ids is not None:
            ids = _packed(query.token_ids)
            walk = self.ids.walk(_salted_ids(query.tenant, ids))
            known = self._ids.known(walk, _SALT if query.tenant else 0, len(workers))
            if self.index is not None:
                known = _told(self.index, ids, known, workers, confined=bool(query.tenant))
            return self._decide(workers, self._ids, walk, known, len(ids), _SLIP_IDS)
        if query.text is not None:
            salt = _text_salt(query.tenant)
            text_walk = self.texts.walk(salt + query.text)
            known = self._texts.known(text_walk, len(salt), len(workers))
            return self._decide(workers, self._texts, text_walk, known, len(query.text), _SLIP_CHARACTERS)
        return Decision(self._least(workers, min({worker.inflight for worker in workers})), "no_prompt")

    def replied(self, worker: Worker, query: RouteQuery, beginning: str | Sequence[int]) -> None:
        """Remember how it begins, behind its prompt."""
        if worker.url in self._leaving or not beginning:
            return
        if isinstance(beginning, str):
            if query.text is not None and query.token_ids is None:
                key = _text_salt(query.tenant) + query.text + beginning[:ENOUGH_CHARACTERS]
                self._texts.replied(key, worker.url)
        elif query.token_ids is not None:
            asked, said = _packed(query.token_ids), _packed(beginning[:ENOUGH_IDS])
            self._ids.replied(_salted_ids(query.tenant, asked, said), worker.url)

    def forget(self, worker: Worker) -> None:
        """Its cache went with it. Much of it is forgotten a little with each decision, which holds up nobody."""
        self._leaving.add(worker.url)
        self._sweep(worker.url, _AT_ONCE)
        self._recent.forget(worker.url)
        if self.index is not None:
            self.index.forget(worker.url)
        self._offered, self._by_url = (), {}

    def dump(self) -> bytes:
        """What is remembered of prompts, for a restart."""
        copy = self.copy()
        while copy.step(self.texts.nodes + self.ids.nodes + 1):
            pass
        return copy.encode()

    def copy(self) -> PolicyCopy:
        """The same, to be taken in steps."""
        return PolicyCopy(self)

    @property
    def ticks(self) -> int:
        """Grows with all that is remembered."""
        return self.texts.ticks + self.ids.ticks

    def load(self, snapshot: bytes) -> None:
        """Remember that as well. SnapshotError if it cannot be read; nothing is changed then."""
        try:
            texts, ids = msgspec.msgpack.decode(snapshot, type=tuple[bytes, bytes])
        except msgspec.MsgspecError as error:
            raise SnapshotError(f"this is no snapshot of a policy: {error}") from None
        StringTree.load(texts), ExactTokenTree.load(ids)
        self.texts.merge(texts)
        self.ids.merge(ids)

    def trim(self, most: int) -> bool:
        """Forget what is too much, the least recent first, and not much more than `most` units of it. Whether there is more."""
        limit = self._config.max_tree_size
        for tree in (self.texts, self.ids):
            if tree.size > limit:
                tree.evict_all(max(limit, tree.size - most))
        return self.texts.size > limit or self.ids.size > limit

    def _decide(
        self,
        workers: Sequence[Worker],
        prompts: RememberedPrompts[Key, AnyStr],
        walk: Walk[AnyStr],
        known: Known,
        length: int,
        slip: int,
    ) -> Decision:
        chosen = self._choose(workers, known, length, slip)
        if self._leaving:
            self._sweep(next(iter(self._leaving)), _AT_ONCE)
            if chosen.worker.url in self._leaving:  # it is back already
                self._leaving.discard(chosen.worker.url)
                self.texts.remove_tenant(chosen.worker.url)
                self.ids.remove_tenant(chosen.worker.url)
        prompts.learn(walk, chosen.worker.url, known)
        self._recent.add(chosen.worker.url, length)
        return chosen

    def _choose(self, workers: Sequence[Worker], known: Known, length: int, slip: int) -> Decision:
        loads = {worker.inflight for worker in workers}  # a few numbers, however many workers
        least, most, config = min(loads), max(loads), self._config
        if most - least > config.balance_abs and most > config.balance_rel * least:
            return Decision(self._least(workers, least), "imbalance")
        if not known.continued and not _is_enough(known, length, slip, config.threshold):
            return Decision(self._least(workers, least), "least_loaded")
        holder = self._holder(workers, known.holders)
        if holder is None:
            return Decision(self._least(workers, least), "least_loaded")
        if self._has_too_much(holder, least, self._recent.total / len(workers), length, stays=known.continued):
            return Decision(self._least(workers, least), "spilled")
        return Decision(holder, "continued" if known.continued else "cached")

    def _sweep(self, url: str, most: int) -> None:
        """Forget some of what a worker had that is gone."""
        for tree in (self.texts, self.ids):
            tree.evict(url, max(0, tree.tenant_size(url) - most))
        if not self.texts.tenant_size(url) and not self.ids.tenant_size(url):
            self._leaving.discard(url)

    def _has_too_much(self, worker: Worker, least: int, mean: float, length: int, *, stays: bool) -> bool:
        """More than its part of what was routed lately, by some prompts; and of what is in flight.

        What is no turn of a conversation is kept from it however little is in flight.
        """
        more = self._recent.given(worker.url) - mean
        if more <= (_BOUND - 1) * mean:
            return False
        busy = worker.inflight > least + _SLACK
        return busy and more > _MANY * self._recent.mean if stays else busy or more > _FEW * length > 0

    def _holder(self, workers: Sequence[Worker], holders: Collection[str]) -> Worker | None:
        """The least loaded of those who have it; None if that is half of the fleet, or nobody who is there."""
        if 2 * len(holders) > len(workers) > 1:
            return None
        if workers is not self._offered or not isinstance(workers, tuple):
            self._offered, self._by_url = workers, {worker.url: worker for worker in workers}
        if self._leaving:
            holders = [url for url in holders if url not in self._leaving]
        there = [worker for url in holders if (worker := self._by_url.get(url)) is not None]
        if len(there) <= 1:
            return there[0] if there else None
        return min(there, key=self._burden)

    def _least(self, workers: Sequence[Worker], least: int) -> Worker:
        """The fewest requests in flight; of some that have that few, the one that was given least lately."""
        loads = [worker.inflight for worker in workers]
        found: list[Worker] = []
        at = self._next % len(workers)
        for begin, end in ((at, len(workers)), (0, at)):
            while len(found) < _EQUALS:
                try:
                    begin = loads.index(least, begin, end) + 1
                except ValueError:
                    break
                found.append(workers[begin - 1])
                self._next = begin
        return min(found, key=self._burden)

    def _burden(self, worker: Worker) -> tuple[int, float]:
        return worker.inflight, self._recent.given(worker.url)


class PolicyCopy:
    """A copy of what a policy remembers of prompts, taken in steps while it goes on."""

    def __init__(self, policy: CacheAware) -> None:
        self._policy = policy
        self._texts, self._ids = policy.texts.copy(), policy.ids.copy()
        self._ticks = (0, 0)

    def step(self, most: int) -> bool:
        """Copy so many nodes. Whether there are more."""
        more = self._texts.step(most) or self._ids.step(most)
        self._ticks = self._policy.texts.ticks, self._policy.ids.ticks
        return more

    def encode(self) -> bytes:
        """The snapshot, after the last step; in any thread."""
        texts = self._texts.encode(StringTree.kind, self._ticks[0])
        return msgspec.msgpack.encode((texts, self._ids.encode(ExactTokenTree.kind, self._ticks[1])))


def _is_enough(known: Known, length: int, slip: int, threshold: float) -> bool:
    """Whether more than the threshold is known, and what of this is not everybody's is no chance: it is long, or it is all."""
    own = known.matched - known.shared
    return known.matched > threshold * length and (own > min(slip, length // COMMON) or known.matched == length)


@lru_cache(maxsize=1024)
def _text_salt(tenant: str) -> str:
    """What the prompts of a tenant begin with in the tree of texts: always as long, so that no text can look like it."""
    return blake3.blake3(tenant.encode("utf-8", "surrogatepass")).hexdigest(_SALT // 2) if tenant else ""


@lru_cache(maxsize=1024)
def _id_salt(tenant: str) -> bytes:
    """The same for the tree of ids."""
    return blake3.blake3(tenant.encode("utf-8", "surrogatepass")).digest(4 * _SALT)


def _salted_ids(tenant: str, *pieces: memoryview) -> Sequence[int]:
    """The key of some ids in the tree, packed unless it is one piece."""
    if not tenant and len(pieces) == 1:
        return pieces[0]
    return b"".join((_id_salt(tenant) if tenant else b"", *pieces))


def _packed(ids: Sequence[int]) -> memoryview:
    """The ids as 32-bit integers, which they mostly are."""
    return ids if isinstance(ids, memoryview) and ids.format in ("i", "I") else memoryview(array("I", ids))


def _told(index: KvIndex, ids: memoryview, known: Known, workers: Sequence[Worker], *, confined: bool) -> Known:
    """The same, where workers say themselves what they have. Of those that do not, what the tree says holds.

    `confined`: nothing counts beyond what the tree knows, because what workers have may be another tenant's.
    """
    length = len(ids)
    told = {url: blocks * (index.block_size(url) or 0) for url, blocks in index.overlaps(ids).items()}
    if confined:
        told = {url: min(count, known.matched) for url, count in told.items()}
    guessed = dict.fromkeys((url for url in known.holders if url not in told and not index.tracked(url)), known.matched)
    counts = {**told, **guessed}
    most = max(counts.values(), default=0)
    if not most:
        return Known()
    # As much as more than half of the fleet has; of those that tell nothing, the tree knows that.
    half = len(workers) // 2
    shared = sorted(counts.values(), reverse=True)[half] if len(counts) > half and len(workers) > 1 else 0
    if guessed:
        shared = max(shared, known.shared)
    sure = max(shared + 1, most - max(0, length - shared) // COMMON)
    holders = [url for url, count in counts.items() if count >= sure]
    return known._replace(holders=holders, matched=most, shared=shared)
