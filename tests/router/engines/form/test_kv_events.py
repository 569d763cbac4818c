"""Batches of KV events."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.engines.form.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    UnreadableBatchError,
    parts,
    read_batch,
)

encode = msgspec.msgpack.encode
URL = "http://10.0.0.7:30001"

SEEN = {
    "type": "BlockStored",
    "block_hashes": [-4364474873889267899],
    "parent_block_hash": 8220981200828417142,
    "token_ids": [148, 149],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
}
"""As SGLang 0.5.23 wrote it."""


class TestBatches:
    def test_maps(self) -> None:
        batch = read_batch(
            encode([12.5, [SEEN, {"type": "BlockRemoved", "block_hashes": [5]}, {"type": "AllBlocksCleared"}], 3])
        )
        assert (batch.ts, batch.attn_dp_rank) == (12.5, 3)
        assert list(batch.events) == [
            BlockStored([-4364474873889267899], 8220981200828417142, [148, 149], 2, None, "GPU"),
            BlockRemoved([5]),
            AllBlocksCleared(),
        ]

    def test_hashes_as_bytes(self) -> None:
        """vLLM sends them so with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0."""
        whole = [bytes(range(at, at + 32)) for at in (0, 1, 2)]
        numbers = [int.from_bytes(one, "big") & (1 << 64) - 1 for one in whole]
        stored = {**SEEN, "block_hashes": whole[1:], "parent_block_hash": whole[0], "token_ids": [1, 2, 3, 4]}
        events = [stored, {"type": "BlockRemoved", "block_hashes": [5, whole[2]]}]
        as_arrays = [["BlockStored", whole[:1], None, [7, 8], 2], ["BlockRemoved", whole[:1]]]
        seen = [*read_batch(encode([1, events])).events, *read_batch(encode([1, as_arrays])).events]
        assert [one.block_hashes for one in seen if not isinstance(one, AllBlocksCleared)] == [
            numbers[1:],
            [5, numbers[2]],
            numbers[:1],
            numbers[:1],
        ]
        assert isinstance(seen[0], BlockStored)
        assert seen[0].parent_block_hash == numbers[0]

    def test_arrays(self) -> None:
        stored, removed, cleared = read_batch(
            encode(
                [
                    1,
                    [
                        ["BlockStored", [1], None, [7, 8], 2, None, "CPU_PINNED"],
                        ["BlockRemoved", [1]],
                        ["AllBlocksCleared"],
                    ],
                ]
            )
        ).events
        assert isinstance(stored, BlockStored)
        assert (stored.block_hashes, stored.parent_block_hash, stored.token_ids) == ([1], None, [7, 8])
        assert stored.medium == "CPU_PINNED"
        assert isinstance(removed, BlockRemoved)
        assert removed.block_hashes == [1]
        assert isinstance(cleared, AllBlocksCleared)

    def test_unknown_fields_of_newer_workers_are_ignored(self) -> None:
        batch = read_batch(encode([1.0, [{**SEEN, "lora_name": "x", "newer": 1}], 0, "newer"]))
        (event,) = batch.events
        assert isinstance(event, BlockStored)
        assert event.lora_name == "x"

    def test_pairs_of_ids(self) -> None:
        (event,) = read_batch(encode([1.0, [{**SEEN, "token_ids": [(1, 2), (2, 3)]}], 0])).events
        assert isinstance(event, BlockStored)
        assert event.token_ids == [(1, 2), (2, 3)]

    @given(st.binary() | st.recursive(st.none() | st.integers(0, 9) | st.text(max_size=3), st.lists).map(encode))
    def test_anything_else_is_refused(self, payload: bytes) -> None:
        with contextlib.suppress(UnreadableBatchError):
            assert not read_batch(payload).events


class TestParts:
    @given(count=st.integers(1, 40), size=st.integers(1, 4), most=st.integers(1, 12), parent=st.none() | st.just(-5))
    def test_parts_continue_each_other(self, count: int, size: int, most: int, parent: int | None) -> None:
        whole = BlockStored(list(range(count)), parent, list(range(count * size)), size, None, "GPU", "salt")
        found = [part for part in parts(whole, most) if isinstance(part, BlockStored)]
        assert [own for part in found for own in part.block_hashes] == whole.block_hashes
        assert [one for part in found for one in part.token_ids] == whole.token_ids
        assert [part.parent_block_hash for part in found] == [parent, *(part.block_hashes[-1] for part in found[:-1])]
        for part in found:
            assert len(part.block_hashes) <= most
            assert len(part.token_ids) == size * len(part.block_hashes)
            assert (part.block_size, part.medium, part.cache_salt) == (size, "GPU", "salt")

    @pytest.mark.parametrize("ids", [[1], list(range(100))])
    def test_a_malformed_event_stays_malformed(self, ids: list[int]) -> None:
        *_, last = parts(BlockStored([1, 2, 3], None, list(ids), 2), 2)
        assert isinstance(last, BlockStored)
        assert len(last.token_ids) != 2 * len(last.block_hashes)

    def test_removed_blocks_are_split(self) -> None:
        found = list(parts(BlockRemoved([*range(5)], "CPU_PINNED"), 2))
        assert found == [BlockRemoved(hashes, "CPU_PINNED") for hashes in ([0, 1], [2, 3], [4])]

    @pytest.mark.parametrize("event", [AllBlocksCleared(), BlockRemoved([]), BlockRemoved([1, 2])])
    def test_small_events_are_not_split(self, event: BlockRemoved | AllBlocksCleared) -> None:
        assert list(parts(event, 2)) == [event]
