"""What is shown at the end: the tree, a row for each trajectory, and the result of comparing them with the workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer

from router.demo.agent.team import Played
from router.demo.agent.tree import draw, forest, walk
from router.demo.proof import ids_of, prove, prove_together
from router.demo.respelling import Respelling, Speller
from router.demo.screen import plain_table
from router.embedded.engine.records import GenerationRecord

_HEAD = ("branch", "turns", "prompt", "mask 0", "mask 1", "weights", "exact", "as the workers had it", "encoded again")
_LEGEND = """
● sampled by the model: loss mask 1; the other messages are context: loss mask 0
scripted: tokens that the request made the model say: tool calls and first words, {scripted} of {all}. They are spelled
          as the model spells: here and there in pieces, where a tokenizer has one token
sampled:  how the model, with its 40 kB, went on by itself
score:    the share of the three numbers that an answer has; the conversation goes on from the best one
"""
_CAPTION = "turns in parentheses are context there: another branch has them to train on"
_CONCLUSION = """
{sampled} were sampled, in {generations} generations: each has loss mask 1 in one trajectory, its logprob and its version.
Encoding the texts again would have got {wrong} of these {sampled} wrong ({share:.0%}): {scripted} of the scripted ones, \
{others} of the others."""


class Report:
    """Compares a session with what its workers wrote down, by generation, and prints as tree, table and conclusion."""

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
