"""The index of KV caches, fed with SGLang's events."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router.engines.form.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from router.kv_cache.index import KvIndex
from tests.conftest import examples
from tests.router.kv_cache.recount import check

A, B = "http://a:1", "http://b:1"


def stored(ids: Sequence[Any], own: int = 0, parent: int | None = None, size: int = 2, **more: Any) -> BlockStored:
    """Return an event for the blocks of these ids, with the own hashes own, own + 1, ..."""
    return BlockStored(list(range(own, own + len(ids) // size)), parent, list(ids), size, **more)


def follow(*urls: str) -> KvIndex:
    index = KvIndex()
    for url in urls:
        index.reset(url, complete=True)
    return index


def overlaps(index: KvIndex, ids: Sequence[int], lora: str | None = None) -> dict[str, int]:
    check(index)
    assert index.overlaps(memoryview(array("i", ids)), lora) == index.overlaps(ids, lora)
    return index.overlaps(ids, lora)


def test_blocks_of_each_workers_own_size() -> None:
    index = follow(A, B)
    index.apply(A, [stored(range(8))])
    index.apply(B, [stored(range(8), size=4)])
    assert overlaps(index, range(7)) == {A: 3, B: 1}
    assert (index.block_size(A), index.block_size(B), index.tree_size(A), index.tree_size(B)) == (2, 4, 4, 2)


def test_a_prompt_is_continued_evicted_and_flushed() -> None:
    index = follow(A)
    index.apply(A, [stored([1, 2, 3, 4]), stored([5, 6], own=9, parent=1)])
    assert overlaps(index, [1, 2, 3, 4, 5, 6, 7, 8]) == {A: 3}
    index.apply(A, [BlockRemoved([9])])
    assert overlaps(index, [1, 2, 3, 4, 5, 6]) == {A: 2}
    index.apply(A, [AllBlocksCleared(), stored([5, 6])])
    assert overlaps(index, [1, 2]) == {}
    assert overlaps(index, [5, 6]) == {A: 1}


def test_an_unknown_worker_has_nothing() -> None:
    index = KvIndex()
    assert overlaps(index, [1, 2]) == {}
    assert (index.tracked(A), index.block_size(A), index.tree_size(A)) == (False, None, 0)
    index.forget(A)


def test_a_worker_can_be_forgotten() -> None:
    index = follow(A, B)
    for url in (A, B):
        index.apply(url, [stored([1, 2])])
    index.forget(A)
    assert overlaps(index, [1, 2]) == {B: 1}
    assert not index.tracked(A)
    index.forget(B)
    assert overlaps(index, [1, 2]) == {}
    assert index._indexers == index._targets == index._of_target == index._caches == {}


def test_ids_that_no_vocabulary_has_match_nothing() -> None:
    index = follow(A)
    index.apply(A, [stored([1, 2])])
    assert index.overlaps([-1, 2]) == index.overlaps([1, 2**40]) == {}


class TestCompleteness:
    def test_a_worker_followed_from_the_start_is_complete(self) -> None:
        assert follow(A).tracked(A)

    def test_another_worker_is_complete_once_its_cache_is_emptied(self) -> None:
        index = KvIndex()
        index.apply(A, [stored([1, 2])])
        assert overlaps(index, [1, 2]) == {A: 1}
        assert not index.tracked(A)
        index.apply(A, [AllBlocksCleared()])
        assert index.tracked(A)

    def test_an_unknown_parent_makes_it_incomplete(self) -> None:
        index = follow(A)
        index.apply(A, [stored([1, 2, 3, 4], parent=99)])
        assert index.counts == {"unknown_parent": 2}
        assert not index.tracked(A)
        assert overlaps(index, [1, 2]) == {}

    def test_all_ranks_must_be_complete(self) -> None:
        index = follow(A)
        index.reset(A, 1, complete=False)
        assert not index.tracked(A)
        index.reset(A, 1, complete=True)
        assert index.tracked(A)

    @pytest.mark.parametrize(
        "event",
        [
            BlockStored([1, 2], None, [1, 2, 3, 4, 5], 2),
            BlockStored([1, 2], None, [1, 2], 2),
            BlockStored([1, 2], None, [1, 2, 3, -4], 2),
        ],
    )
    def test_a_malformed_event_is_counted(self, event: BlockStored) -> None:
        index = follow(A)
        index.apply(A, [event])
        assert index.counts == {"malformed": 2}
        assert not index.tracked(A)
        assert overlaps(index, [1, 2, 3, 4]) == {}

    def test_another_block_size_is_counted(self) -> None:
        index = follow(A)
        index.apply(A, [stored([1, 2]), stored([1, 2, 3], own=5, size=3), BlockStored([7], None, [], 0)])
        assert index.counts == {"other_size": 2}
        assert not index.tracked(A)
        assert overlaps(index, [1, 2, 3]) == {A: 1}

    def test_an_event_without_blocks_tells_nothing(self) -> None:
        index = follow(A)
        index.apply(A, [BlockStored([], 99, [], 2)])
        assert index.tracked(A)
        index.apply(A, [BlockStored([7], None, [], 0), stored([1, 2])])
        assert index.counts == {"other_size": 1}
        assert overlaps(index, [1, 2]) == {A: 1}

    def test_a_restarted_worker_may_have_another_block_size(self) -> None:
        index = follow(A)
        index.apply(A, [stored([1, 2])])
        index.reset(A, complete=True)
        index.apply(A, [stored([1, 2, 3], size=3)])
        assert overlaps(index, [1, 2, 3]) == {A: 1}
        assert index.block_size(A) == 3


class TestRanks:
    def test_the_best_rank_counts(self) -> None:
        index = follow(A, B)
        index.reset(A, 1, complete=True)
        index.apply(A, [stored([1, 2])])
        index.apply(A, [stored([1, 2, 3, 4])], rank=1)
        index.apply(B, [stored([1, 2])])
        assert overlaps(index, [1, 2, 3, 4]) == {A: 2, B: 1}
        assert index.tree_size(A) == 3
        index.apply(A, [stored([5, 6, 7, 8], own=20)])
        index.apply(A, [stored([5, 6], own=20)], rank=1)
        assert overlaps(index, [5, 6, 7, 8]) == {A: 2}

    def test_ranks_are_emptied_separately(self) -> None:
        index = follow(A)
        index.apply(A, [stored([1, 2])], rank=1)
        index.apply(A, [stored([1, 2])])
        index.apply(A, [AllBlocksCleared()], rank=1)
        assert overlaps(index, [1, 2]) == {A: 1}
        index.forget(A)
        assert overlaps(index, [1, 2]) == {}

    def test_ranks_that_are_targets_have_a_cache_each(self) -> None:
        index = follow(B)
        index.separate(A, separate=True)
        for rank in range(3):
            index.reset(A, rank, complete=True)
        index.apply(A, [stored([1, 2])])
        index.apply(A, [stored([1, 2, 3, 4])], rank=2)
        assert overlaps(index, [1, 2, 3, 4]) == {A: 1, f"{A}@2": 2}
        assert (index.block_size(f"{A}@2"), index.block_size(f"{A}@1"), index.tree_size(A)) == (2, None, 3)
        index.reset(A, 1, complete=False)
        assert [index.tracked(name) for name in (A, f"{A}@1", f"{A}@2", f"{A}@3")] == [True, False, True, False]
        index.forget_target(f"{A}@2")
        assert overlaps(index, [1, 2, 3, 4]) == {A: 1}
        index.forget(A)
        assert overlaps(index, [1, 2, 3, 4]) == {}
        assert not index.is_separate(A)

    def test_a_target_with_all_caches_forgets_all_of_them(self) -> None:
        index = follow(A)
        index.apply(A, [stored([1, 2])], rank=1)
        index.forget_target(A)
        index.forget_target(A)  # repeating it is no error
        assert overlaps(index, [1, 2]) == {}
        assert index._caches == {}


class TestNamespaces:
    def test_an_adapters_blocks_are_its_own(self) -> None:
        index = follow(A)
        index.apply(A, [stored([1, 2], lora_name="x"), stored([3, 4], own=5, lora_id=7)])
        assert overlaps(index, [1, 2]) == {}
        assert overlaps(index, [1, 2], "x") == {A: 1}
        assert overlaps(index, [3, 4], "7") == {A: 1}

    def test_salted_blocks_count_for_requests_of_their_salt_alone(self) -> None:
        index = follow(A)
        index.apply(A, [stored([1, 2], cache_salt="s")])
        assert overlaps(index, [1, 2]) == {}
        assert index.overlaps([1, 2], salt="t") == {}
        assert index.overlaps([1, 2], salt="s") == {A: 1}
        assert index.tree_size(A) == 1

    def test_vllm_tells_a_salt_with_the_first_block(self) -> None:
        """Beside the adapter's name, and the pictures, of any block."""
        index = follow(A)
        index.apply(A, [stored([1, 2, 3, 4], extra_keys=[["s"], None])])
        index.apply(A, [stored([1, 2], own=9, lora_name="x", extra_keys=[["x", ["picture", 3], "s"]])])
        index.apply(A, [stored([7, 8], own=20, lora_name="x", extra_keys=[["x"]])])
        assert index.overlaps([1, 2, 3, 4], salt="s") == {A: 2}
        assert index.overlaps([1, 2, 3, 4], "x", "s") == {A: 1}
        assert index.overlaps([7, 8], "x") == {A: 1}
        assert overlaps(index, [1, 2, 3, 4]) == {}

    def test_pairs_are_the_ids_of_the_prompt(self) -> None:
        """With EAGLE, an event has each id with the next one."""
        index = follow(A)
        index.apply(A, [stored([(1, 2), (2, 3), (3, 4), (4, 5)])])
        assert overlaps(index, [1, 2, 3, 4]) == {A: 2}


class TestTiers:
    def test_a_block_counts_while_it_is_on_any_tier(self) -> None:
        index = follow(A)
        index.apply(A, [stored([1, 2, 3, 4]), stored([1, 2], medium="CPU_PINNED"), BlockRemoved([0, 1], "GPU")])
        assert overlaps(index, [1, 2, 3, 4]) == {A: 1}
        index.apply(A, [stored([1, 2], medium="GPU"), BlockRemoved([0], "CPU_PINNED")])
        assert overlaps(index, [1, 2]) == {A: 1}
        assert index._caches[A][0].tiers == {}
        index.apply(A, [BlockRemoved([0], "GPU")])
        assert overlaps(index, [1, 2]) == {}

    def test_a_shared_pool_does_not_count(self) -> None:
        index = follow(A)
        index.apply(A, [stored([1, 2], medium="EXTERNAL"), stored([3, 4], own=5), BlockRemoved([5], "EXTERNAL")])
        assert overlaps(index, [1, 2]) == {}
        assert overlaps(index, [3, 4]) == {A: 1}

    def test_unknown_blocks_leave_no_trace(self) -> None:
        index = follow(A)
        index.apply(A, [BlockRemoved([1], "CPU_PINNED"), stored([1, 2]), BlockRemoved([7, 8], "CPU_PINNED")])
        assert index._caches[A][0].tiers == {}
        assert overlaps(index, [1, 2]) == {A: 1}

    def test_an_emptied_cache_is_empty_everywhere(self) -> None:
        index = follow(A)
        index.apply(A, [stored([1, 2], medium="DISK"), AllBlocksCleared()])
        assert overlaps(index, [1, 2]) == {}

    def test_what_another_process_had_on_a_tier_is_gone_with_it(self) -> None:
        index = follow(A)
        index.apply(A, [stored([1, 2], medium="CPU_PINNED")])
        index.reset(A, complete=True)
        index.apply(A, [stored([1, 2]), BlockRemoved([0], "GPU")])
        assert overlaps(index, [1, 2]) == {}


FULL = {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}
WINDOW = {"group_idx": 0, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 4}
STATE = {"group_idx": 2, "kv_cache_spec_kind": "mamba"}


def kept(own: Sequence[int], ids: Sequence[int], layers: dict[str, Any], **more: Any) -> BlockStored:
    """Return an event as vLLM has it for layers that keep only some blocks of a prompt: it has fewer hashes than blocks."""
    return BlockStored(list(own), None, list(ids), 2, **layers, **more)


class TestHybrids:
    """Models of vLLM with several kinds of layers, each with a cache of its own."""

    def test_a_request_goes_on_where_all_layers_can(self) -> None:
        index = follow(A)
        # A window of 4 ids reaches back 3, which lie in 2 blocks.
        index.apply(A, [kept([3, 4], range(10), WINDOW), stored(range(10), **FULL)])
        assert overlaps(index, range(12)) == {A: 5}
        assert overlaps(index, range(8)) == {}
        index.apply(A, [kept([2], range(6), WINDOW)])
        assert overlaps(index, range(8)) == {A: 4}
        assert index.tracked(A)
        assert index.counts == {}

    def test_a_window_that_reaches_the_start_is_whole(self) -> None:
        index = follow(A)
        index.apply(A, [stored(range(2), **FULL), stored(range(2), **WINDOW)])
        assert overlaps(index, range(10)) == {A: 1}

    def test_layers_of_which_no_event_tells_the_reach_need_all(self) -> None:
        for number, kind in enumerate(("chunked_local_attention", "unknown")):
            chunks = {"group_idx": 3 + number, "kv_cache_spec_kind": kind}
            index = follow(A)
            index.apply(A, [kept([2, 3], range(10), chunks), stored(range(10), **FULL)])
            assert overlaps(index, range(10)) == {}
            index.apply(A, [kept([0, 1], range(10), chunks)])
            assert overlaps(index, range(10)) == {A: 4}

    def test_a_state_is_needed_at_its_place_alone(self) -> None:
        index = follow(A)
        index.apply(A, [stored(range(10), **FULL), kept([2], range(10), STATE)])
        assert overlaps(index, range(10)) == {A: 3}

    def test_other_layers_with_full_attention_need_all_blocks(self) -> None:
        index = follow(A)
        index.apply(A, [stored(range(10), **FULL), kept([0, 1, 3, 4], range(10), {**FULL, "group_idx": 3})])
        assert overlaps(index, range(10)) == {A: 2}

    def test_blocks_leave_the_layers_that_drop_them(self) -> None:
        index = follow(A)
        index.apply(A, [kept([1, 2], range(6), WINDOW), stored(range(6), **FULL), kept([1, 2], range(6), STATE)])
        index.apply(A, [BlockRemoved([2], group_idx=2)])
        assert overlaps(index, range(6)) == {}  # of the two blocks before the state, the window lacks one
        index.apply(A, [kept([0], range(2), WINDOW)])
        assert overlaps(index, range(6)) == {A: 2}
        index.apply(A, [BlockRemoved([1], group_idx=1)])
        assert overlaps(index, range(6)) == {}
        assert index.tree_size(A) == 2

    def test_a_worker_that_tells_of_windows_alone_is_not_known(self) -> None:
        index = follow(A)
        index.apply(A, [kept([3, 4], range(10), WINDOW)])
        assert overlaps(index, range(10)) == {}
        assert not index.tracked(A)
        index.apply(A, [kept([], range(10, 12), WINDOW), stored(range(10), **FULL)])
        assert index.tracked(A)

    def test_a_place_far_from_the_end_does_not_count(self) -> None:
        index = follow(A)
        index.apply(A, [stored(range(600), **FULL), kept([99], range(600), STATE)])
        assert overlaps(index, range(600)) == {}
        assert overlaps(index, range(400)) == {A: 100}

    def test_each_copy_of_a_block_leaves_by_itself(self) -> None:
        """Where a request could not go on in all layers, it computed the prefix anew, and its blocks are cached twice."""
        index = follow(A)
        for layers in (FULL, STATE) * 2:
            index.apply(A, [stored(range(4), **layers)])
        assert index.tree_size(A) == 2
        for layers in (FULL, STATE):
            index.apply(A, [BlockRemoved([0, 1], "GPU", layers["group_idx"])])
        assert overlaps(index, range(4)) == {A: 2}
        index.apply(A, [BlockRemoved([1], "GPU", 2)])
        assert overlaps(index, range(4)) == {A: 1}
        index.apply(A, [BlockRemoved([0, 1], "GPU", 1)])
        assert overlaps(index, range(4)) == {}
        assert index.tree_size(A) == 0

    def test_a_worker_that_does_not_tell_of_layers_tells_of_no_copies(self) -> None:
        index = follow(A)
        index.apply(A, [stored(range(4)), stored(range(4)), BlockRemoved([0, 1])])
        assert overlaps(index, range(4)) == {}

    def test_another_process_may_have_its_layers_in_another_order(self) -> None:
        index = follow(A)
        index.apply(A, [stored(range(4), **FULL), stored(range(4), **WINDOW)])
        index.reset(A, complete=True)
        window, full = {**WINDOW, "group_idx": 1}, {**FULL, "group_idx": 0}
        index.apply(A, [stored(range(8), **full), kept([2, 3], range(8), window)])
        assert overlaps(index, range(8)) == {A: 4}
        assert index.tracked(A)

    def test_other_workers_count_as_before(self) -> None:
        index = follow(A, B)
        index.apply(A, [stored(range(4), **FULL), kept([0], range(2), STATE)])
        index.apply(B, [stored(range(4))])
        assert overlaps(index, range(4)) == {A: 1, B: 2}


class Hybrid(RuleBasedStateMachine):
    """One worker with three kinds of layers. The oracle: how many copies of a prompt's blocks each has, and vLLM's rule."""

    LAYERS: ClassVar = {0: WINDOW, 1: FULL, 2: STATE}
    REACH: ClassVar = {0: 2, 1: 6, 2: 1}

    @initialize()
    def begin(self) -> None:
        self.index = follow(A)
        self.held: dict[int, Counter[int]] = {}

    @rule(begin=st.integers(0, 5), end=st.integers(1, 6))
    def store(self, begin: int, end: int) -> None:
        parent = begin - 1 if begin else None
        ids = [own for own in range(begin, end) for _ in range(2)]
        self.index.apply(A, [stored(ids, own=begin, parent=parent, **FULL)])
        held = self.held.setdefault(1, Counter())
        if parent is None or held[parent]:
            held.update(range(begin, end))

    @rule(group=st.sampled_from([0, 2]), owns=st.lists(st.integers(0, 5), max_size=4, unique=True))
    def keep(self, group: int, owns: list[int]) -> None:
        self.index.apply(A, [kept(owns, range(12), self.LAYERS[group])])
        self.held.setdefault(group, Counter()).update(owns)

    @rule(group=st.integers(0, 2), owns=st.lists(st.integers(0, 6), max_size=3))
    def remove(self, group: int, owns: list[int]) -> None:
        if group in self.held:  # no layers drop blocks that they never had
            self.index.apply(A, [BlockRemoved(owns, group_idx=group)])
            self.held[group] -= Counter(owns)

    @rule()
    def clear(self) -> None:
        self.index.apply(A, [AllBlocksCleared()])
        self.held = {}

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "index"):
            return
        fits = [
            end
            for end in range(1, 7)
            if 1 in self.held
            and all({*range(max(end - self.REACH[group], 0), end)} <= held.keys() for group, held in self.held.items())
        ]
        assert overlaps(self.index, [own for own in range(6) for _ in range(2)]) == ({A: fits[-1]} if fits else {})
        assert self.index.tree_size(A) == len(self.held.get(1, ()))


TestHybridStress = Hybrid.TestCase
TestHybridStress.settings = settings(max_examples=examples(60), stateful_step_count=30)


class Tiers(RuleBasedStateMachine):
    """One worker whose blocks move between GPU and host. The oracle: where each block is."""

    @initialize()
    def begin(self) -> None:
        self.index = follow(A)
        self.where: dict[int, set[str]] = {}

    # Blocks 0, 1, 2 of one prompt: a block is stored only where its parent is.
    @rule(own=st.integers(0, 2), medium=st.sampled_from(["GPU", "CPU_PINNED", "DISK"]))
    def store(self, own: int, medium: str) -> None:
        parent = own - 1 if own else None
        self.index.apply(A, [stored([own, own], own=own, parent=parent, medium=medium)])
        if parent is None or parent in self.where:
            self.where.setdefault(own, set()).add(medium)

    @rule(
        names=st.lists(st.integers(0, 3), max_size=3), medium=st.sampled_from([None, "CPU_PINNED", "DISK", "EXTERNAL"])
    )
    def remove(self, names: list[int], medium: str | None) -> None:
        self.index.apply(A, [BlockRemoved(names, medium)])
        for own in names:
            places = self.where.get(own, set())
            places.discard(medium or "GPU")
            if not places:
                self.where.pop(own, None)

    @rule()
    def clear(self) -> None:
        self.index.apply(A, [AllBlocksCleared()])
        self.where.clear()

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "index"):
            count = next((number for number in range(3) if number not in self.where), 3)
            assert overlaps(self.index, [0, 0, 1, 1, 2, 2]) == ({A: count} if count else {})
            assert self.index.tree_size(A) == len(self.where)


TestTierStress = Tiers.TestCase
TestTierStress.settings = settings(max_examples=examples(60), stateful_step_count=30)
