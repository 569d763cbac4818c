"""A recount of a radix tree's invariants, from nothing."""

from __future__ import annotations

from collections import Counter

from middleware_hub.radix import indexes
from middleware_hub.radix.indexes import IdsIndex, Landmarks
from middleware_hub.radix.node import Generation, RadixNode, every_node
from middleware_hub.radix.records import TreeStats
from middleware_hub.radix.tree import RadixTree
from middleware_hub.spans.chain import TokenSpan, chain_ids, links, unpack_ids


def recount(tree: RadixTree) -> None:
    """Recount everything; AssertionError if an invariant does not hold."""
    roots, stats = tree.roots, tree.stats
    users: Counter[TokenSpan] = Counter()
    spans: set[TokenSpan] = set()
    found = TreeStats()
    generations: list[tuple[Generation, RadixNode, int]] = []
    for node, depth in every_node(roots.values()):
        if node.parent is not None:
            found.nodes += 1
            found.characters += len(node.edge)
            assert node.edge, "an empty edge"
            lone = isinstance(node.children, RadixNode) and node.ends is None and node.contexts is None
            assert not lone, f"a lone child was not merged: {node!r}"
            assert not node.removable, f"a node that stands for nothing: {node!r}"
        for child in node.each_child():
            assert child.parent is node
            assert node.child(child.edge[0]) is child
        for span in node.known_contexts():
            assert span.owner is node
            assert not span.sampled
            assert span.text_end == depth, (span, depth)
            assert span.users > 0, f"a context that nothing uses: {span!r}"
        for generation in node.generations():
            assert generation.node is node
            assert generation.span.owner is generation
            assert generation.span.text_end == depth, (generation, depth)
            generations.append((generation, node, depth))
    newest: dict[tuple[int, Generation | None], Generation] = {}
    for generation, node, _ in generations:
        found.generations += 1
        users[generation.span] += 1
        for span, take in links(generation.span, len(generation.span)):
            assert 0 <= take <= len(span)
            if span in spans:
                break
            spans.add(span)
            found.tokens += len(span)
            if span.parent is not None:
                users[span.parent] += 1
                assert span.offset == span.parent.offset + span.take
                assert span.start >= span.parent.start
            else:
                assert span.offset == span.start == 0
        line = generation.continues
        if line is not None:
            assert any(span is line.span for span, _ in links(generation.span.parent, generation.span.take))
        for fingerprint, take in zip(
            generation.fingerprints, (generation.span.count, generation.span.visible), strict=False
        ):
            if generation.span.offset <= 300:
                assert fingerprint == polynomial(unpack_ids(chain_ids(generation.span, take))), generation
        passed: RadixNode | None = node
        depth = generation.span.text_end
        while passed is not None and passed.parent is not None and passed is not (line and line.node):
            key = (id(passed), line)
            if key not in newest or newest[key].serial < generation.serial:
                newest[key] = generation
            assert passed.replied or depth <= generation.span.start, "a node in a reply that does not know it"
            depth -= len(passed.edge)
            passed = passed.parent
        assert line is None or passed is line.node or node is line.node
    for node, _ in every_node(roots.values()):
        for generation in node.lines():
            expected = newest.pop((id(node), generation.continues), None)
            assert expected is generation, (node, generation, expected)
    assert not newest, f"passes that no node notes: {newest}"
    for span in spans:
        assert span.users >= users[span], (span, span.users, users[span])
    assert len(spans) <= stats.spans  # pinned contexts may outlive their generations
    assert found.tokens <= stats.tokens
    for name in ("nodes", "generations", "characters"):
        assert getattr(found, name) == getattr(stats, name), name
    recount_landmarks(tree.marks)
    recount_ids(tree.by_ids, [generation for generation, _, _ in generations])


def recount_landmarks(marks: Landmarks) -> None:
    """Each landmark that is still in the tree is the last node within its blocks of text, or was before it was split."""
    for (root, blocks, _), (node, depth) in marks._nodes.items():
        if node.parent is None:
            continue
        above, height = node, 0
        while above.parent is not None:
            height += len(above.edge)
            above = above.parent
        assert above is root, "a landmark of another namespace"
        assert height == depth <= blocks * indexes.BLOCK


def recount_ids(index: IdsIndex, generations: list[Generation]) -> None:
    """Each reply is found by its ids, the newest of equal chains first, and nothing else is."""
    expected: dict[tuple[tuple[str, ...], int], list[Generation]] = {}
    for generation in sorted(generations, key=lambda one: one.serial):
        assert generation.fingerprints or generation in index._waiting
        for fingerprint in generation.fingerprints:
            expected.setdefault((generation.namespace, fingerprint), []).append(generation)
    assert expected == {
        (namespace, fingerprint): found if isinstance(found, list) else [found]
        for namespace, chains in index._chains.items()
        for fingerprint, found in chains.items()
    }


def polynomial(ids: list[int]) -> int:
    """The fingerprint of a chain, from nothing."""
    return sum((token + 1) * pow(0x9E3779B97F4A7C15, place, 1 << 64) for place, token in enumerate(ids)) % (1 << 64)
