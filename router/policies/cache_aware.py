"""Where most of the prompt is cached already, as far as the load allows.

What a worker was given is what it has cached: a tree of prompts remembers that, one of ids and one of texts. A prompt then
goes where its longest known beginning went. Taken literally that rule ruins a run in which all prompts begin alike: whoever was
first has the system prompt, so everybody is sent there. Three things stand against it:

- A beginning only speaks for a worker if others lack it. So the holders are those of the match but for a sixteenth of the
  prompt, and what more than half of the fleet holds is everybody's: the least loaded worker is taken, and learns it if it
  has to.

      the prompt      |== system prompt ==|= first question =|-- reply --|- next question -|
      in the tree     |== held by all ====|== held by one ===|   (the worker has the reply cached as well)
                                                             ^ an earlier prompt ended here: this one continues it

- A prompt that begins with the whole of an earlier one continues it, whatever share of it that is: what follows is the
  reply, which the tree has not seen and the worker has cached.
- A worker that was given too much lately gets no new conversations for the cache's sake; and if it has too much in flight as
  well, no further turns of old ones.

Workers that publish what they have cached are believed rather than the tree, which does not know what they had to give up.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence

import msgspec

from router.config import CacheAwareConfig
from router.policies.base import Decision, RouteQuery
from router.policies.kv_index import KvIndex
from router.policies.prefix_snapshot import SnapshotError
from router.policies.prefix_tree import PAGE, StringTree, TokenTree
from router.policies.recent_work import RecentWork
from router.policies.remembered_prompts import K, Known, RememberedPrompts
from router.workers.worker import Worker

_COMMON = 16
"""A sixteenth of a prompt does not tell workers apart."""

_BOUND = 1.15
"""Times the mean of what was routed lately. The bound of a run is 1.25, and one request may be long."""

_SLACK = 4
"""Requests in flight that a worker may have more than the least loaded one, whatever was routed lately."""

_FEW = 2
"""Prompts that a worker may have been given more than the mean: it takes some for a mean to mean something."""

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
        self.ids = TokenTree()
        self._texts: RememberedPrompts[str] = RememberedPrompts(self.texts, 1)
        self._ids: RememberedPrompts[memoryview] = RememberedPrompts(self.ids, PAGE)
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
            known = self._ids.known(ids, _COMMON)
            if self.index is not None:
                known = _told(self.index, ids, known)
            return self._decide(workers, self._ids, ids, known)
        if query.text is not None:
            return self._decide(workers, self._texts, query.text, self._texts.known(query.text, _COMMON))
        return Decision(self._least(workers, min({worker.inflight for worker in workers})), "no_prompt")

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
        return msgspec.msgpack.encode((self.texts.dump(), self.ids.dump()))

    def load(self, snapshot: bytes) -> None:
        """Remember that as well. SnapshotError if it cannot be read; nothing is changed then."""
        try:
            texts, ids = msgspec.msgpack.decode(snapshot, type=tuple[bytes, bytes])
        except msgspec.MsgspecError as error:
            raise SnapshotError(f"this is no snapshot of a policy: {error}") from None
        StringTree.load(texts), TokenTree.load(ids)
        self.texts.merge(texts)
        self.ids.merge(ids)

    def trim(self, most: int) -> bool:
        """Forget what is too much, the least recent first, and not much more than `most` units of it. Whether there is more."""
        limit = self._config.max_tree_size
        for tree in (self.texts, self.ids):
            if tree.size > limit:
                tree.evict_all(max(limit, tree.size - most))
        return self.texts.size > limit or self.ids.size > limit

    def _decide(self, workers: Sequence[Worker], prompts: RememberedPrompts[K], key: K, known: Known) -> Decision:
        chosen = self._choose(workers, known, len(key))
        if self._leaving:
            self._sweep(next(iter(self._leaving)), _AT_ONCE)
            if chosen.worker.url in self._leaving:  # it is back already
                self._sweep(chosen.worker.url, self.texts.size + self.ids.size)
        prompts.learn(key, chosen.worker.url, known)
        self._recent.add(chosen.worker.url, len(key))
        return chosen

    def _choose(self, workers: Sequence[Worker], known: Known, length: int) -> Decision:
        loads = {worker.inflight for worker in workers}  # a few numbers, however many workers
        least, most, config = min(loads), max(loads), self._config
        if most - least > config.balance_abs and most > config.balance_rel * least:
            return Decision(self._least(workers, least), "imbalance")
        if not known.continued and known.share <= config.threshold:
            return Decision(self._least(workers, least), "least_loaded")
        holder = self._holder(workers, known.holders)
        if holder is None:
            return Decision(self._least(workers, least), "least_loaded")
        if self._has_too_much(holder, least, self._recent.total / len(workers), 0 if known.continued else length):
            return Decision(self._least(workers, least), "spilled")
        return Decision(holder, "continued" if known.continued else "cached")

    def _sweep(self, url: str, most: int) -> None:
        """Forget some of what a worker had that is gone."""
        for tree in (self.texts, self.ids):
            tree.evict(url, max(0, tree.tenant_size(url) - most))
        if not self.texts.tenant_size(url) and not self.ids.tenant_size(url):
            self._leaving.discard(url)

    def _has_too_much(self, worker: Worker, least: int, mean: float, length: int) -> bool:
        """More than its part of what was routed lately; and of what is in flight, or (with a `length`) by some such prompts."""
        given = self._recent.given(worker.url)
        if given <= _BOUND * mean:
            return False
        return worker.inflight > least + _SLACK or 0 < _FEW * length < given - mean

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


def _packed(ids: Sequence[int]) -> memoryview:
    """The ids as 32-bit integers, which they mostly are."""
    return ids if isinstance(ids, memoryview) and ids.format == "i" else memoryview(array("i", ids))


def _told(index: KvIndex, ids: memoryview, known: Known) -> Known:
    """The same, where workers say themselves what they have. Of those that do not, what the tree says holds."""
    length = len(ids)
    told = {url: blocks * (index.block_size(url) or 0) for url, blocks in index.overlaps(ids).items()}
    guessed = [url for url in known.holders if url not in told and not index.tracked(url)]
    guess = known.share * length if guessed else 0.0
    most = max(guess, *told.values()) if told else guess
    if not most:
        return Known((), 0.0)
    sure = most - length // _COMMON
    holders = [url for url, count in told.items() if count >= sure]
    if guess >= sure:
        holders += guessed
    return Known(holders, most / length, known.end)
