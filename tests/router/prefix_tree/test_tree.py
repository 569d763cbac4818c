"""Prefix trees: keys of every size and kind, and the order of eviction."""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from router.prefix_tree.node import common_length
from router.prefix_tree.tree import PAGE, ExactTokenTree, Match, StringTree, TokenTree
from tests.router.prefix_tree.recount import check, entries

LONG = "".join(random.Random(1).choices("abcdefgh ", k=10_000))
A, B, C = (f"http://{name}:1" for name in "abc")


def text_tree(*keys: tuple[str, str]) -> StringTree:
    tree = StringTree()
    for key, tenant in keys:
        tree.insert(key, tenant)
        check(tree)
    return tree


def pages(*numbers: int) -> list[int]:
    return [number for number in numbers for _ in range(PAGE)]


def held(tree: StringTree) -> dict[str, list[str]]:
    return {key: sorted(tenants) for key, tenants in entries(tree)}


def test_the_last_user_of_the_longest_match_is_found() -> None:
    tree = text_tree(("You are a poet", A), ("You are a judge", B), ("You are a judge", C))
    assert tree.match("You are a jury") == Match(C, 12, 14)
    assert tree.match("You are a poem").tenant == A
    assert tree.match("You are").tenant == C
    tree.insert("You", A)
    assert tree.match("You").tenant == A
    assert tree.match("You are").tenant == C
    assert tree.match("They are").tenant is None


def test_matching_does_not_make_a_prefix_look_used() -> None:
    tree = text_tree(("one", A), ("two", A))
    assert tree.match("one").tenant == A
    assert tree.evict(A, 3) == 3
    assert held(tree) == {"two": [A]}


def test_a_descent_shows_the_holders_and_lengths() -> None:
    tree = text_tree(("system", A), ("system", B), ("system, more", C), ("system, more", A))
    descent = tree.descend("system, mo!")
    assert [(node.end, list(node.tenants)) for node in descent.path] == [(6, [B, C, A]), (12, [C, A])]
    assert (descent.matched, descent.cut) == (10, 4)
    assert tree.descend("what").path == []


def test_a_descent_can_be_followed_even_after_the_tree_has_changed() -> None:
    tree = text_tree(("one more", A), ("one", B))
    node = tree.follow(tree.descend("one two"), C)
    assert node is not None
    assert (node.edge, node.end, list(node.tenants)) == ("two", 7, [C])
    descent = tree.descend("one more")
    for tenant in (A, B, C):
        tree.remove_tenant(tenant)
    tree.follow(descent, C)
    check(tree)
    assert held(tree) == {"one more": [C]}


def test_an_empty_key_matches_nothing() -> None:
    tree = text_tree(("", A))
    assert tree.match("") == Match(None, 0, 0)
    assert tree.follow(tree.descend(""), B) is None
    assert (tree.tenant_sizes(), tree.nodes, list(entries(tree))) == ({}, 0, [])


@pytest.mark.parametrize("length", [1, PAGE - 1])
def test_an_incomplete_page_is_ignored(length: int) -> None:
    tree = TokenTree()
    tree.insert([7] * length, A)
    assert (tree.tenant_sizes(), tree.nodes) == ({}, 0)
    tree.insert(pages(1, 2) + [7] * length, A)
    assert tree.tenant_sizes() == {A: 2 * PAGE}
    assert tree.match(pages(1, 2) + [7] * length) == Match(A, 2 * PAGE, 2 * PAGE + length)


def test_pages_match_whole_or_not() -> None:
    tree = TokenTree()
    tree.insert(pages(1, 2, 3), A)
    other = pages(1, 2, 3)
    other[2 * PAGE - 1] = 9
    assert tree.match(other) == Match(A, PAGE, 3 * PAGE)
    tree.insert(other, B)
    check(tree)
    assert tree.tenant_sizes() == {A: 3 * PAGE, B: 3 * PAGE}
    assert [(len(key), len(tenants)) for key, tenants in entries(tree)] == [(PAGE, 2), (3 * PAGE, 1), (3 * PAGE, 1)]


@pytest.mark.parametrize(
    "kind",
    [
        list,
        tuple,
        lambda ids: array("i", ids),
        lambda ids: array("I", ids),
        lambda ids: array("q", ids),
        lambda ids: memoryview(array("i", ids)),
        lambda ids: memoryview(array("q", ids)),
        lambda ids: array("i", ids).tobytes(),
    ],
)
def test_ids_may_come_in_any_form(kind: Any) -> None:
    ids: Sequence[int] = [*range(40), 151_643, 0, 2**31, 2**32 - 1, *range(20)] if kind in (list, tuple) else range(64)
    tree = TokenTree()
    tree.insert(kind(ids), A)
    assert tree.match(list(ids)) == Match(A, 64, 64)
    assert list(entries(tree)) == [(list(ids), {A: 1})]


@pytest.mark.parametrize("ids", [[2**32], [-1], ["1"], [1.0], b"abc"])
def test_invalid_keys_are_refused(ids: Any) -> None:
    tree = TokenTree()
    with pytest.raises(ValueError, match=r"32"):
        tree.insert(ids, A)


@pytest.mark.parametrize("cut", [1, 2, 4_999, 5_000, 5_001, 9_998, 9_999])
@pytest.mark.parametrize("other", ["!", "é", "…", "😀"])
def test_a_key_can_leave_a_long_edge_at_any_character(cut: int, other: str) -> None:
    tree = text_tree((LONG, A), (LONG[:cut] + other + LONG[cut:], B))
    assert tree.tenant_sizes() == {A: 10_000, B: 10_001}
    assert tree.match(LONG[:cut] + "?") == Match(B, cut, cut + 1)
    assert tree.match(LONG) == Match(A, 10_000, 10_000)
    assert tree.match(LONG[:cut] + other + LONG[cut:] + "?") == Match(B, 10_001, 10_002)


@pytest.mark.parametrize("cut", [1, 2, 312, 313, 624])
def test_a_key_can_leave_a_long_edge_at_any_page(cut: int) -> None:
    ids = list(range(PAGE * 625))
    other = ids.copy()
    other[PAGE * cut] = 5_000_000
    tree = TokenTree()
    tree.insert(ids, A)
    assert tree.match(other) == Match(A, PAGE * cut, len(ids))
    tree.insert(other, B)
    check(tree)
    assert tree.tenant_sizes() == {A: len(ids), B: len(ids)}
    assert tree.match(other) == Match(B, len(ids), len(ids))


def test_bisection_finds_the_exact_place() -> None:
    """At every length, with the edge or the key being the shorter one."""
    for cut in range(1, 300):
        edge = LONG[: cut + cut % 3] if cut % 2 else LONG[:300]
        key = "before" + LONG[:cut] + "!" * (cut % 5)
        assert common_length(key, 6, edge, 1) == cut
        assert common_length(key.encode() * 4, 6, edge.encode(), 4) == cut // 4 * 4


def test_units_are_code_points() -> None:
    """Neither bytes nor UTF-16: an emoji counts one, a flag two, a lone surrogate, which JSON can spell, one."""
    tree = text_tree(("a😀é", A), ("a😀🇩🇪", B), ("a\ud83d", C))
    assert tree.tenant_sizes() == {A: 3, B: 4, C: 2}
    assert tree.match("a😀🇩🇫") == Match(B, 3, 4)
    assert tree.match("a\ud83d\ude00") == Match(C, 2, 3)
    assert held(tree)["a😀"] == [A, B]


def test_single_characters_and_a_branch_for_each() -> None:
    tree = text_tree(*((chr(code), A) for code in (0, 65, 255, 256, 0xFFFF, 0x10000, 0x10FFFF)))
    assert tree.nodes == tree.tenant_size(A) == 7
    assert tree.match("\U0010ffff!") == Match(A, 1, 2)


def test_a_hundred_tenants_on_one_path() -> None:
    tenants = [f"http://w{number}:1" for number in range(100)]
    tree = StringTree()
    for tenant, length in itertools.product(tenants, (1_000, 4_000, 10_000)):
        tree.insert(LONG[:length], tenant)
    tree.insert(LONG[:2_500] + "!", tenants[7])
    check(tree)
    assert tree.nodes == 5
    assert tree.tenant_size(tenants[0]) == 10_000
    assert tree.tenant_size(tenants[7]) == 10_001
    assert tree.size == 1_000_001
    for tenant in tenants[:50]:
        tree.remove_tenant(tenant)
    check(tree)
    assert sorted(tree.descend(LONG).path[-1].tenants) == sorted(tenants[50:])
    assert tree.nodes == 4  # the branch is gone, but the node at the branch stays


def test_departed_workers_leave_nothing_behind() -> None:
    generator = random.Random(2)
    tree = StringTree()
    for turn in range(300):
        tenant = f"http://w{generator.randrange(20)}:1"
        tree.insert(LONG[: generator.randrange(1, 200)] + str(turn), tenant)
        if turn % 3 == 2:
            gone = f"http://w{generator.randrange(20)}:1"
            assert tree.remove_tenant(gone) >= 0
            assert tree.tenant_size(gone) == tree.remove_tenant(gone) == 0
        check(tree)
    for tenant in list(tree.tenant_sizes()):
        tree.remove_tenant(tenant)
    assert (tree.nodes, tree.size, tree.holdings, tree.root.children) == (0, 0, {}, {})


def test_repeated_insertions_do_not_grow_the_tree() -> None:
    tree = text_tree((LONG, A))
    for _ in range(10_000):
        tree.insert(LONG, A)
        tree.insert(LONG[:10], A)
    check(tree)
    assert (tree.tenant_sizes(), tree.nodes) == ({A: 10_000}, 2)
    assert len(tree.holdings[A]) < 100


def test_a_conversation_of_thousands_of_turns() -> None:
    """Nothing recurses."""
    tree = StringTree()
    for end in range(5, 10_001, 5):
        tree.insert(LONG[:end], A)
    tree.insert(LONG[:5_001], B)
    assert tree.nodes == 2_001
    assert tree.match(LONG) == Match(A, 10_000, 10_000)
    assert sum(1 for _ in entries(tree)) == 2_001
    assert StringTree.load(tree.dump()).dump() == tree.dump()
    check(tree)
    assert tree.remove_tenant(A) == 10_000
    check(tree)
    assert tree.nodes == 1_001
    tree.evict_all(0)
    check(tree)
    assert tree.nodes == 0


def test_leaves_are_evicted_before_their_parents() -> None:
    tree = text_tree(("system: one", A), ("system: two", A), ("else", A))
    tree.insert("system: one", A)
    assert tree.evict(A, 15) == 3
    assert held(tree) == {"else": [A], "system: ": [A], "system: one": [A]}
    assert tree.evict(A, 14) == 4
    assert tree.evict(A, 10) == 3
    assert held(tree) == {"system: ": [A]}
    assert tree.evict(A, 7) == 8
    check(tree)
    assert tree.tenant_sizes() == {}


def test_a_shared_prefix_outlives_its_leaves() -> None:
    tree = text_tree(("system: one", A), ("system: two", A), ("system: two", B))
    tree.evict(A, 8)
    assert held(tree) == {"system: ": [A, B], "system: two": [B]}
    assert tree.evict(A, 7) == 8
    assert held(tree) == {"system: ": [B], "system: two": [B]}
    check(tree)


def test_the_budget_of_a_tree_is_shared() -> None:
    """The least recently used leaf of any tenant goes; no tenant has a limit of its own."""
    tree = text_tree(("aaaa", A), ("bbbb", B), ("cccc", C), ("aaaa", C))
    assert tree.evict_all(16) == 0
    assert tree.evict_all(11) == 8
    assert held(tree) == {"aaaa": [C], "cccc": [C]}
    assert tree.evict_all(0) == 8
    assert tree.tenant_sizes() == {}


def test_trees_and_their_parts_have_a_repr() -> None:
    tree = text_tree(("one", A), (LONG, A))
    assert repr(tree) == "<StringTree 10003 units of 1 tenants in 2 nodes>"
    assert repr(tree.holdings[A]) == "<Holding http://a:1: 10003>"
    assert repr(tree.root.children["o"]) == "<PrefixNode 'one' to 3, 1 tenants, 0 children>"
    assert repr(tree.root.children[LONG[0]]) == f"<PrefixNode {LONG[:20]!r} to 10000, 1 tenants, 0 children>"


def test_the_recount_finds_corruption() -> None:
    for spoil in (
        lambda tree: setattr(tree, "nodes", 7),
        lambda tree: setattr(tree, "ticks", 0),
        lambda tree: setattr(tree.holdings[A], "size", 2),
        lambda tree: tree.root.children["o"].tenants.update({B: 1}),
        lambda tree: tree.root.children["o"].tenants.clear(),
        lambda tree: tree.root.tenants.update({A: 1}),
        lambda tree: tree.holdings[A]._heap.clear(),
        lambda tree: setattr(tree.root.children["o"], "edge", "two"),
        lambda tree: setattr(tree.root.children["o"], "end", 4),
        lambda tree: setattr(tree.root.children["o"], "ends", -1),
        lambda tree: setattr(tree.root.children["o"], "parent", None),
        lambda tree: tree.root.children["o"].children[" "].tenants.update({A: 3}),
    ):
        tree = text_tree(("one", A), ("one more", A))
        spoil(tree)
        with pytest.raises(AssertionError):
            check(tree)


def test_pages_of_one_id_distinguish_short_keys() -> None:
    tree = ExactTokenTree()
    tree.insert([1, 2, 3], A)
    tree.insert([1, 2, 4, 5], B)
    check(tree)
    assert tree.match([1, 2, 3, 9]) == Match(A, 3, 4)
    assert tree.match([1, 2, 4]) == Match(B, 3, 3)
    assert ExactTokenTree.load(tree.dump()).dump() == tree.dump()
