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
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from operator import attrgetter

from middleware_hub.chat.keys import offers_tools
from middleware_hub.chat.messages import MessageKey
from middleware_hub.sessions.trie.nodes import Checkpoint, MessageNode, Root


class Roots:
    """See the top of this file.

    `elsewhere` returns the node of the same messages with samples under another setting.
    """

    def __init__(self, elsewhere: Callable[[MessageNode], MessageNode | None]) -> None:
        self._elsewhere = elsewhere
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
        for node in above.ancestors():
            if node.samples:
                return node.samples[-1].root
        tools = offers_tools(above.setting)
        for node in above.ancestors():
            other = self._elsewhere(node)
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
