"""What the conversations of a session begin with, and which of them is the task's.

Harnesses talk to the model beside their task: they ask for a title, try their quota, let a sub-agent remember something. Such a
conversation begins with other tools, or none, or with another system prompt. A *root* is that beginning: the setting (adapter,
tools, options) and the system messages.

    root 0   no tools                 "Name this conversation."         a title, asked for first
    root 1   tools                    "You are an agent."               the task: the first root that offers tools
    root 2   other tools              "You remember things."            a sub-agent

A conversation stays in its root if its tools or options change on the way: an MCP server may connect late. It leaves the root
if all tools are dropped, as for a summary, or if the system messages or the adapter change. Roots are numbered by their first
commits, so all routers that read one log number alike.

In the trie each setting has a root node of its own, so equal conversations under two settings are two *paths*:

    root(tools, thinking)      system -- user -- assistant *1       path 71f3...
    root(tools, no thinking)   system -- user -- assistant *2       path 71f3..., the newer one
    root(other tools)          system -- user -- assistant *3       path 71f3..., with tools that no other path has

Each node keeps the hash of the keys along its path. The `PathIndex` finds nodes with samples by their path, and by their path
and tools. A look-up tries path and tools first, because a turn is continued under other options more often than under other
tools. It costs the same however many settings there are, and no client's requests push out another's.
"""

from __future__ import annotations

from itertools import takewhile
from operator import attrgetter

from middleware_hub.chat.keys import offers_tools, tools_of
from middleware_hub.chat.messages import MessageKey
from middleware_hub.sessions.trie.nodes import Checkpoint, MessageNode, Root

Nodes = dict[MessageNode, None]
"""In the order of their newest samples."""


class PathIndex:
    """Finds nodes with samples by their path; see the top of this file."""

    def __init__(self) -> None:
        self._found: dict[int, MessageNode | Nodes] = {}

    def __len__(self) -> int:
        return len(self._found)

    def sampled(self, node: MessageNode) -> None:
        for place in _places(node):
            known = self._found.get(place)
            if known is None or known is node:
                self._found[place] = node
                continue
            nodes = self._found[place] = known if isinstance(known, dict) else {known: None}
            nodes.pop(node, None)
            nodes[node] = None

    def gone(self, node: MessageNode) -> None:
        for place in _places(node):
            known = self._found.get(place)
            if isinstance(known, dict):
                known.pop(node, None)
                if len(known) == 1:
                    (self._found[place],) = known
            elif known is node:
                del self._found[place]

    def other(self, node: MessageNode) -> MessageNode | None:
        """Return the node with samples for the same messages under another setting: the same tools first, then the newest."""
        for place in reversed(_places(node)):
            known = self._found.get(place)
            for found in () if known is None else reversed(known) if isinstance(known, dict) else (known,):
                if found is not node:
                    # The hashes of two paths may collide. Then there is no need to look further.
                    if same_path(found, node):
                        return found
                    break
        return None

    def clear(self) -> None:
        self._found.clear()


def _places(node: MessageNode) -> tuple[int, int]:
    return node.path_hash, hash((node.path_hash, tools_of(node.setting)))


def same_path(one: MessageNode, other: MessageNode) -> bool:
    """Whether both nodes end the same messages, for the same adapter."""
    while one.depth and other.depth:
        if one is other:
            return True
        if one.key != other.key or one.parent is None or other.parent is None:
            return False
        one, other = one.parent, other.parent
    return one.depth == other.depth and one.path_hash == other.path_hash


class Roots:
    """The roots of a trie, whose `paths` find the same messages under another setting; see the top of this file."""

    def __init__(self, paths: PathIndex) -> None:
        self._paths = paths
        self._made = 0
        self._roots: dict[Root, None] = {}
        self._by_beginning: dict[tuple[bytes, tuple[MessageKey, ...]], Root] = {}

    @property
    def head(self) -> Root | None:
        """The root of the task: the first that offers tools, or the first."""
        return next((root for root in self._roots if root.tools), next(iter(self._roots), None))

    def committed(self, above: MessageNode) -> Root:
        """Return the root of a turn whose prompt ends at a node, and count the turn."""
        found = self._continued(above) or self._begun(above)
        found.samples += 1
        return found

    def dropped(self, checkpoint: Checkpoint) -> None:
        """Forget a turn, and with its last turn the root."""
        root = checkpoint.root
        root.samples -= 1
        if not root.samples:
            self._roots.pop(root, None)
            for beginning in [one for one, other in self._by_beginning.items() if other is root]:
                del self._by_beginning[beginning]

    def clear(self) -> None:
        self._roots.clear()
        self._by_beginning.clear()

    def _continued(self, above: MessageNode) -> Root | None:
        """Return the root of the nearest turn on the path, also under other tools or options if both have some or none."""
        passed: MessageNode | None = above
        while passed is not None:  # a turn is seldom far above
            if passed.samples:
                return passed.samples[-1].root
            passed = passed.parent
        tools = offers_tools(above.setting)
        for node in above.ancestors():
            other = self._paths.other(node)
            if other is not None and other.samples and (root := other.samples[-1].root).tools == tools:
                self._by_beginning.setdefault((above.setting, root.system), root)  # for contexts that begin anew
                return root
        return None

    def _begun(self, above: MessageNode) -> Root:
        system = tuple([node.key for node in takewhile(attrgetter("is_system"), above.path())])
        found = self._by_beginning.get((above.setting, system))
        if found is None:
            found = Root(self._made, offers_tools(above.setting), system)
            self._made += 1
            self._roots[found] = None
            self._by_beginning[above.setting, system] = found
        return found
