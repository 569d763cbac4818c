"""The contents of the workers' KV caches, as the workers report them.

Block sizes differ between workers, so there is one `PositionalIndexer` for each size. A worker with several data-parallel ranks
has several caches, and a request uses one of them: the index follows each separately. Where its ranks are targets of their own,
each target has its cache (`separate`). Else one target has them all, and the best one counts.

vLLM's hybrid models have a cache for each kind of their layers. A prefix has to be whole in that of full attention. Layers with
a window or a state need only its end (`_Layers`), so they decide behind which of its blocks a request can go on.

The index never credits a worker with more than it holds. `tracked` says whether the index is complete: if it missed a worker's
first events, the blocks stored before are unknown until the worker empties its cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from router.engines.form.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from router.kv_cache.block_hashes import content_hashes, prefix_hashes, root_of
from router.kv_cache.positional_indexer import UNSIGNED, ParentNotFoundError, PositionalIndexer
from router.workers.worker import target_name

_GPU = 1
_TIERS = {None: _GPU, "GPU": _GPU, "CPU_PINNED": 2, "DISK": 4}
"""A block counts while it is in one of these. Other media, such as a pool that all workers share, say nothing of a worker."""

_BACK = 128
"""So many blocks at the end of what a hybrid model's cache holds are looked through for a place where a request can go on."""


class KvIndex:
    """The caches of any number of workers, by URL and rank. Questions are about targets, by their names.

    Attributes:
        counts: the blocks that were skipped, by reason: `unknown_parent`, `other_size` (not the worker's), `malformed`.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._indexers: dict[int, PositionalIndexer] = {}  # by block size
        self._caches: dict[str, dict[int, _Cache]] = {}  # by URL and rank
        self._separate: set[str] = set()  # URLs
        self._targets: dict[str, str] = {}  # the target of a cache, by the cache's name in the indexers
        self._of_target: dict[str, list[_Cache]] = {}  # by the target's name
        self._hybrids: dict[str, _Cache] = {}  # the caches with further layers, by name

    def separate(self, url: str, *, separate: bool) -> None:
        """Forget a worker, and say whether its ranks are targets of their own from now on."""
        self.forget(url)
        if separate:
            self._separate.add(url)

    def is_separate(self, url: str) -> bool:
        """Return whether the ranks of a worker are targets of their own."""
        return url in self._separate

    def reset(self, url: str, rank: int = 0, *, complete: bool) -> None:
        """Start over with a worker's cache. `complete`: it is empty, and all its events will be applied from now on."""
        ranks = self._caches.setdefault(url, {})
        cache = ranks.get(rank)
        if cache is None:
            cache = ranks[rank] = _Cache(url, target_name(url, rank))
            self._targets[cache.name] = target = cache.name if url in self._separate else url
            self._of_target.setdefault(target, []).append(cache)
        self._leave(cache)
        cache.complete = complete

    def apply(self, url: str, events: Iterable[KvEvent], rank: int = 0) -> None:
        """Apply a worker's events, in their order."""
        if rank not in self._caches.get(url, ()):
            self.reset(url, rank, complete=False)
        cache = self._caches[url][rank]
        for event in events:
            if isinstance(event, BlockStored):
                self._stored(cache, event)
            elif isinstance(event, BlockRemoved):
                self._removed(cache, event)
            else:
                assert isinstance(event, AllBlocksCleared)
                self._clear(cache)
                cache.complete = True
                if cache.block_size is not None:
                    self._indexers[cache.block_size].apply_cleared(cache.name)

    def overlaps(self, ids: Sequence[int], lora: str | None = None, salt: str | None = None) -> dict[str, int]:
        """Return, by target, how many blocks of this prompt it has cached, in blocks of its own size, if it has any.

        `ids` is fastest as an array or a memoryview of 32-bit integers. `lora` is the adapter's name, and
        `salt` what keeps the request apart, as events tell it.
        """
        found: dict[str, int] = {}
        root = root_of(lora, salt)
        for size, indexer in self._indexers.items():
            try:
                blocks = indexer.find_matches(content_hashes(ids, size), root)
                if hybrids := blocks.keys() & self._hybrids.keys():
                    most = max(blocks[name] for name in hybrids)
                    prefixes = list(islice(prefix_hashes(content_hashes(ids, size), root), most))
                    usable = {name: self._hybrids[name].usable(prefixes[: blocks.pop(name)]) for name in hybrids}
                    blocks |= {name: count for name, count in usable.items() if count}
            except OverflowError:
                return {}  # no vocabulary has such ids, and so no cache
            if len(self._targets) == len(self._of_target) and not found:  # no target has several caches
                found = blocks
                continue
            for name, count in blocks.items():
                target = self._targets[name]
                found[target] = max(count, found.get(target, 0))
        return found

    def tracked(self, target: str) -> bool:
        """Return whether the whole cache of this target is known: it has nothing beyond its overlap."""
        caches = self._of_target.get(target, ())
        return bool(caches) and all(cache.complete and (cache.block_size or not cache.layers) for cache in caches)

    def block_size(self, target: str) -> int | None:
        """Return the number of ids in a block of this target; None until it has stored one."""
        return next((cache.block_size for cache in self._of_target.get(target, ())), None)

    def tree_size(self, url: str) -> int:
        """Return the number of blocks that a worker is known to hold, all ranks together."""
        caches = self._caches.get(url, {}).values()
        return sum(self._indexers[one.block_size].tree_size(one.name) for one in caches if one.block_size is not None)

    def forget(self, url: str) -> None:
        """Forget a worker; an unknown worker is no error."""
        for cache in self._caches.pop(url, {}).values():
            self._drop(cache)
        self._separate.discard(url)

    def forget_target(self, target: str) -> None:
        """Forget the caches of a target; an unknown target is no error."""
        gone = self._of_target.get(target, ())
        for url in {cache.url for cache in gone}:
            ranks = {rank: cache for rank, cache in self._caches[url].items() if cache not in gone}
            self._caches[url] = ranks
            if not ranks:
                del self._caches[url]
        for cache in tuple(gone):
            self._drop(cache)

    def _drop(self, cache: _Cache) -> None:
        self._leave(cache)
        target = self._targets.pop(cache.name)
        self._of_target[target].remove(cache)
        if not self._of_target[target]:
            del self._of_target[target]

    def _stored(self, cache: _Cache, event: BlockStored) -> None:
        tier = _TIERS.get(event.medium)
        if tier is None:
            return
        hashes = [own & UNSIGNED for own in event.block_hashes]
        if cache.is_besides(event):
            if not cache.layers and cache.block_size is not None:
                blocks = self._indexers[cache.block_size].blocks(cache.name)
                cache.owns = {prefix: own for own, prefix in blocks.items()}
            self._hybrids[cache.name] = cache
            cache.layers.setdefault(event.group_idx, _Layers(event.reach)).store(hashes)
            return
        if not hashes:
            return
        if cache.block_size is None and event.block_size > 0:
            cache.block_size = event.block_size
            self._indexers.setdefault(event.block_size, PositionalIndexer()).track(cache.name)
        if event.block_size != cache.block_size:
            self._skip(cache, "other_size", hashes)
            return
        try:
            contents = list(content_hashes(_singles(event.token_ids), event.block_size))
        except OverflowError:
            contents = []
        if not len(contents) == len(hashes) == len(event.token_ids) / event.block_size:
            self._skip(cache, "malformed", hashes)
            return
        indexer = self._indexers[event.block_size]
        blocks = indexer.blocks(cache.name)
        again = [] if event.group_idx is None else [own for own in hashes if own in blocks]
        tiers = {}
        if tier != _GPU or cache.tiers:
            tiers = {own: cache.tiers.get(own, _GPU if own in blocks else 0) | tier for own in hashes}
        adapter = event.lora_name or (None if event.lora_id is None else str(event.lora_id))
        try:
            indexer.apply_stored(
                cache.name,
                zip(hashes, contents, strict=True),
                event.parent_block_hash,
                root_of(adapter, event.salt),
            )
        except ParentNotFoundError:
            self._skip(cache, "unknown_parent", hashes)
            return
        cache.note(tiers)
        for own in again:
            cache.copies[own] = cache.copies.get(own, 0) + 1
        if cache.layers:
            cache.owns.update((blocks[own], own) for own in hashes)

    def _removed(self, cache: _Cache, event: BlockRemoved) -> None:
        tier = _TIERS.get(event.medium)
        if tier is None:
            return
        hashes = [own & UNSIGNED for own in event.block_hashes]
        if event.group_idx in cache.layers:
            cache.layers[event.group_idx].remove(hashes)
            return
        if cache.block_size is None:
            return
        if cache.copies:
            hashes = [own for own in hashes if not _less(cache.copies, own)]
        if tier != _GPU or cache.tiers:
            left = {own: cache.tiers.get(own, _GPU) & ~tier for own in hashes}
            hashes = [own for own, tiers in left.items() if not tiers]
            cache.note(left)
        indexer = self._indexers[cache.block_size]
        if cache.layers:
            blocks = indexer.blocks(cache.name)
            for own in hashes:
                cache.owns.pop(blocks.get(own, 0), None)
        indexer.apply_removed(cache.name, hashes)

    def _skip(self, cache: _Cache, why: str, hashes: Sequence[int]) -> None:
        self.counts[why] += len(hashes)
        cache.complete = False

    def _leave(self, cache: _Cache) -> None:
        if cache.block_size is not None:
            indexer = self._indexers[cache.block_size]
            indexer.remove_worker(cache.name)
            if not indexer.tree_sizes:
                del self._indexers[cache.block_size]
            cache.block_size = None
        cache.group = None
        self._clear(cache)

    def _clear(self, cache: _Cache) -> None:
        for told in (cache.tiers, cache.copies, cache.layers, cache.owns):
            told.clear()
        self._hybrids.pop(cache.name, None)


@dataclass(slots=True, eq=False)
class _Layers:
    """The blocks of some layers of a hybrid model: how many copies there are of each, by the worker's own hash.

    At a position, the layers need as many of the blocks before it as `reach` says; None: all of them.
    """

    reach: int | None
    copies: dict[int, int] = field(default_factory=dict)

    def store(self, hashes: Sequence[int]) -> None:
        for own in hashes:
            self.copies[own] = self.copies.get(own, 0) + 1

    def remove(self, hashes: Sequence[int]) -> None:
        for own in hashes:
            _less(self.copies, own)

    def gap(self, owns: Mapping[int, int], prefixes: Sequence[int]) -> int | None:
        """Return the place of the last block of a prefix that the layers need, and do not have; None if they have all."""
        begin = 0 if self.reach is None else max(len(prefixes) - self.reach, 0)
        places = range(len(prefixes) - 1, begin - 1, -1)
        return next((at for at in places if owns.get(prefixes[at]) not in self.copies), None)


@dataclass(slots=True, eq=False)
class _Cache:
    """The cache of one rank of the worker at `url`.

    Attributes:
        tiers: where its blocks are, except those that are on the GPU alone.
        copies: how many further copies there are of a block. vLLM has one for each request that computed it, and tells of each;
            SGLang has one.
        group: the layers whose blocks these are, if the worker says so: with full attention, the first of several such.
        layers: all other layers of a hybrid model.
        owns: the own hash of each block, by its prefix hash; empty without other layers, which it is for.
    """

    url: str
    name: str
    block_size: int | None = None
    complete: bool = False
    tiers: dict[int, int] = field(default_factory=dict)
    copies: dict[int, int] = field(default_factory=dict)
    group: int | None = None
    layers: dict[int | None, _Layers] = field(default_factory=dict)
    owns: dict[int, int] = field(default_factory=dict)

    def note(self, tiers: dict[int, int]) -> None:
        for own, where in tiers.items():
            if where in (0, _GPU):
                self.tiers.pop(own, None)
            else:
                self.tiers[own] = where

    def is_besides(self, event: BlockStored) -> bool:
        """Return whether the blocks are those of other layers than `group`, which becomes the event's if it is not known."""
        if event.group_idx is None:
            return False
        if event.reach is None and self.group is None:
            self.group = event.group_idx
        return event.group_idx != self.group

    def usable(self, prefixes: list[int]) -> int:
        """Return how many of these consecutive blocks a request can use. The layers of `group` hold them all.

        All other layers keep the ends of some requests, so few places count, and none that is far from the end of the prompt.
        """
        least = len(prefixes) - _BACK
        while gaps := [at for layers in self.layers.values() if (at := layers.gap(self.owns, prefixes)) is not None]:
            del prefixes[min(gaps) :]
            if len(prefixes) < least:
                return 0
        return len(prefixes)


def _less(copies: dict[int, int], own: int) -> bool:
    """Count a copy of a block less. Return whether there was one."""
    left = copies.pop(own, 0)
    if left > 1:
        copies[own] = left - 1
    return left > 0


def _singles(ids: Sequence[int | tuple[int, int]]) -> Sequence[int]:
    """Return the ids of a prompt. EAGLE's pairs overlap by one, so the first of each are the prompt's own ids."""
    return [one[0] if isinstance(one, tuple) else one for one in ids]
