"""A session's trajectories as a forest: turns that several of them share are there once.

    lead · openai client                     scripted sampled weights score branch
      system    You ...
      user      How ...
    ● assistant the model says something           12       3       1
      tool      and reads something
    ├── ● assistant one answer, where it ends       2      20       1  0.33      A
    └── ● assistant another one, which goes on      2      18       1  1.00
          user      Can I ...
        ● assistant ... and ends here               0      21       2            B

The forest is made of what the router answered. The demonstration itself adds who asked, and how much was scripted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from router.demo.agent.clients import AgentTurn

_COLUMNS = {"scripted": 9, "sampled": 8, "weights": 8, "score": 6, "branch": 7}  # and their widths


@dataclass
class TurnNode:
    """One sampled turn.

    Attributes:
        turn: what the demonstration knows of it.
        context: the messages between the turn before it and this one.
        tokens: how many were sampled.
        weights: the version that sampled them; several, joined.
        trajectory: the index of the one that ends here; None if none does.
        branch: that trajectory's name here.
    """

    turn: AgentTurn
    context: list[Mapping[str, Any]]
    tokens: int
    weights: str
    trajectory: int | None = None
    branch: str = ""
    children: list[TurnNode] = field(default_factory=list)


def forest(trajectories: Sequence[Mapping[str, Any]], turns: Mapping[str, AgentTurn]) -> list[TurnNode]:
    """Return the roots, in the order of their requests; of siblings, those that go on come last.

    Raises:
        KeyError: the demonstration knows nothing of a turn.
    """
    nodes: dict[str, TurnNode] = {}
    roots: list[TurnNode] = []
    for index, trajectory in enumerate(trajectories):
        siblings = roots
        runs = trajectory["weight_versions"]
        for span, context in zip(trajectory["extra_fields"]["turns"], _contexts(trajectory["messages"]), strict=False):
            name = span["generation_id"]
            if name not in nodes:
                weights = [run["version"] for run in runs if run["start"] < span["end"] and span["start"] < run["end"]]
                nodes[name] = TurnNode(turns[name], context, span["end"] - span["start"], "+".join(weights))
                siblings.append(nodes[name])
            siblings = nodes[name].children
        nodes[trajectory["branch"]].trajectory = index
    roots.sort(key=lambda node: node.turn.number)
    for node in nodes.values():
        node.children.sort(key=lambda child: (bool(child.children), child.turn.number))
    for number, node in enumerate(node for node in walk(roots) if node.trajectory is not None):
        node.branch = chr(ord("A") + number)
    return roots


def _contexts(messages: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """Yield the messages in front of each turn of the model's."""
    context: list[Mapping[str, Any]] = []
    for message in messages:
        if message["role"] == "assistant":
            yield context
            context = []
        else:
            context.append(message)


def walk(roots: Sequence[TurnNode]) -> Iterator[TurnNode]:
    """Yield all nodes, each before its children."""
    open_ = list(reversed(roots))
    while open_:
        node = open_.pop()
        yield node
        open_ += reversed(node.children)


def draw(roots: Sequence[TurnNode], scores: Mapping[str, float]) -> Group:
    """Return the drawing of a forest; `scores` are by generation."""
    drawn: list[RenderableType] = []
    for root in roots:
        head = Table.grid(expand=True)
        head.add_column(ratio=1)
        for width in _COLUMNS.values():
            head.add_column(width=width, justify="right", style="dim")
        titles = () if drawn else tuple(_COLUMNS)
        head.add_row(Text(f"{root.turn.agent} · {root.turn.client} client", style="bold"), *titles)
        drawn += [head, _branch(root, scores), ""]
    return Group(*drawn[:-1])


def _branch(node: TurnNode, scores: Mapping[str, float], *, with_context: bool = True) -> Tree:
    """Draw the turns from `node` to the next fork as one label, with the branches of the fork below it."""
    rows = Table.grid(expand=True)
    rows.add_column(width=2)
    rows.add_column(width=10)
    rows.add_column(ratio=1)
    for width in _COLUMNS.values():
        rows.add_column(width=width, justify="right")
    while True:
        for message in node.context if with_context else ():
            rows.add_row("", Text(message["role"], style="dim"), Text(_content(message), "dim", no_wrap=True))
        rows.add_row("●", "assistant", Text(_said(node.turn)), *_numbers(node, scores))
        if len(node.children) != 1:
            break
        node, with_context = node.children[0], True
    shared = all(child.context == node.children[0].context for child in node.children)
    for message in node.children[0].context if node.children and shared else ():
        rows.add_row("", Text(message["role"], style="dim"), Text(_content(message), "dim", no_wrap=True))
    tree = Tree(rows, guide_style="dim")
    tree.children = [_branch(child, scores, with_context=not shared) for child in node.children]
    return tree


def _numbers(node: TurnNode, scores: Mapping[str, float]) -> tuple[str, ...]:
    score = scores.get(node.turn.generation)
    scripted, sampled = node.turn.scripted, node.tokens - node.turn.scripted
    return str(scripted or "-"), str(sampled or "-"), node.weights, "" if score is None else f"{score:.2f}", node.branch


def _said(turn: AgentTurn) -> str:
    lines = [turn.text.strip()] if turn.text else []
    for call in turn.calls:
        arguments = ", ".join(f'{name}="{value}"' for name, value in call.arguments.items())
        lines.append(f"→ {call.name}({arguments})")
    return "\n".join(lines) or "-"


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
