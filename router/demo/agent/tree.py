"""A session's trajectories as a forest: turns that several of them share are there once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text
from rich.tree import Tree

from router.demo.agent.clients import AgentTurn

_COLUMNS = {"scripted": 9, "sampled": 8, "weights": 8, "score": 6, "branch": 7}  # and their widths


@dataclass
class TurnNode:
    """One sampled turn, with the messages in front of it."""

    turn: AgentTurn
    context: list[Mapping[str, Any]]
    tokens: int  # that were sampled
    weights: str  # the version that sampled them; several, joined
    trajectory: int | None = None  # the index of the one that ends here
    branch: str = ""  # that trajectory's name
    children: list[TurnNode] = field(default_factory=list)


def forest(trajectories: Sequence[Mapping[str, Any]], turns: Mapping[str, AgentTurn]) -> list[TurnNode]:
    """Return the roots, in the order of their requests; of siblings, those that go on come last.

    The forest is made of what the router answered. `turns` adds who asked, and how much was scripted.

    Raises:
        KeyError: a turn is not in `turns`.
    """
    nodes: dict[str, TurnNode] = {}
    roots: list[TurnNode] = []
    for index, trajectory in enumerate(trajectories):
        siblings, runs = roots, trajectory["weight_versions"]
        for span, context in zip(trajectory["extra_fields"]["turns"], _contexts(trajectory["messages"]), strict=False):
            name, start, end = span["generation_id"], span["start"], span["end"]
            if name not in nodes:
                weights = "+".join(run["version"] for run in runs if run["start"] < end and start < run["end"])
                nodes[name] = TurnNode(turns[name], context, end - start, weights)
                siblings.append(nodes[name])
            siblings = nodes[name].children
        nodes[trajectory["branch"]].trajectory = index
    roots.sort(key=lambda node: node.turn.number)
    for node in nodes.values():
        node.children.sort(key=lambda child: (bool(child.children), child.turn.number))
    for number, node in enumerate(node for node in walk(roots) if node.trajectory is not None):
        node.branch = chr(ord("A") + number)
    return roots


def _contexts(messages: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Return the messages in front of each turn of the model."""
    by_side = groupby(messages, key=lambda message: message["role"] == "assistant")
    return [list(side) for sampled, side in by_side if not sampled]


def walk(nodes: Sequence[TurnNode]) -> Iterator[TurnNode]:
    """Yield all nodes, each before its children."""
    for node in nodes:
        yield node
        yield from walk(node.children)


def draw(roots: Sequence[TurnNode], scores: Mapping[str, float]) -> Group:
    """Return the drawing of a forest; `scores` are by generation."""
    drawn: list[RenderableType] = []
    for root in roots:
        titles = () if drawn else (Text(title, "dim") for title in _COLUMNS)
        head = _table()
        head.add_row(Text(f"{root.turn.agent} · {root.turn.client} client", "bold"), *titles)
        drawn += [head, _branch(root, scores), ""]
    return Group(*drawn[:-1])


def _table(*first_columns: int) -> Table:
    first = [Column(width=width) for width in first_columns]
    numbers = [Column(width=width, justify="right") for width in _COLUMNS.values()]
    return Table.grid(*first, Column(ratio=1), *numbers, expand=True)


def _branch(node: TurnNode, scores: Mapping[str, float], *, with_context: bool = True) -> Tree:
    """Draw the turns from `node` to the next fork as one label, with the branches of the fork below it."""
    rows = _table(2, 10)
    tree = Tree(rows, guide_style="dim")
    while True:
        _add_context(rows, node.context if with_context else ())
        turn, score = node.turn, scores.get(node.turn.generation)
        numbers = (str(turn.scripted or "-"), str(node.tokens - turn.scripted or "-"), node.weights)
        rows.add_row("●", "assistant", _said(turn), *numbers, "" if score is None else f"{score:.2f}", node.branch)
        if len(node.children) != 1:
            break
        node, with_context = node.children[0], True
    contexts = [child.context for child in node.children]
    shared = all(context == contexts[0] for context in contexts)
    _add_context(rows, contexts[0] if contexts and shared else ())
    tree.children = [_branch(child, scores, with_context=not shared) for child in node.children]
    return tree


def _add_context(rows: Table, messages: Sequence[Mapping[str, Any]]) -> None:
    for message in messages:
        content = message.get("content") or ""
        text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
        rows.add_row("", Text(message["role"], "dim"), Text(text, "dim", no_wrap=True))


def _said(turn: AgentTurn) -> Text:
    lines = [turn.text.strip()] if turn.text else []
    for call in turn.calls:
        arguments = ", ".join(f'{name}="{value}"' for name, value in call.arguments.items())
        lines.append(f"→ {call.name}({arguments})")
    return Text("\n".join(lines) or "-")
