"""`tito-router demo-agent`, from the start of its processes to its report."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text
from rich.tree import Tree
from tokenizers import Tokenizer

from worker.demo.agent.clients import AgentTurn
from worker.demo.agent.script import Prompter
from worker.demo.agent.team import FIRST_VERSION, Played, play
from worker.demo.processes import Router
from worker.demo.proof import ids_of, prove, prove_together
from worker.demo.respelling import Respelling, Speller
from worker.demo.show import console, plain_table
from worker.engine.records import GenerationRecord
from worker.models.ngram import shipped_image_tokenizer
from worker.options import WorkerOptions
from worker.worker import EmbeddedWorker

_COLUMNS = {"scripted": 9, "sampled": 8, "weights": 8, "score": 6, "branch": 7}  # and their widths
_HEAD = ("branch", "turns", "prompt", "mask 0", "mask 1", "weights", "exact", "as the workers had it", "encoded again")
_LEGEND = """
● sampled by the model: loss mask 1; the other messages are context: loss mask 0
scripted: tokens that the request made the model say: tool calls and first words, {scripted} of {all}. They are spelled
          as the model spells: here and there in pieces, where a tokenizer has one token
sampled:  how the model, with its 40 kB, went on by itself
image:    a photo that a tool found; the router learns from the worker how many tokens it is
score:    the share of the three numbers that an answer has; the conversation goes on from the best one
"""
_CAPTION = "turns in parentheses are context there: another branch has them to train on"
_CONCLUSION = """
{sampled} were sampled, in {generations} generations: each has loss mask 1 in one trajectory, its logprob and its version.
Encoding the texts again would have got {wrong} of these {sampled} wrong ({share:.0%}): {scripted} of the scripted ones, \
{others} of the others."""
WORKERS = 2
TOKENS_PER_SECOND = 200  # as `tito-router demo-worker`


def show(_args: argparse.Namespace, folder: Path) -> int:
    """Run the demonstration; return the exit status. `folder` is for the router's log. The workers run in this process."""
    # A proxy in the environment of the clients does not reach this machine.
    known = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    os.environ["no_proxy"] = ",".join(filter(None, [known, "127.0.0.1"]))
    tokenizer = Tokenizer.from_file(str(shipped_image_tokenizer() / "tokenizer.json"))
    out = console()
    out.print(f"starting {WORKERS} workers and a router ...")
    options = WorkerOptions(weight_version=FIRST_VERSION, token_delay=1 / TOKENS_PER_SECOND)
    workers = [EmbeddedWorker(shipped_image_tokenizer(), options, seed=number) for number in range(WORKERS)]
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(worker).url for worker in workers]
        url = stack.enter_context(Router(folder, urls, flags=["--verify-rate", "1"], images=True)).url
        out.print(f"the router is {url}: one session, an openai client and an anthropic client\n")
        played = asyncio.run(play(url, Prompter(tokenizer), lambda news: out.print(f"  {news}")))
    report = Report(played, {record.rid: record for worker in workers for record in worker.log}, tokenizer)
    out.print()
    out.print(report)
    return 0 if report.holds else 1


class Report:
    """Compares a session with its workers' records, by generation, and prints as tree, table and conclusion."""

    def __init__(self, played: Played, evidence: Mapping[str, GenerationRecord], tokenizer: Tokenizer) -> None:
        self._played = played
        self._evidence = evidence
        self._tokenizer = tokenizer
        self._speller = Speller(tokenizer, spells_special=True)
        self._roots = forest(played.trajectories, played.turns)
        self._nodes = list(walk(self._roots))
        self._proofs = [prove(trajectory, evidence) for trajectory in played.trajectories]
        self._faults = [fault for proof in self._proofs for fault in proof.faults]
        self._faults += prove_together(played.trajectories, evidence)
        self._respelled = [self._encoded_again(trajectory) for trajectory in played.trajectories]
        self._ids = sum(proof.ids for proof in self._proofs)
        self._same = sum(proof.same for proof in self._proofs)
        self._wrong = sum(wrong for wrong, _ in self._respelled)

    @property
    def holds(self) -> bool:
        """Whether every promise is kept."""
        return bool(self._proofs) and self._same == self._ids and not self._faults

    def __rich_console__(self, *_console: Any) -> Iterator[RenderableType]:
        scripted = sum(turn.scripted for turn in self._played.turns.values())
        legend = _LEGEND.format(scripted=scripted, all=sum(node.tokens for node in self._nodes))
        yield from (draw(self._roots, self._played.rewards), Text(legend, "dim"))
        yield from (self.table(), "", self.conclusion(), "")

    def table(self) -> Table:
        rows = [self._row(node.branch, node.trajectory) for node in self._nodes if node.trajectory is not None]
        prompt, context, trained = (str(sum(int(row[column]) for row in rows)) for column in (2, 3, 4))
        same, wrong = f"{self._same} of {self._ids}", f"{self._wrong} wrong"
        foot = ("all", str(len(self._nodes)), prompt, context, trained, "", "", same, wrong)
        table = plain_table(_HEAD, rows, foot)
        table.caption = Text(_CAPTION, "dim", justify="left")
        return table

    def conclusion(self) -> Text:
        if not self.holds:
            return Text("\n".join(["NOT EXACT: this should not happen, please report it", *self._faults]), "bold")
        sampled = sum(len(one.output_ids) for one in self._evidence.values())
        others = sum(self._encoded_again(one, scripted=False)[0] for one in self._played.trajectories)
        text = Text(f"{self._ids} ids in {len(self._proofs)} trajectories", "bold")
        text.append(", and each is the one that a worker wrote down as read or sampled in that place.")
        counts = {"sampled": sampled, "wrong": self._wrong, "scripted": self._wrong - others, "others": others}
        conclusion = _CONCLUSION.format(generations=len(self._evidence), share=self._wrong / sampled, **counts)
        text.append(conclusion, "not bold")
        example = next((place for _, place in self._respelled if place is not None), None)
        return text if example is None else text.append(f"\nFor example: {example}", "not bold")

    def _row(self, branch: str, index: int) -> tuple[str, ...]:
        trajectory, proof, (wrong, _) = self._played.trajectories[index], self._proofs[index], self._respelled[index]
        mask, runs = trajectory["response_mask"], trajectory["weight_versions"]
        own = [any(mask[turn["start"] : turn["end"]]) for turn in trajectory["extra_fields"]["turns"]]
        turns = (f"{number}" if trained else f"({number})" for number, trained in enumerate(own, start=1))
        lengths = (str(len(trajectory["prompt_ids"])), str(len(mask) - sum(mask)), str(sum(mask)))
        weights = ", ".join(dict.fromkeys(run["version"] for run in runs))
        exact = "yes" if trajectory["exact"] else "NO"
        same = f"{'' if proof.holds else 'NO: '}{proof.same} of {proof.ids}"
        return branch, " ".join(turns), *lengths, weights, exact, same, f"{wrong} wrong"

    def _encoded_again(self, trajectory: Mapping[str, Any], *, scripted: bool = True) -> tuple[int, Respelling | None]:
        """Count the ids to train on that a tokenizer would not give for the text; without `scripted`, only the others."""
        ids, begin = ids_of(trajectory), len(trajectory["prompt_ids"])
        mask = [0] * begin + list(trajectory["response_mask"])
        for turn in () if scripted else trajectory["extra_fields"]["turns"]:
            start = begin + turn["start"]
            count = min(self._played.turns[turn["generation_id"]].scripted, turn["end"] - turn["start"])
            mask[start : start + count] = [0] * count
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        return self._speller.wrong({"tokens": ids, "loss_mask": mask}, text)


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
    """Return the roots, in the order of their requests; siblings that go on come last.

    The forest is made of the router's answers. `turns` adds who asked, and how much was scripted.

    Raises:
        KeyError: a turn is not in `turns`.
    """
    nodes: dict[str, TurnNode] = {}
    roots: list[TurnNode] = []
    for index, trajectory in enumerate(trajectories):
        siblings, runs = roots, trajectory["weight_versions"]
        contexts = _contexts(_with_lengths(trajectory))
        for span, context in zip(trajectory["extra_fields"]["turns"], contexts, strict=False):
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


def _images(trajectory: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    found: Mapping[str, Any] = trajectory.get("multi_modal_data") or {}
    images: Sequence[Mapping[str, Any]] = found.get("images", ())
    return images


def _with_lengths(trajectory: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the messages of a trajectory. For each image there is a text in them that says how many tokens it is."""
    messages = list(trajectory["messages"])
    for image in _images(trajectory):
        message, (start, end) = messages[image["message"]], image["span"]
        content = list(message["content"])
        content[image["part"]] = {"type": "text", "text": f"[image: {end - start} tokens] "}
        messages[image["message"]] = {**message, "content": content}
    return messages


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
