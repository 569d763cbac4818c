"""Recounts everything that the index of KV caches keeps, as an oracle for its tests."""

from __future__ import annotations

from router.kv_cache.index import _GPU, KvIndex
from router.kv_cache.positional_indexer import PositionalIndexer


def check_indexer(index: PositionalIndexer) -> None:
    """Raise AssertionError if a recount differs from what the index keeps."""
    expected: dict[int, int] = {}
    for worker, held in index._workers.items():
        distinct = set(held.prefixes.values())
        assert index._sizes[worker] == len(distinct), worker
        names = len(held.prefixes)
        assert names == len(distinct) + sum(held.doubles.values()), worker
        assert all(count > 0 for count in held.doubles.values()), worker
        assert index._owners[held.number] == worker
        for prefix in distinct:
            expected[prefix] = expected.get(prefix, 0) | 1 << held.number
    assert index._sizes.keys() == index._workers.keys()
    seen = {prefix: mask & index._live for prefix, mask in index._holders.items() if mask & index._live}
    assert seen == expected
    assert all(index._holders.values()), "an entry that nobody holds"
    for number, prefixes in index._stale:
        old = {prefix for prefix, mask in index._holders.items() if mask >> number & 1}
        assert old <= set(prefixes.values())
    used = [held.number for held in index._workers.values()]
    assert index._live == sum(1 << number for number in used)
    numbers = [*used, *index._free, *(number for number, _ in index._stale)]
    assert sorted(numbers) == list(range(len(index._owners))), "each bit has one use"
    unread = sum(1 << number for number in index._free)
    assert not any(mask & unread for mask in index._holders.values())


def check(index: KvIndex) -> None:
    """Raise AssertionError if a recount differs from what the index keeps."""
    caches = [cache for ranks in index._caches.values() for cache in ranks.values()]
    assert index._targets.keys() == {cache.name for cache in caches}
    found = {name: target for target, own in index._of_target.items() for name in (cache.name for cache in own)}
    assert index._targets == found
    assert all(index._of_target.values())
    for size, indexer in index._indexers.items():
        check_indexer(indexer)
        assert indexer.tree_sizes, "an index of nobody's"
        assert indexer.tree_sizes.keys() == {cache.name for cache in caches if cache.block_size == size}
    for cache in caches:
        assert not cache.tiers or cache.block_size is not None
        for own, tiers in cache.tiers.items():
            assert tiers not in (0, _GPU)
            assert index._indexers[cache.block_size or 0].holds(cache.name, own)
        blocks = index._indexers[cache.block_size].blocks(cache.name) if cache.block_size else {}
        assert cache.owns == ({prefix: own for own, prefix in blocks.items()} if cache.layers else {})
        assert all(
            count > 0
            for copies in (cache.copies, *(one.copies for one in cache.layers.values()))
            for count in copies.values()
        )
        assert cache.copies.keys() <= blocks.keys()
    assert index._hybrids == {cache.name: cache for cache in caches if cache.layers}
