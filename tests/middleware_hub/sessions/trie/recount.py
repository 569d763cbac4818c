"""A recount of a message trie's invariants, from nothing."""

from __future__ import annotations

from collections import Counter

from middleware_hub.sessions.trie.nodes import Checkpoint, MessageNode
from middleware_hub.sessions.trie.roots import PathIndex, _places
from middleware_hub.sessions.trie.trie import MessageTrie


def recount(trie: MessageTrie) -> None:
    """Recount all nodes, checkpoints and handles; AssertionError if an invariant does not hold."""
    nodes, checkpoints, handles = list(trie.each_node()), trie._checkpoints, trie._handles.values()
    assert len(nodes) == trie.nodes
    assert all(handle.open for handle in handles)
    handles_at = Counter(id(handle.node) for handle in handles)
    continued: Counter[str] = Counter()
    sampled: list[Checkpoint] = []
    for node in nodes:
        _check_node(node, handles_at.pop(id(node), 0))
        for checkpoint in node.samples or ():
            assert checkpoint.node is node
            assert checkpoints[checkpoint.id] is checkpoint
            sampled.append(checkpoint)
            if checkpoint.parent is not None and not checkpoint.apart:
                continued[checkpoint.parent.id] += 1
            _check_parent(checkpoint)
    assert not handles_at, "a handle on a node that is not there"
    assert len(sampled) == len(checkpoints)
    assert [one.serial for one in checkpoints.values()] == sorted({one.serial for one in sampled})
    users = Counter(id(one.parent) for one in sampled if one.parent is not None)
    users.update(id(one) for handle in handles for one in handle.held)
    for checkpoint in sampled:
        assert checkpoint.continued == continued[checkpoint.id]
        assert checkpoint.users == users.pop(id(checkpoint), 0)
    assert not users, "a user of a sample that is not there"
    _check_paths(trie._paths, nodes)


def _check_node(node: MessageNode, handles: int) -> None:
    above, children = node.parent, (node.children or {}).values()
    assert above is not None
    assert above.children is not None
    assert above.children[node.key] is node
    assert node.depth == above.depth + 1
    assert node.handles == handles
    assert node.committed == bool(node.samples or any(child.committed for child in children))
    assert node.committed or node.handles or node.children, "a pending node that nobody uses"


def _check_parent(checkpoint: Checkpoint) -> None:
    """Check that a checkpoint's parent lies where its path says."""
    path, parent = checkpoint.node.path(), checkpoint.parent
    if checkpoint.edited:
        assert parent is not None
        assert parent.node.parent in path
        assert parent.node not in path
    elif checkpoint.apart:
        assert parent is not None
        keys = [passed.key for passed in parent.node.path()]
        # A turn that continues the last message in place stands where that message stood.
        common = len(keys) - (len(keys) == checkpoint.node.depth)
        assert keys[:common] == [passed.key for passed in path[:common]]
    elif parent is not None:
        assert parent.node in path[:-1] or parent.node.parent in path


def _check_paths(paths: PathIndex, nodes: list[MessageNode]) -> None:
    """Check that the index holds exactly the nodes with samples."""
    expected: dict[int, set[MessageNode]] = {}
    for node in nodes:
        for place in _places(node) if node.samples else ():
            expected.setdefault(place, set()).add(node)
    found = {place: {*known} if isinstance(known, dict) else {known} for place, known in paths._found.items()}
    assert found == expected
    assert all(len(known) > 1 for known in paths._found.values() if isinstance(known, dict))
