"""The invariants of a message trie, recounted from scratch. Slow, for tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from middleware_hub.sessions.trie.nodes import BranchHandle, Checkpoint, MessageNode


def check(
    nodes: Collection[MessageNode], checkpoints: Mapping[str, Checkpoint], handles: Collection[BranchHandle]
) -> None:
    """Recount all nodes, checkpoints and handles of a trie; raise AssertionError if an invariant does not hold."""
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
