"""What is shown at the end: the tree, a row for each trajectory, and the result of comparing them with the workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer

from router.demo.agent.proof import ids_of, prove, prove_together
from router.demo.agent.team import Played
from router.demo.agent.tree import TurnNode, draw, forest, walk
from router.demo.respelling import Respelling, Speller
from router.demo.screen import plain_table
from router.embedded.engine.records import GenerationRecord

_HEAD = ("branch", "turns", "prompt", "mask 0", "mask 1", "weights", "exact", "as the workers had it", "encoded again")
_LEGEND = """\
● sampled by the model: loss mask 1; the other messages are context: loss mask 0
scripted: tokens that the request made the model say: tool calls and first words, {scripted} of {all}. They are spelled
          as the model spells: here and there in pieces, where a tokenizer has one token
sampled:  how the model went on by itself: with its 40 kB no great wisdom
score:    the share of the three numbers that an answer has; the conversation goes on from the best one"""
_CONCLUSION = """
{sampled} were sampled, in {generations} generations: each has loss mask 1 in one trajectory, its logprob and its version.
Encoding the texts again would have got {wrong} of these {sampled} wrong ({share:.0%}): {scripted} of the scripted ones, \
{others} of the others."""


class Report:
    """Compares a session with what its workers wrote down, and prints as tree, table and conclusion.

    Args:
        played: what the demonstration knows, and the router's answer.
        evidence: what the workers wrote down, by generation.
        tokenizer: the shipped one.
    """

    def __init__(self, played: Played, evidence: Mapping[str, GenerationRecord], tokenizer: Tokenizer) -> None:
        self._played = played
        self._evidence = evidence
        self._tokenizer = tokenizer
        self._speller = Speller(tokenizer, spells_special=True)
        self._roots = forest(played.trajectories, played.turns)
        self._proofs = [prove(trajectory, evidence) for trajectory in played.trajectories]
        self._together = prove_together(played.trajectories, evidence)
        self._wrong = [self._encoded_again(trajectory) for trajectory in played.trajectories]

    @property
    def holds(self) -> bool:
        """Whether every promise is kept."""
        return bool(self._proofs) and all(proof.holds for proof in self._proofs) and not self._together

    def __rich_console__(self, *_console: Any) -> Iterator[RenderableType]:
        for part in (self.tree(), self.table(), self.conclusion()):
            yield part
            yield ""

    def tree(self) -> Group:
        scripted = sum(turn.scripted for turn in self._played.turns.values())
        legend = _LEGEND.format(scripted=scripted, all=sum(node.tokens for node in walk(self._roots)))
        return Group(draw(self._roots, self._played.rewards), "", Text(legend, "dim"))

    def table(self) -> Table:
        nodes = list(walk(self._roots))
        rows = [self._row(node, node.trajectory) for node in nodes if node.trajectory is not None]
        prompt, context, trained = (str(sum(int(row[column]) for row in rows)) for column in (2, 3, 4))
        same = f"{sum(proof.same for proof in self._proofs)} of {sum(proof.ids for proof in self._proofs)}"
        wrong = f"{sum(wrong for wrong, _ in self._wrong)} wrong"
        table = plain_table()
        table.caption = Text(
            "turns in parentheses are context there: another branch has them to train on", "dim", justify="left"
        )
        foot = ("all", str(len(nodes)), prompt, context, trained, "", "", same, wrong)
        for title, total in zip(_HEAD, foot, strict=True):
            table.add_column(title, total, justify="right")
        for row in rows:
            table.add_row(*row)
        return table

    def conclusion(self) -> Text:
        if not self.holds:
            faults = [fault for proof in self._proofs for fault in proof.faults] + self._together
            return Text("\n".join(["NOT EXACT: this should not happen, please report it", *faults]), "bold")
        ids = sum(proof.ids for proof in self._proofs)
        sampled = sum(len(one.output_ids) for one in self._evidence.values())
        wrong = sum(wrong for wrong, _ in self._wrong)
        others = sum(self._encoded_again(one, scripted=False)[0] for one in self._played.trajectories)
        text = Text(f"{ids} ids in {len(self._proofs)} trajectories", "bold")
        text.append(", and each is the one that a worker wrote down as read or sampled in that place.")
        counts = {"sampled": sampled, "generations": len(self._evidence), "wrong": wrong, "share": wrong / sampled}
        text.append(_CONCLUSION.format(**counts, scripted=wrong - others, others=others), "not bold")
        example = next((place for _, place in self._wrong if place is not None), None)
        return text if example is None else text.append(f"\nFor example: {example}", "not bold")

    def _row(self, node: TurnNode, index: int) -> tuple[str, ...]:
        trajectory, proof, (wrong, _) = self._played.trajectories[index], self._proofs[index], self._wrong[index]
        mask = trajectory["response_mask"]
        return (
            node.branch,
            _turns(trajectory),
            str(len(trajectory["prompt_ids"])),
            str(len(mask) - sum(mask)),
            str(sum(mask)),
            ", ".join(dict.fromkeys(run["version"] for run in trajectory["weight_versions"])),
            "yes" if trajectory["exact"] else "NO",
            f"{'' if proof.holds else 'NO: '}{proof.same} of {proof.ids}",
            f"{wrong} wrong",
        )

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


def _turns(trajectory: Mapping[str, Any]) -> str:
    """Number the turns, and put those that are trained in another trajectory into parentheses: `(1 2) 3`."""
    mask = trajectory["response_mask"]
    turns = enumerate(trajectory["extra_fields"]["turns"], start=1)
    owned = groupby(turns, key=lambda numbered: any(mask[numbered[1]["start"] : numbered[1]["end"]]))
    runs = [(own, " ".join(str(number) for number, _ in run)) for own, run in owned]
    return " ".join(numbers if own else f"({numbers})" for own, numbers in runs)
