"""A rollout of one turn, in the tokens of the shipped tokenizer."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer

from worker.demo.rollout import Rollout
from worker.models.ngram import shipped_tokenizer

TOKENIZER = Tokenizer.from_file(str(shipped_tokenizer() / "tokenizer.json"))


def ids(*pieces: str) -> list[int]:
    """Each piece as the token of exactly that text."""
    found = [TOKENIZER.encode(piece, add_special_tokens=False).ids for piece in pieces]
    assert all(len(one) == 1 for one in found), found
    return [one[0] for one in found]


def answer(tokens: list[int], mask: list[int]) -> dict[str, Any]:
    logprobs = [-0.5 if sampled else 0.0 for sampled in mask]
    first = mask.index(1) if 1 in mask else 0
    spans = [{"version": "1", "start": first, "end": first + sum(mask)}]
    found = {"tokens": tokens, "loss_mask": mask, "token_length": len(tokens), "rollout_logp": logprobs}
    return {**found, "weight_versions": spans, "exact": True}


def rollout(**changed: Any) -> Rollout:
    prompt, reply = ids("The"), ids(" se", "arch")
    found = Rollout("The search", [("The", " search")], [reply], 1, 0, answer(prompt + reply, [0, 1, 1]))
    found.trajectory.update(changed)
    return found
