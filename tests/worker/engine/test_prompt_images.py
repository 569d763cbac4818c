"""Where images are in a prompt, and what the cache makes of them."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from worker.engine.prefix_cache import PrefixCache
from worker.engine.prompt_images import digest_of, expanded, keyed, length_of

PAD = 7


def commonprefix(lists: Sequence[list[int]]) -> list[int]:
    shortest = min(map(len, lists))
    return next(
        lists[0][:size] for size in range(shortest, -1, -1) if all(one[:size] == lists[0][:size] for one in lists)
    )


IDS = st.lists(st.integers(5, 8), max_size=12)
DIGESTS = st.lists(st.sampled_from([digest_of(b"%d" % number) for number in range(3)]), max_size=6)


@given(IDS, DIGESTS)
def test_the_runs_stand_where_their_placeholders_stood(ids: list[int], digests: list[str]) -> None:
    found, images = expanded(ids, digests, PAD)
    assert [image.digest for image in images] == digests[: ids.count(PAD)]
    collapsed = list(found)
    for image in reversed(images):
        assert image.length == length_of(image.digest)
        assert found[image.start : image.start + image.length] == [PAD] * image.length
        collapsed[image.start : image.start + image.length] = [PAD]
    assert collapsed == ids


@given(IDS, DIGESTS, IDS, DIGESTS)
def test_keyed_ids_are_equal_if_ids_and_images_are(
    ids: list[int], digests: list[str], others: list[int], other_digests: list[str]
) -> None:
    one, two = expanded(ids, digests, PAD), expanded(others, other_digests, PAD)
    assert (keyed(*one) == keyed(*two)) == (one == two)


@given(st.lists(IDS, max_size=6), IDS)
def test_the_cache_finds_the_longest_prefix(known: list[list[int]], asked: list[int]) -> None:
    cache, off = PrefixCache(on=True), PrefixCache(on=False)
    for ids in known:
        cache.add(ids)
        off.add(ids)
    longest = max((len(commonprefix([ids, asked])) for ids in known), default=0)
    assert cache.match(asked) == max(0, min(longest, len(asked) - 1))
    assert off.match(asked) == 0
    cache.clear()
    assert cache.match(asked) == 0
