"""What `tito-router demo` shows: the first conversation, and a table of all of them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from router.demo.respelling import Respelling, Speller
from router.demo.rollout import INSTRUCTION, Rollout
from router.demo.screen import plain_table

_HEAD = ("", "turns", "tokens", "sampled", "wrong if encoded again", "retrieved", "not encoded again")


def transcript(rollout: Rollout) -> Text:
    """Return the text of a rollout with a bar in front of each line, and bold what the model sampled."""
    shown = Text(INSTRUCTION)
    for prompt, reply in rollout.turns:
        shown.append(prompt).append(reply, style="bold")
    return Text("\n").join(Text("  │ ") + line for line in shown.split("\n"))


def table(rollouts: Sequence[Rollout], speller: Speller) -> Table:
    """Return a row for each rollout, and their sums in the foot."""
    rows = [_cells(str(number), [rollout], speller) for number, rollout in enumerate(rollouts, start=1)]
    return plain_table(_HEAD, rows, _cells("all", rollouts, speller))


def _cells(name: str, rollouts: Sequence[Rollout], speller: Speller) -> tuple[str, ...]:
    sampled = sum(sum(rollout.trajectory["loss_mask"]) for rollout in rollouts)
    wrong = sum(speller.wrong(rollout.trajectory, rollout.text)[0] for rollout in rollouts)
    exact = sum(rollout.exact for rollout in rollouts)
    prompt, reused = sum(one.prompt_tokens for one in rollouts), sum(one.reused_tokens for one in rollouts)
    return (
        name,
        str(sum(len(rollout.sampled) for rollout in rollouts)),
        str(sum(rollout.trajectory["token_length"] for rollout in rollouts)),
        str(sampled),
        f"{wrong} ({wrong / sampled:.0%})" if sampled else "-",
        ("exact" if exact else "NOT EXACT") if len(rollouts) == 1 else f"{exact} of {len(rollouts)} exact",
        f"{reused} of {prompt}",
    )


def example(rollouts: Sequence[Rollout], speller: Speller) -> Respelling | None:
    """Return a place where the text alone would have misled; None if there is none."""
    found = (speller.wrong(rollout.trajectory, rollout.text)[1] for rollout in rollouts)
    return next((place for place in found if place is not None), None)
