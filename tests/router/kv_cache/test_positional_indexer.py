"""The index of blocks, compared with an oracle that remembers every path."""

from __future__ import annotations

import struct
from array import array
from typing import Any

import pytest
import xxhash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from router.kv_cache import positional_indexer
from router.kv_cache.block_hashes import content_hashes, prefix_hash, prefix_hashes, root_of
from router.kv_cache.positional_indexer import (
    ParentNotFoundError,
    PositionalIndexer,
    WorkerNotTrackedError,
)
from tests.conftest import examples
from tests.router.kv_cache.recount import check_indexer

GOLDEN_CONTENTS = [9143094415614847814, 12124091508212882195]
GOLDEN_PREFIXES = [9143094415614847814, 9510318385840434533]

A, B, C = "http://a:1", "http://b:1", "http://c:1"


def indexer(*workers: str) -> PositionalIndexer:
    made = PositionalIndexer()
    for worker in workers:
        made.track(worker)
    return made


def stored(index: PositionalIndexer, worker: str, *contents: int, own: int = 0, parent: int | None = None) -> int:
    """Store blocks with these contents and the own hashes own, own + 1, ..."""
    return index.apply_stored(worker, zip(range(own, own + len(contents)), contents, strict=True), parent)


def found(index: PositionalIndexer, *contents: int) -> dict[str, int]:
    check_indexer(index)
    return index.find_matches(contents)


class TestHashes:
    def test_a_blocks_content_is_hashed_as_little_endian_u32(self) -> None:
        expected = xxhash.xxh3_64_intdigest(struct.pack("<3I", 1, 2, 70_000), 1337)
        assert list(content_hashes([1, 2, 70_000, 4], 3)) == [expected]

    @pytest.mark.parametrize("size", [0, -1])
    def test_blocks_of_no_size_are_none(self, size: int) -> None:
        assert list(content_hashes([1, 2, 3], size)) == []

    def test_hashes_never_change(self) -> None:
        contents = list(content_hashes(range(8), 4))
        assert contents == GOLDEN_CONTENTS
        assert list(prefix_hashes(contents)) == GOLDEN_PREFIXES

    def test_a_prefix_is_hashed_from_the_one_before_and_the_content(self) -> None:
        c0, c1, c2 = 5, 2**64 - 1, 7
        p1 = xxhash.xxh3_64_intdigest(struct.pack("<QQ", c0, c1), 1337)
        p2 = xxhash.xxh3_64_intdigest(struct.pack("<QQ", p1, c2), 1337)
        assert list(prefix_hashes([c0, c1, c2])) == [c0, p1, p2]
        assert prefix_hash(prefix_hash(prefix_hash(None, c0), c1), c2) == p2

    def test_an_incomplete_block_has_no_hash(self) -> None:
        assert len(list(content_hashes(range(47), 16))) == 2
        assert list(content_hashes(range(15), 16)) == list(content_hashes([], 16)) == []

    @pytest.mark.parametrize("kind", ["i", "I"])
    def test_arrays_and_views_are_the_same_ids(self, kind: str) -> None:
        ids = array(kind, range(100))
        expected = list(content_hashes(list(ids), 16))
        assert list(content_hashes(ids, 16)) == list(content_hashes(memoryview(ids), 16)) == expected
        assert list(content_hashes(memoryview(ids)[16:], 16)) == expected[1:]

    def test_an_array_of_wider_integers_is_converted(self) -> None:
        assert list(content_hashes(array("q", range(32)), 16)) == list(content_hashes(range(32), 16))

    @pytest.mark.parametrize("bad", [-1, 2**32])
    def test_invalid_ids_are_refused_at_once(self, bad: int) -> None:
        with pytest.raises(OverflowError):
            content_hashes([bad] * 4, 4)

    def test_names_make_distinct_roots(self) -> None:
        roots = [root_of("ab", "c"), root_of("a", "bc"), root_of("abc", None), root_of(None, "abc"), root_of("\ud800")]
        assert len(set(roots)) == 5
        assert root_of(None, None) is root_of("", None) is root_of() is None


class TestMatches:
    def test_each_worker_counts_from_the_first_block_on(self) -> None:
        index = indexer(A, B, C)
        stored(index, A, 1, 2, 3)
        stored(index, B, 1, 9)
        assert found(index, 1, 2, 3, 4) == {A: 3, B: 1}
        assert found(index, 1, 9, 3) == {A: 1, B: 2}
        assert found(index, 2, 3) == {}
        assert found(index) == {}

    def test_the_same_content_behind_another_prefix_is_another_block(self) -> None:
        index = indexer(A)
        stored(index, A, 1, 2, 3)
        stored(index, A, 7, 2, own=10)
        assert found(index, 7, 2, 3) == {A: 2}

    def test_a_gap_ends_the_count(self) -> None:
        """The rest does not count, however long: a jump from block 0 to block 127 would count 128."""
        index = indexer(A, B)
        stored(index, A, *range(128))
        stored(index, B, *range(128))
        index.apply_removed(A, [64])
        assert found(index, *range(128)) == {A: 64, B: 128}
        index.apply_removed(B, [0])
        assert found(index, *range(128)) == {A: 64}

    def test_blocks_behind_a_gap_count_again_once_it_is_closed(self) -> None:
        index = indexer(A)
        stored(index, A, 1, 2, 3)
        index.apply_removed(A, [1])
        assert found(index, 1, 2, 3) == {A: 1}
        assert stored(index, A, 2, own=1, parent=0) == 1
        assert found(index, 1, 2, 3) == {A: 3}

    def test_blocks_behind_a_root_only_match_there(self) -> None:
        index = indexer(A)
        index.apply_stored(A, [(0, 1), (1, 2)], root=root_of("adapter"))
        index.apply_stored(A, [(2, 3)], parent=1)
        assert found(index, 1, 2, 3) == {}
        assert index.find_matches([1, 2, 3], root_of("adapter")) == {A: 3}

    def test_a_prompt_is_hashed_no_further_than_any_worker_holds_it(self) -> None:
        index = indexer(A)
        stored(index, A, 1, 2)
        contents = iter([1, 2, 3, 4, 5])
        assert index.find_matches(contents) == {A: 2}
        assert list(contents) == [4, 5]

    def test_five_hundred_workers(self) -> None:
        workers = [f"http://w{number}:1" for number in range(500)]
        index = indexer(*workers)
        for number, worker in enumerate(workers):
            stored(index, worker, *range(1 + number % 7))
        assert found(index, *range(10)) == {worker: 1 + number % 7 for number, worker in enumerate(workers)}


class TestChanges:
    def test_sizes_are_those_of_the_tracked_workers(self) -> None:
        index = indexer(A, B)
        stored(index, A, 1, 2, 3)
        stored(index, B, 1)
        assert (dict(index.tree_sizes), index.tree_size(A), index.tree_size(C)) == ({A: 3, B: 1}, 3, 0)

    def test_a_replay_counts_once(self) -> None:
        index = indexer(A)
        assert stored(index, A, 1, 2) == 2
        assert stored(index, A, 1, 2) == 0
        assert index.tree_size(A) == 2

    def test_a_hash_is_signed_on_the_wire(self) -> None:
        index = indexer(A)
        index.apply_stored(A, [(-1, 5)])
        index.apply_stored(A, [(2**63, 6)], parent=2**64 - 1)
        assert index.holds(A, -1)
        assert index.holds(A, -(2**63))
        assert found(index, 5, 6) == {A: 2}
        assert index.apply_removed(A, [-(2**63), -1]) == 2
        assert found(index, 5, 6) == {}

    def test_an_unknown_parent_changes_nothing(self) -> None:
        index = indexer(A, B)
        stored(index, B, 1, 2)
        with pytest.raises(ParentNotFoundError):
            stored(index, A, 3, own=9, parent=1)  # which is B's
        assert index.tree_size(A) == 0
        assert found(index, 1, 2, 3) == {B: 2}

    def test_a_removed_block_is_no_parent(self) -> None:
        index = indexer(A)
        stored(index, A, 1, 2)
        index.apply_removed(A, [0])
        with pytest.raises(ParentNotFoundError):
            stored(index, A, 5, own=9, parent=0)
        assert stored(index, A, 5, own=9, parent=1) == 1

    def test_an_untracked_worker_is_an_error(self) -> None:
        index = indexer(A)
        index.remove_worker(A)
        index.remove_worker(A)
        assert A not in index
        for change in (
            lambda: stored(index, A, 1),
            lambda: index.apply_removed(A, [1]),
            lambda: index.apply_cleared(A),
            lambda: index.holds(A, 1),
        ):
            with pytest.raises(WorkerNotTrackedError):
                change()

    def test_removing_an_unknown_block_does_nothing(self) -> None:
        index = indexer(A)
        assert index.apply_removed(A, [1, 2]) == 0

    def test_two_own_hashes_of_one_block_count_once(self) -> None:
        """A worker may distinguish blocks that look the same from here; it holds it until the last own hash is removed."""
        index = indexer(A)
        for own in (10, 20, 30):
            stored(index, A, 1, own=own)
        assert index.tree_size(A) == 1
        assert index.apply_removed(A, [20]) == 0
        assert index.apply_removed(A, [10]) == 0
        assert found(index, 1) == {A: 1}
        assert index.apply_removed(A, [30]) == 1
        assert found(index, 1) == {}

    def test_an_own_hash_can_move_to_another_block(self) -> None:
        index = indexer(A)
        stored(index, A, 1)
        stored(index, A, 2)
        assert (found(index, 1), found(index, 2), index.tree_size(A)) == ({}, {A: 1}, 1)

    def test_the_last_holder_leaves_no_trace(self) -> None:
        index = indexer(A, B)
        stored(index, A, 1, 2)
        stored(index, B, 1)
        index.apply_removed(A, [0, 1])
        index.apply_removed(B, [0])
        assert index._holders == {}


class TestClearing:
    def test_a_cleared_cache_is_empty_at_once_and_swept_later(self) -> None:
        index = indexer(A, B)
        many = range(5 * positional_indexer._SWEEP)
        stored(index, A, *many)
        stored(index, B, *many[:10])
        index.apply_cleared(A)
        assert index.stale == len(many) - positional_indexer._SWEEP
        assert (found(index, *many), index.tree_size(A)) == ({B: 10}, 0)
        stored(index, A, 0)
        assert found(index, 0, 1) == {A: 1, B: 2}
        while index.stale:
            left = index.stale
            index.apply_removed(B, [])
            assert index.stale < left
        assert found(index, *many) == {A: 1, B: 10}
        assert len(index._holders) == 10

    def test_clearing_an_empty_cache_costs_nothing(self) -> None:
        index = indexer(A)
        for _ in range(100):
            index.apply_cleared(A)
        check_indexer(index)
        assert len(index._owners) == 1

    @pytest.mark.slow
    def test_sweeping_outruns_stale_entries(self) -> None:
        """A fleet empties its caches at each step of a training run."""
        workers = [f"http://w{number}:1" for number in range(50)]
        index = indexer(*workers)
        for _ in range(40):
            for worker in workers:
                index.apply_cleared(worker)
                stored(index, worker, *range(600))
        check_indexer(index)
        assert index.stale < 2 * 50 * 600
        assert len(index._owners) <= 2 * len(workers)

    def test_bits_are_used_again_by_workers_that_come_and_go(self) -> None:
        index = indexer()
        for number in range(2_000):
            worker = f"http://w{number}:1"
            index.track(worker)
            stored(index, worker, 1, 2, number)
            assert index.find_matches([1, 2, number]) == {worker: 3}
            index.remove_worker(worker)
        check_indexer(index)
        assert len(index._owners) <= 2
        assert not index.tree_sizes

    def test_cached_names_do_not_outlive_their_workers(self) -> None:
        index = indexer(A)
        stored(index, A, 1)
        assert found(index, 1) == {A: 1}
        index.remove_worker(A)
        index.track(B)
        stored(index, B, 1)
        assert found(index, 1) == {B: 1}

    def test_the_cache_of_names_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(positional_indexer, "_REMEMBERED", 4)
        workers = [f"http://w{number}:1" for number in range(10)]
        index = indexer(*workers)
        for number, worker in enumerate(workers):
            stored(index, worker, number)
            assert index.find_matches([number]) == {worker: 1}
        assert len(index._names) <= 4


WORKERS = st.sampled_from([A, B, C])
CONTENTS = st.lists(st.integers(0, 2), max_size=6)
NAMES = st.integers(-4, 30)


class Stress(RuleBasedStateMachine):
    """The oracle has, by worker, the whole path of each block by its own hash."""

    @initialize(sweep=st.sampled_from([0, 1, 256]))
    def begin(self, sweep: int) -> None:
        self.sweep = positional_indexer._SWEEP
        positional_indexer._SWEEP = sweep
        self.index = PositionalIndexer()
        self.paths: dict[str, dict[int, tuple[int, ...]]] = {}

    def teardown(self) -> None:
        if hasattr(self, "sweep"):
            positional_indexer._SWEEP = self.sweep

    @rule(worker=WORKERS)
    def track(self, worker: str) -> None:
        self.index.track(worker)
        self.paths.setdefault(worker, {})

    @rule(worker=WORKERS, contents=CONTENTS, name=NAMES, data=st.data(), root=st.sampled_from([None, 77]))
    def store(self, worker: str, contents: list[int], name: int, data: Any, root: int | None) -> None:
        names = [(name + number) % 2**64 for number in range(len(contents))]
        known = self.paths.get(worker, {})
        parent = data.draw(st.none() | st.sampled_from([*known, 999]))
        blocks = list(zip(names, contents, strict=True))
        if worker not in self.paths:
            with pytest.raises(WorkerNotTrackedError):
                self.index.apply_stored(worker, blocks, parent, root)
        elif parent is not None and parent not in known:
            with pytest.raises(ParentNotFoundError):
                self.index.apply_stored(worker, blocks, parent, root)
        else:
            path = (() if root is None else (root,)) if parent is None else known[parent]
            before = len(set(known.values()))
            for own, content in blocks:
                path = (*path, content)
                known[own] = path
            assert self.index.apply_stored(worker, blocks, parent, root) == len(set(known.values())) - before

    @precondition(lambda self: self.paths)
    @rule(data=st.data())
    def remove(self, data: Any) -> None:
        worker = data.draw(st.sampled_from(sorted(self.paths)))
        known = self.paths[worker]
        names = data.draw(st.lists(st.sampled_from([*known, 999]), max_size=4))
        before = len(set(known.values()))
        for own in names:
            known.pop(own, None)
        assert self.index.apply_removed(worker, names) == before - len(set(known.values()))

    @precondition(lambda self: self.paths)
    @rule(data=st.data())
    def clear(self, data: Any) -> None:
        worker = data.draw(st.sampled_from(sorted(self.paths)))
        self.paths[worker].clear()
        self.index.apply_cleared(worker)

    @rule(worker=WORKERS)
    def leave(self, worker: str) -> None:
        self.index.remove_worker(worker)
        self.paths.pop(worker, None)

    @rule(contents=CONTENTS, root=st.sampled_from([None, 77]))
    def match(self, contents: list[int], root: int | None) -> None:
        beginning = () if root is None else (root,)
        expected = {}
        for worker, known in self.paths.items():
            held = set(known.values())
            count = 0
            while count < len(contents) and (*beginning, *contents[: count + 1]) in held:
                count += 1
            if count:
                expected[worker] = count
        assert self.index.find_matches(contents, root) == expected

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "index"):
            check_indexer(self.index)
            assert self.index.tree_sizes == {worker: len(set(known.values())) for worker, known in self.paths.items()}


TestStress = Stress.TestCase
TestStress.settings = settings(max_examples=examples(100), stateful_step_count=40)
