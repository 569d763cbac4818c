"""Snapshots of prefix trees: restarts, merging, and refusals."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any

import blake3
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.prefix_tree.snapshot import SnapshotError
from router.prefix_tree.tree import PAGE, StringTree, TokenTree
from tests.router.prefix_tree.recount import check, entries

A, B = "http://a:1", "http://b:1"
turns = st.lists(st.tuples(st.text("ab😀\ud83d", max_size=8), st.sampled_from([A, B, "http://c:1"])), max_size=12)


def filled(turns: list[tuple[str, str]], before: int = 0) -> StringTree:
    tree = StringTree()
    tree.ticks = before
    for key, tenant in turns:
        tree.insert(key, tenant)
    return tree


def example() -> StringTree:
    return filled([("system: one", A), ("system: two", B), ("sys😀", A)])


def signed(*payload: Any, version: int = 2) -> bytes:
    """Return a snapshot of any content with a valid checksum."""
    packed = msgspec.msgpack.encode(payload)
    return struct.pack("<4sH8s", b"PFXT", version, blake3.blake3(packed).digest(8)) + packed


def test_the_bytes_are_as_documented() -> None:
    tree = filled([("ab", B), ("aé", A)])
    tree.root.children["a"].ends = 3
    nodes = [[b"a", [0, 1, 1, 2], 2, 3], [b"b", [0, 1], 0, 0], ["é".encode(), [1, 2], 0, 0]]
    assert tree.dump() == signed("text", 2, [B, A], nodes)


def test_a_tree_of_ids_has_little_endian_bytes() -> None:
    tree = TokenTree()
    tree.insert([258] * PAGE, A)
    assert tree.dump() == signed("ids", 1, [A], [[b"\2\1\0\0" * PAGE, [0, 1], 0, 0]])
    assert TokenTree.load(tree.dump()).match([258] * PAGE).tenant == A


@given(turns)
def test_a_loaded_tree_is_the_same_tree(turns: list[tuple[str, str]]) -> None:
    tree = filled(turns)
    loaded = StringTree.load(tree.dump())
    check(loaded)
    assert loaded.dump() == tree.dump()
    assert list(entries(loaded)) == list(entries(tree))
    assert loaded.tenant_sizes() == tree.tenant_sizes()
    while tree.size:
        assert loaded.evict_all(tree.size - 1) == tree.evict_all(tree.size - 1)
        assert loaded.dump() == tree.dump()


@given(turns)
def test_the_order_of_insertion_does_not_change_the_bytes(turns: list[tuple[str, str]]) -> None:
    """The children of a node are sorted, so replicas with the same keys have the same bytes."""
    tree = filled(turns)
    other = StringTree()
    for key, accesses in reversed(list(entries(tree))):
        for tenant in accesses:
            other.insert(key, tenant)
    other.merge(tree.dump())
    tree.merge(other.dump())
    assert tree.dump() == other.dump()


@given(turns, turns, st.integers(0, 12))
def test_merging_keeps_the_later_access(one: list[tuple[str, str]], two: list[tuple[str, str]], before: int) -> None:
    """In either direction; and merging a second time changes nothing."""
    left, right = filled(one), filled(two, before)
    snapshots = left.dump(), right.dump()
    left.merge(snapshots[1])
    right.merge(snapshots[0])
    for tree in (left, right):
        check(tree)
    assert left.dump() == right.dump()
    left.merge(snapshots[1])
    left.merge(right.dump())
    assert left.dump() == right.dump()
    for key, accesses in entries(left):
        for tenant, tick in accesses.items():
            assert tick == max(used(snapshot, tenant, key) for snapshot in snapshots)


def used(snapshot: bytes, tenant: str, key: str) -> int:
    """Return when a tenant last used this prefix, or anything that starts with it."""
    found = entries(StringTree.load(snapshot))
    return max((accesses.get(tenant, 0) for longer, accesses in found if longer.startswith(key)), default=0)


def test_time_goes_on_after_a_snapshot() -> None:
    tree = filled([("new", B)])
    tree.merge(filled([("old", A)], before=10).dump())
    tree.insert("newest", B)
    assert dict(entries(tree)) == {"old": {A: 11}, "new": {B: 12}, "newest": {B: 12}}


def test_a_large_tree_survives_a_restart() -> None:
    generator = random.Random(3)
    tree = TokenTree()
    for _ in range(300):
        ids = [generator.randrange(3) for _ in range(4)]
        tree.insert([token for token in ids for _ in range(PAGE)], f"http://w{generator.randrange(100)}:1")
    loaded = TokenTree.load(tree.dump())
    check(loaded)
    assert loaded.dump() == tree.dump()


def test_every_damage_is_found() -> None:
    snapshot = example().dump()
    for at in range(len(snapshot)):
        with pytest.raises(SnapshotError):
            StringTree.load(snapshot[:at])
        with pytest.raises(SnapshotError):
            StringTree.load(snapshot[:at] + bytes([snapshot[at] ^ 4]) + snapshot[at + 1 :])
    with pytest.raises(SnapshotError, match="checksum"):
        StringTree.load(snapshot + b"\0")


@pytest.mark.parametrize(
    ("snapshot", "reason"),
    [
        (b"", "0 bytes are no snapshot"),
        (b"{" * 100, "no snapshot of a prefix tree"),
        (signed("text", 1, [], [], version=1), "of version 1: this router reads version 2"),
        (signed("ids", 0, [], []), "of ids, not of text"),
        (signed("text", "now", [], []), "malformed"),
        (signed("text", 1, [A], [[b"a", [0], 0, 0]]), "cannot be read"),
        (signed("text", 1, [A], [[b"a", [1, 1], 0, 0]]), "cannot be read"),
        (signed("text", 1, [A], [[b"\xff", [0, 1], 0, 0]]), "cannot be read"),
        (signed("text", 1, [A], [[b"", [0, 1], 0, 0]]), "an edge of 0"),
        (signed("text", 1, [A, A], [[b"a", [0, 1], 0, 0]]), "a tenant twice"),
        (signed("text", 1, [A], [[b"a", [0, 1, 0, 1], 0, 0]]), "a tenant twice"),
        (signed("text", 1, [A], [[b"a", [], 0, 0]]), "without any"),
        (signed("text", 1, [A], [[b"a", [0, 2], 0, 0]]), "cannot be"),
        (signed("text", 1, [A], [[b"a", [0, 0], 0, 0]]), "cannot be"),
        (signed("text", 2, [A], [[b"a", [0, 1], 1, 0], [b"b", [0, 2], 0, 0]]), "cannot be"),
        (signed("text", 2, [A, B], [[b"a", [0, 1], 1, 0], [b"b", [1, 1], 0, 0]]), "cannot be"),
        (signed("text", 1, [A], [[b"ab", [0, 1], 0, 0], [b"ac", [0, 1], 0, 0]]), "the same key"),
        (signed("text", 1, [A], [[b"a", [0, 1], 1, 0]]), "ends early"),
        (signed("text", 1, [A], [[b"a", [0, 1], -1, 0]]), "fewer than no children"),
        (signed("text", 1, [A], [[b"a", [0, 1], 0, -1]]), "fewer than no"),
    ],
)
def test_invalid_snapshots_are_refused(snapshot: bytes, reason: str) -> None:
    """The error gives the reason, and the tree is unchanged."""
    tree = example()
    before = tree.dump()
    with pytest.raises(SnapshotError, match=reason):
        tree.merge(snapshot)
    assert tree.dump() == before


@pytest.mark.parametrize("edge", [b"\0" * 63, b"\0" * 68])
def test_edges_of_ids_are_whole_pages(edge: bytes) -> None:
    with pytest.raises(SnapshotError, match="an edge of"):
        TokenTree.load(signed("ids", 1, [A], [[edge, [0, 1], 0, 0]]))


@pytest.mark.parametrize("make", [StringTree, TokenTree])
def test_an_empty_tree_has_a_snapshot(make: Callable[[], StringTree | TokenTree]) -> None:
    tree = make()
    assert type(tree).load(tree.dump()).dump() == tree.dump()
