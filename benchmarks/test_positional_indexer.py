"""The cost of routing by KV events: of an event, and of a match. Linear in blocks, independent of workers."""

from __future__ import annotations

import tracemalloc
from array import array

import msgspec
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from router.engines.form.kv_events import BlockStored, read_batch
from router.kv_cache.block_hashes import content_hashes
from router.kv_cache.index import KvIndex
from router.kv_cache.positional_indexer import PositionalIndexer

PAGE = 16
PER_TOKEN = 4
"""Characters per token, so that sizes compare with those of the prefix trees."""


def prompt(characters: int, seed: int = 0) -> list[int]:
    return [(seed * 7_919 + number * 31) % 150_000 for number in range(characters // PER_TOKEN)]


def event(ids: list[int], own: int = 0, page: int = PAGE) -> BlockStored:
    count = len(ids) // page
    return BlockStored(list(range(own, own + count)), None, list(ids[: count * page]), page, None, "GPU")


def fleet(workers: int, ids: list[int], page: int = PAGE) -> KvIndex:
    """Return an index in which all workers hold a quarter of the prompt and a few hold all of it."""
    index = KvIndex()
    for number in range(workers):
        url = f"http://w{number}:1"
        index.reset(url, complete=True)
        index.apply(url, [event(ids if number % 100 == 0 else ids[: len(ids) // 4], page=page)])
    return index


@pytest.mark.parametrize("workers", [10, 100, 500])
@pytest.mark.parametrize("characters", [4_000, 16_000, 64_000])
def test_overlaps(benchmark: BenchmarkFixture, characters: int, workers: int) -> None:
    """What a decision needs: hash the prompt, find how much of it each worker has."""
    ids = prompt(characters)
    index = fleet(workers, ids)
    packed = array("i", ids)
    found = benchmark(lambda: index.overlaps(packed))
    assert len(found) == workers
    assert found["http://w0:1"] == len(ids) // PAGE


@pytest.mark.parametrize("workers", [10, 100, 500])
@pytest.mark.parametrize("characters", [4_000, 16_000, 64_000])
def test_find_matches(benchmark: BenchmarkFixture, characters: int, workers: int) -> None:
    """The same without the hashing of the contents."""
    ids = prompt(characters)
    contents = list(content_hashes(ids, PAGE))
    index = PositionalIndexer()
    for number in range(workers):
        worker = f"http://w{number}:1"
        index.track(worker)
        index.apply_stored(worker, enumerate(contents if number % 100 == 0 else contents[: len(contents) // 4]))
    assert len(benchmark(lambda: index.find_matches(contents))) == workers


def test_overlaps_of_a_new_prompt(benchmark: BenchmarkFixture) -> None:
    """A prompt that no worker holds costs one block, and the packing of the ids."""
    index = fleet(100, prompt(16_000))
    packed = array("i", prompt(16_000, seed=1))
    assert benchmark(lambda: index.overlaps(packed)) == {}


@pytest.mark.parametrize("page", [1, 16, 64])
def test_overlaps_by_page_size(benchmark: BenchmarkFixture, page: int) -> None:
    """Why workers that publish events should have pages: 4,000 tokens, by the page size."""
    ids = prompt(16_000)
    index = fleet(10, ids, page)
    packed = array("i", ids)
    assert benchmark(lambda: index.overlaps(packed))["http://w0:1"] == len(ids) // page


@pytest.mark.parametrize("workers", [10, 100, 500])
def test_a_turn_is_stored(benchmark: BenchmarkFixture, workers: int) -> None:
    """A batch of one event with 64 new blocks (1,024 tokens), from its bytes on."""
    index = fleet(workers, prompt(16_000))
    numbers = iter(range(10**9))

    def setup() -> tuple[tuple[bytes], dict[str, object]]:
        number = next(numbers)
        ids = prompt(64 * PAGE * PER_TOKEN, seed=1 + number)
        return (msgspec.msgpack.encode([1.0, [event(ids, own=10_000 + 64 * number)], 0]),), {}

    benchmark.pedantic(lambda payload: index.apply("http://w1:1", read_batch(payload).events), setup=setup, rounds=300)


@pytest.mark.parametrize("blocks", [1_000, 100_000])
def test_a_cache_is_emptied(benchmark: BenchmarkFixture, blocks: int) -> None:
    """At every update of the weights, by the whole fleet: it must not depend on what was cached."""
    index = PositionalIndexer()
    index.track("http://w1:1")
    contents = list(range(blocks))

    def setup() -> tuple[tuple[()], dict[str, object]]:
        while index.stale:
            index.apply_removed("http://w1:1", ())
        index.apply_stored("http://w1:1", enumerate(contents))
        return (), {}

    benchmark.pedantic(lambda: index.apply_cleared("http://w1:1"), setup=setup, rounds=20)


def test_memory_of_a_block(benchmark: BenchmarkFixture) -> None:
    """Bytes for each block of a cache, with and without another worker that holds the same."""

    def measure() -> tuple[float, float]:
        contents = list(content_hashes(range(16 * 50_000), 16))
        index = PositionalIndexer()
        for worker in ("http://a:1", "http://b:1"):
            index.track(worker)
        sizes = []
        tracemalloc.start()
        for number, worker in enumerate(("http://a:1", "http://b:1")):
            before = tracemalloc.get_traced_memory()[0]
            index.apply_stored(worker, ((10**9 * (1 + number) + own, content) for own, content in enumerate(contents)))
            sizes.append((tracemalloc.get_traced_memory()[0] - before) / len(contents))
        tracemalloc.stop()
        return sizes[0], sizes[1]

    alone, shared = benchmark.pedantic(measure, rounds=1)
    benchmark.extra_info["bytes per block, alone"] = round(alone)
    benchmark.extra_info["bytes per block, shared"] = round(shared)
    assert shared <= alone < 400
