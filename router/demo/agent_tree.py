"""The trajectories of a session as one tree: turns that several of them share stand there once.

    ╭ system     You lead.
    │ user       How much higher ...
    ● lead       calculate(expression="3776 - 2962")
    │ tool       814
    ├─● lead     a branch that ends here
    ╰─● lead     another one, which goes on
      │ user     Can I ...
      ● lead     ... and ends here

The forest is made of what the router answered; of the demonstration's own knowledge it has who asked, and what was told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from router.demo.agent_clients import Turn
from router.demo.text_width import folded, padded, shortened

_COLUMNS = (("told", 5), ("drawn", 6), ("weights", 8), ("score", 6), ("branch", 7))
_INDENT = 14  # of what is said, in cells
_LINES = 3  # of what the model says


@dataclass
class Node:
    """One sampled turn.

    Attributes:
        turn: what the demonstration knows of it.
        context: the messages between the turn before it and this one.
        sampled: how many tokens it has.
        weights: the version that it was sampled under; several, joined.
        trajectory: the place of the one that ends here in the router's answer; None if none does.
        label: that trajectory's name here.
    """

    turn: Turn
    context: list[Mapping[str, Any]]
    sampled: int
    weights: str
    trajectory: int | None = None
    label: str = ""
    children: list[Node] = field(default_factory=list)


def forest(trajectories: Sequence[Mapping[str, Any]], turns: Mapping[str, Turn]) -> list[Node]:
    """The roots, in the order in which they were asked for; a branch that goes on is the last one of its siblings.

    Raises KeyError for a turn that the demonstration knows nothing of.
    """
    nodes: dict[str, Node] = {}
    roots: list[Node] = []
    for place, trajectory in enumerate(trajectories):
        siblings = roots
        sampled = trajectory["extra_fields"]["turns"]
        for one, context in zip(sampled, _contexts(trajectory["messages"]), strict=False):
            name = one["generation_id"]
            if name not in nodes:
                runs = trajectory["weight_versions"]
                weights = [run["version"] for run in runs if run["start"] < one["end"] and one["start"] < run["end"]]
                nodes[name] = Node(turns[name], context, one["end"] - one["start"], "+".join(weights))
                siblings.append(nodes[name])
            siblings = nodes[name].children
        nodes[trajectory["branch"]].trajectory = place
    for listed in (roots, *(node.children for node in nodes.values())):
        listed.sort(key=lambda node: (bool(node.children) and listed is not roots, node.turn.number))
    for node, number in zip((node for node in walk(roots) if node.trajectory is not None), count(), strict=False):
        node.label = chr(ord("A") + number)
    return roots


def _contexts(messages: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """What stands in front of each turn of the model's."""
    context: list[Mapping[str, Any]] = []
    for message in messages:
        if message["role"] == "assistant":
            yield context
            context = []
        else:
            context.append(message)


def walk(roots: Sequence[Node]) -> Iterator[Node]:
    """All nodes, each before its children."""
    open_ = list(reversed(roots))
    while open_:
        node = open_.pop()
        yield node
        open_ += reversed(node.children)


class Drawing:
    """Draws a forest.

    Args:
        width: of a line, in cells.
        bold, dim: dress a piece of a line for the terminal.
        scores: by generation.
    """

    def __init__(
        self, width: int, scores: Mapping[str, float], *, bold: Callable[[str], str], dim: Callable[[str], str]
    ) -> None:
        self._left = width - sum(size for _, size in _COLUMNS)
        self._scores = scores
        self._bold = bold
        self._dim = dim

    def draw(self, roots: Sequence[Node]) -> str:
        """All of it."""
        lines: list[str] = []
        for root in roots:
            head = f"{root.turn.agent} · {root.turn.client} client"
            titles = "" if lines else "".join(title.rjust(size) for title, size in _COLUMNS)
            lines += ([""] if lines else []) + [(self._bold(padded(head, self._left)) + self._dim(titles)).rstrip()]
            lines += self._chain(root, "", first=True)
        return "\n".join(lines)

    def _chain(self, node: Node, gutter: str, *, first: bool = False) -> Iterator[str]:
        """A turn with its context in front, and what comes behind it."""
        for message in node.context:
            yield self._context(gutter + ("╭ " if first else "│ "), message)
            first = False
        yield from self._turn(node, gutter, "● ", "│ " if node.children else "  ")
        yield from self._behind(node, gutter)

    def _behind(self, node: Node, gutter: str) -> Iterator[str]:
        if len(node.children) == 1:
            yield from self._chain(node.children[0], gutter)
            return
        for child in node.children:
            # Siblings share their parent, and so the context between it and them: it is drawn once, in front of all.
            if child is node.children[0]:
                for message in child.context:
                    yield self._context(gutter + "│ ", message)
            last = child is node.children[-1]
            inner = gutter + ("  " if last else "│ ")
            yield from self._turn(child, gutter, "╰─● " if last else "├─● ", ("  " if last else "│ ") + "  ")
            yield from self._behind(child, inner)

    def _turn(self, node: Node, gutter: str, mark: str, behind: str) -> Iterator[str]:
        turn = node.turn
        score = self._scores.get(turn.generation)
        drawn = node.sampled - turn.told
        cells = (
            str(turn.told or "-"),
            str(drawn or "-"),
            node.weights,
            "" if score is None else f"{score:.2f}",
            node.label,
        )
        right = "".join(cell.rjust(size) for cell, (_, size) in zip(cells, _COLUMNS, strict=True))
        texts = [(text, _LINES) for text in [turn.text] if text]
        texts += [(_called(one.name, one.arguments), 1) for one in turn.calls]
        lines = [line for text, most in texts for line in folded(_flat(text), self._left - _INDENT - 1, most)]
        first, *more = lines or ["-"]
        yield padded(padded(f"{gutter}{mark}assistant", _INDENT) + first, self._left) + right.rstrip()
        for line in more:
            yield padded(gutter + behind, _INDENT) + line

    def _context(self, gutter: str, message: Mapping[str, Any]) -> str:
        line = padded(gutter + str(message["role"]), _INDENT) + _flat(_said(message))
        return self._dim(shortened(line, self._left - 1))


def _flat(text: str) -> str:
    return " ".join(text.strip().replace("\n", " ↵ ").split())


def _said(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _called(name: str, arguments: Mapping[str, Any]) -> str:
    given = ", ".join(f'{key}="{value}"' for key, value in arguments.items())
    return f"→ {name}({given})"
