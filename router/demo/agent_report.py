"""What is shown at the end: the tree, a line for each trajectory, and what came of comparing them with the workers."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from tokenizers import Tokenizer

from router.demo.agent_accounts import Account
from router.demo.agent_proof import Proof, ids_of, prove, prove_together
from router.demo.agent_team import Played
from router.demo.agent_tree import Drawing, Node, forest, walk
from router.demo.report import Respelling, Speller, shown

HEAD = ("branch", "turns", "prompt", "mask 0", "mask 1", "weights", "exact", "as the workers had it", "encoded again")


class Report:
    """See the top of this file.

    Args:
        played: what the demonstration knows, and the router's answer.
        told: what the workers wrote down.
        tokenizer: the shipped one.
        width: of a line, in cells.
        colors: whether the terminal can show some lines bold or dim.
    """

    def __init__(
        self, played: Played, told: Mapping[str, Account], tokenizer: Tokenizer, *, width: int, colors: bool
    ) -> None:
        self._played = played
        self._told = told
        self._tokenizer = tokenizer
        self._speller = Speller(tokenizer, spells_special=True)
        self._colors = colors
        self._width = width
        self._roots = forest(played.trajectories, played.turns)
        self._branches = [node for node in walk(self._roots) if node.trajectory is not None]
        self._proofs = [prove(trajectory, told) for trajectory in played.trajectories]
        self._together = prove_together(played.trajectories, told)
        self._wrong = [self._encoded_again(trajectory) for trajectory in played.trajectories]
        self._wrong_drawn = sum(self._encoded_again(one, drawn_only=True)[0] for one in played.trajectories)

    @property
    def holds(self) -> bool:
        """Whether every promise is kept."""
        return bool(self._proofs) and all(proof.holds for proof in self._proofs) and not self._together

    def tree(self) -> str:
        """With a line that says how to read it."""
        drawing = Drawing(self._width, self._played.rewards, bold=self._bold, dim=self._dim)
        told = sum(turn.told for turn in self._played.turns.values())
        sampled = sum(node.sampled for node in walk(self._roots))
        legend = (
            "● sampled by the model: loss mask 1     │ context: loss mask 0\n"
            f"told: tokens that the request told it to say: tool calls and first words, {told} of {sampled}. They are spelled\n"
            "      as it spells what it draws: here and there in pieces, where a tokenizer has one token\n"
            "drawn: what it went on with by itself, which with a model of 40 kB is no great wisdom\n"
            "score: the share of the three numbers that an answer has; the conversation goes on from the best one"
        )
        return f"{drawing.draw(self._roots)}\n\n{self._dim(legend)}"

    def table(self) -> str:
        """All trajectories, a line each."""
        rows = [self._row(node) for node in self._branches]
        total = [
            "all",
            str(sum(1 for _ in walk(self._roots))),
            *(str(sum(int(row[column]) for row in rows)) for column in (2, 3, 4)),
            "",
            "",
            f"{sum(proof.same for proof in self._proofs)} of {sum(proof.ids for proof in self._proofs)}",
            f"{sum(wrong for wrong, _ in self._wrong)} wrong",
        ]
        widths = [max(map(len, column)) for column in zip(HEAD, *rows, total, strict=True)]
        line = "  ".join("─" * size for size in widths)
        told = ["  ".join(cell.rjust(size) for cell, size in zip(row, widths, strict=True)) for row in (*rows, total)]
        head = "  ".join(cell.rjust(size) for cell, size in zip(HEAD, widths, strict=True))
        under = "turns in parentheses are context there: another branch has them to train on"
        return "\n".join([self._bold(head), line, *told[:-1], line, told[-1], self._dim(under)])

    def conclusion(self) -> str:
        """In words."""
        if not self.holds:
            faults = [fault for proof in self._proofs for fault in proof.faults] + self._together
            return "\n".join(["NOT EXACT: this should not happen, please report it", *faults])
        ids = sum(proof.ids for proof in self._proofs)
        sampled = sum(len(one.sampled) for one in self._told.values())
        wrong = sum(wrong for wrong, _ in self._wrong)
        lines = [
            self._bold(
                f"{ids} ids in {len(self._proofs)} trajectories, and each is the one that a worker wrote down "
                "as read or sampled in that place."
            ),
            f"{sampled} were sampled, in {len(self._told)} generations: each has loss mask 1 in one trajectory, "
            "its logprob and its weight version.",
            f"Encoding the texts again would have got {wrong} of these {sampled} wrong ({wrong / sampled:.0%}): "
            f"{wrong - self._wrong_drawn} of the told ones, {self._wrong_drawn} of the drawn ones.",
        ]
        example = next((place for _, place in self._wrong if place is not None), None)
        if example is not None:
            lines.append(f"For example: sampled {shown(example.sampled)}; its text encodes to {shown(example.encoded)}")
        return "\n".join(lines)

    def _row(self, node: Node) -> tuple[str, ...]:
        assert node.trajectory is not None
        trajectory = self._played.trajectories[node.trajectory]
        proof, (wrong, _) = self._proofs[node.trajectory], self._wrong[node.trajectory]
        mask = trajectory["response_mask"]
        return (
            node.label,
            _turns(trajectory),
            str(len(trajectory["prompt_ids"])),
            str(len(mask) - sum(mask)),
            str(sum(mask)),
            ", ".join(dict.fromkeys(run["version"] for run in trajectory["weight_versions"])),
            "yes" if trajectory["exact"] else "NO",
            _same(proof),
            f"{wrong} wrong",
        )

    def _encoded_again(
        self, trajectory: Mapping[str, Any], *, drawn_only: bool = False
    ) -> tuple[int, Respelling | None]:
        """How many ids that are to be trained on a tokenizer would not give for this very text."""
        ids, begin = ids_of(trajectory), len(trajectory["prompt_ids"])
        mask = [0] * begin + list(trajectory["response_mask"])
        for turn in trajectory["extra_fields"]["turns"] if drawn_only else ():
            start = begin + turn["start"]
            told = min(self._played.turns[turn["generation_id"]].told, turn["end"] - turn["start"])
            mask[start : start + told] = [0] * told
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        return self._speller.wrong({"tokens": ids, "loss_mask": mask}, text)

    def _bold(self, text: str) -> str:
        return f"\033[1m{text}\033[0m" if self._colors and text else text

    def _dim(self, text: str) -> str:
        return f"\033[2m{text}\033[0m" if self._colors and text else text


def _same(proof: Proof) -> str:
    return f"{proof.same} of {proof.ids}" if proof.holds else f"NO: {proof.same} of {proof.ids}"


def _turns(trajectory: Mapping[str, Any]) -> str:
    """Numbers of its turns, those in parentheses that are trained elsewhere: `(1 2) 3`."""
    mask = trajectory["response_mask"]
    numbered = [
        (number, any(mask[turn["start"] : turn["end"]]))
        for number, turn in enumerate(trajectory["extra_fields"]["turns"], start=1)
    ]
    runs = [
        (own, " ".join(str(number) for number, _ in run)) for own, run in groupby(numbered, key=lambda pair: pair[1])
    ]
    return " ".join(said if own else f"({said})" for own, said in runs)
