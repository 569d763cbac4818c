"""Prefix trees, whose cost must not depend on the number of workers. Aim: 15 us for a match or insertion of 16,000 characters.

Every worker has the same conversation of 16 turns, so all of them hold every node: the worst case.
"""

from __future__ import annotations

import itertools
import random
from array import array

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from router.prefix_tree.tree import StringTree, TokenTree
from tests.router.prefix_tree.recount import check

TURNS = 16
CHARACTERS = [4_000, 16_000, 64_000]
WORKERS = [10, 100, 500]


def text(characters: int, seed: int = 0) -> str:
    return "".join(random.Random(seed).choices("abcdefghijklmnopqrstuvwxyz ", k=characters))


def names(workers: int) -> list[str]:
    return [f"http://worker-{number}:30000" for number in range(workers)]


def filled(characters: int, workers: int) -> tuple[StringTree, str]:
    tree, key = StringTree(), text(characters)
    turn = characters // TURNS
    for name, end in itertools.product(names(workers), range(turn, characters + 1, turn)):
        tree.insert(key[:end], name)
    return tree, key


def filled_ids(ids: int, workers: int) -> tuple[TokenTree, array[int]]:
    tree, key = TokenTree(), array("i", random.Random(0).choices(range(150_000), k=ids))
    turn = ids // TURNS
    for name, end in itertools.product(names(workers), range(turn, ids + 1, turn)):
        tree.insert(key[:end], name)
    return tree, key


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("characters", CHARACTERS)
def test_match(benchmark: BenchmarkFixture, characters: int, workers: int) -> None:
    tree, key = filled(characters, workers)
    assert benchmark(tree.match, key + " And then?").matched == characters


@pytest.mark.parametrize("workers", WORKERS)
def test_descend(benchmark: BenchmarkFixture, workers: int) -> None:
    tree, key = filled(16_000, workers)
    assert len(benchmark(tree.descend, key + " And then?").path[-1].tenants) == workers


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("characters", CHARACTERS)
def test_insert_next_turn(benchmark: BenchmarkFixture, characters: int, workers: int) -> None:
    """The conversation goes on, with a new leaf each time."""
    tree, key = filled(characters, workers)
    turns = (((f"{key} turn {number}", name), {}) for number, name in enumerate(itertools.cycle(names(workers))))
    benchmark.pedantic(tree.insert, setup=lambda: next(turns), rounds=2_000)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("characters", CHARACTERS)
def test_insert_and_split(benchmark: BenchmarkFixture, characters: int, workers: int) -> None:
    """The first key that leaves the common edge: bisection finds the place, and all tenants are copied."""
    name = names(workers)[0]

    def setup() -> tuple[tuple, dict]:
        tree = StringTree()
        for each in names(workers):
            tree.insert(key, each)
        return (tree,), {}

    key = text(characters)
    other = key[: characters // 3] + "!"
    benchmark.pedantic(lambda tree: tree.insert(other, name), setup=setup, rounds=100)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("ids", [1_024, 4_096, 16_384])
def test_match_ids(benchmark: BenchmarkFixture, ids: int, workers: int) -> None:
    """Ids as 32-bit integers, as the middleware has them."""
    tree, key = filled_ids(ids, workers)
    assert benchmark(tree.match, memoryview(key)).matched == ids


@pytest.mark.parametrize("ids", [1_024, 4_096, 16_384])
def test_match_a_list_of_ids(benchmark: BenchmarkFixture, ids: int) -> None:
    """Ids that a client sent as JSON have to be packed."""
    tree, key = filled_ids(ids, 10)
    assert benchmark(tree.match, key.tolist()).matched == ids


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("ids", [1_024, 4_096, 16_384])
def test_insert_ids(benchmark: BenchmarkFixture, ids: int, workers: int) -> None:
    tree, key = filled_ids(ids, workers)
    last = array("i", range(16))

    def setup() -> tuple[tuple, dict]:
        number = next(numbers)
        last[0] = -number
        return (memoryview(key + last), f"http://worker-{number % workers}:30000"), {}

    numbers = itertools.count(1)
    benchmark.pedantic(tree.insert, setup=setup, rounds=2_000)


def crowded(workers: int, leaves: int = 20_000) -> StringTree:
    """Return a tree of many conversations under one system prompt."""
    tree, prompt, each = StringTree(), text(4_000), names(workers)
    for number in range(leaves):
        tree.insert(f"{prompt}{number:06} and so on", each[number % workers])
    return tree


@pytest.mark.parametrize("workers", WORKERS)
def test_evict_a_leaf(benchmark: BenchmarkFixture, workers: int) -> None:
    """The least recently used of 20,000 leaves."""
    tree = crowded(workers)
    tenants = itertools.cycle(names(workers))
    benchmark.pedantic(
        tree.evict, setup=lambda: ((name := next(tenants), tree.tenant_size(name) - 1), {}), rounds=2_000
    )
    check(tree)


@pytest.mark.parametrize("workers", WORKERS)
def test_remove_a_worker(benchmark: BenchmarkFixture, workers: int) -> None:
    """A worker with its share of 20,000 leaves."""
    tree = crowded(workers)
    tenants = iter(names(workers))
    benchmark.pedantic(tree.remove_tenant, setup=lambda: ((next(tenants),), {}), rounds=5)


def test_snapshot(benchmark: BenchmarkFixture) -> None:
    """20,000 leaves, to bytes and back."""
    tree = crowded(100)
    assert benchmark.pedantic(lambda: StringTree.load(tree.dump()), rounds=3).size == tree.size
