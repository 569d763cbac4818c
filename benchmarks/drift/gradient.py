"""The gradient on sampled tokens beside that on the same text, encoded again. Run by a Python that has torch and transformers:

    python -m benchmarks.drift.gradient --model FOLDER --rollouts FILE --out FILE

As in docs/training-loop.md: a step has two groups of up to four rollouts, the reward is the share of letters, the advantage
that of GRPO, and the old policy is the model's own pass, so the loss is the advantage times the logprob of each sampled token.
The loop on text encodes prompt and reply, each by itself. A rollout that encoding again does not change has the same gradient
in both, so its pass is made once. The gradient is that of all parameters but the embeddings, two thirds of this model: so it
fits beside other programs, in 2.5 GB.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import torch

GROUP = 4
"""The most rollouts of a group."""


@dataclass(frozen=True)
class Sample:
    """A rollout: its tokens as sampled, and as a loop on text encodes them; `begin` is where the reply begins."""

    tokens: list[int]
    begin: int
    again: list[int]
    begin_again: int
    logprobs: list[float]
    advantage: float

    @property
    def changed(self) -> bool:
        return self.tokens != self.again

    def kept(self) -> list[tuple[int, int]]:
        """Return the sampled tokens that are in both, as pairs of places."""
        matcher = SequenceMatcher(None, self.tokens[self.begin :], self.again[self.begin_again :], autojunk=False)
        return [
            (self.begin + block.a + n, self.begin_again + block.b + n)
            for block in matcher.get_matching_blocks()
            for n in range(block.size)
        ]


def samples(groups: Sequence[Sequence[dict[str, Any]]], tokenizer: Any, length: int) -> list[Sample]:
    """Return the rollouts of a step, cut after `length` sampled tokens. A group is of one prompt."""
    found: list[Sample] = []
    for group in groups:
        texts = [tokenizer.decode(one["ids"][:length], skip_special_tokens=True) for one in group]
        for one, text, advantage in zip(group, texts, advantages(texts), strict=True):
            prompt, ids = one["prompt_ids"], one["ids"][:length]
            again = prompt + tokenizer.encode(text, add_special_tokens=False)
            found.append(Sample(prompt + ids, len(prompt), again, len(prompt), one["logprobs"][:length], advantage))
    return found


def advantages(texts: Sequence[str]) -> list[float]:
    """Return how much better than its group each text is, by its share of letters."""
    rewards = [sum(map(str.isalpha, text)) / max(len(text), 1) for text in texts]
    mean = sum(rewards) / len(rewards)
    deviation = math.sqrt(sum((one - mean) ** 2 for one in rewards) / max(len(rewards) - 1, 1))
    return [(one - mean) / (deviation + 1e-4) for one in rewards]


def logprobs(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """Return the logprob of each token but the first."""
    ids = torch.tensor([tokens])
    logits = model(ids).logits[0, :-1].float()
    return torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]


def step(model: Any, found: Sequence[Sample]) -> dict[str, Any]:
    """Return what a step is trained on.

    Returns:
        sampled: tokens; `wrong`: those that encoding again does not give back; `rollouts_changed`: those of all `rollouts`.
        mean_difference: of the model's logprobs from the engine's, on the sampled tokens.
        mean_drifted, drifted: mean and largest such difference on the tokens that changed rollouts keep, in their context.
        cosine: between the two gradients of the step; 1 if nothing changed.
        cosine_changed: of the rollouts that changed alone; None without any.
    """
    parameters = [one for one in model.parameters() if one.requires_grad]

    def backward(tokens: Sequence[int], begin: int, advantage: float) -> torch.Tensor:
        own = logprobs(model, tokens)
        if len(tokens) > begin:
            (-advantage * own[begin - 1 :].sum()).backward()
        return own.detach()

    def taken() -> list[torch.Tensor]:
        gradient = [torch.zeros_like(one) if one.grad is None else one.grad for one in parameters]
        model.zero_grad(set_to_none=True)
        return gradient

    model.zero_grad(set_to_none=True)
    exact: list[float] = []
    drifted: list[float] = []
    # The exact gradient, then the other one; of each first the part of rollouts that changed.
    for one in (one for one in found if one.changed):
        own = backward(one.tokens, one.begin, one.advantage)
        exact += [abs(own[n - 1].item() - one.logprobs[n - one.begin]) for n in range(one.begin, len(one.tokens))]
    changed = taken()
    for one in (one for one in found if one.changed):
        own = backward(one.again, one.begin_again, one.advantage)
        drifted += [abs(own[there - 1].item() - one.logprobs[here - one.begin]) for here, there in one.kept()]
    changed_again = taken()
    for one in (one for one in found if not one.changed):
        own = backward(one.tokens, one.begin, one.advantage)
        exact += [abs(own[n - 1].item() - one.logprobs[n - one.begin]) for n in range(one.begin, len(one.tokens))]
    same = taken()
    any_changed = any(one.changed for one in found)
    sampled = sum(len(one.tokens) - one.begin for one in found)
    return {
        "rollouts": len(found),
        "rollouts_changed": sum(one.changed for one in found),
        "sampled": sampled,
        "wrong": sampled - sum(len(one.kept()) for one in found),
        "mean_difference": sum(exact) / len(exact),
        "mean_drifted": sum(drifted) / len(drifted) if drifted else None,
        "drifted": max(drifted, default=None),
        "cosine": cosine(same, changed, changed_again) if any_changed else 1.0,
        "cosine_changed": cosine([torch.zeros_like(one) for one in same], changed, changed_again)
        if any_changed
        else None,
    }


def cosine(
    same: Sequence[torch.Tensor], changed: Sequence[torch.Tensor], changed_again: Sequence[torch.Tensor]
) -> float:
    """Return the cosine of `same + changed` and `same + changed_again`, a tensor at a time."""
    dot = one = other = 0.0
    for s, a, b in zip(same, changed, changed_again, strict=True):
        left, right = (s + a).double(), (s + b).double()
        dot += (left * right).sum().item()
        one += (left * left).sum().item()
        other += (right * right).sum().item()
    return dot / math.sqrt(one * other) if one and other else math.nan


def steps_of(rollouts: Sequence[dict[str, Any]], wanted: Sequence[str]) -> list[tuple[str, list[list[dict[str, Any]]]]]:
    """Return the groups of each step, sampled at temperature 1: of each kind in `code + JSON` the largest of a prompt.

    A step without two rollouts of a prompt for each of its kinds is left out.
    """
    found = []
    for name in wanted:
        groups = []
        for kind in name.split(" + "):
            prompts: dict[str, list[dict[str, Any]]] = {}
            for one in rollouts:
                if one["kind"] == kind and one["temperature"] == 1.0:
                    prompts.setdefault(one["prompt"], []).append(one)
            groups.append(max(prompts.values(), key=len, default=[])[:GROUP])
        if all(len(group) > 1 for group in groups):
            found.append((name, groups))
    return found


def main() -> None:
    """Run the command line."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--rollouts", type=Path, required=True, help="as benchmarks.drift.run writes them")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", nargs="+", required=True, help='the kinds of each step, such as "code + JSON"')
    parser.add_argument("--length", type=int, default=96, help="sampled tokens of a rollout (default: 96)")
    parser.add_argument("--seconds", type=float, default=300.0, help="no step begins later (default: 300)")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model.get_input_embeddings().requires_grad_(False)
    begun, results = time.monotonic(), []
    for kind, groups in steps_of(json.loads(args.rollouts.read_text()), args.steps):
        if time.monotonic() - begun > args.seconds:
            print(f"gradient: out of time before {kind}", file=sys.stderr, flush=True)
            break
        results.append({"kind": kind, **step(model, samples(groups, tokenizer, args.length))})
        print(f"gradient: [{time.monotonic() - begun:4.0f}s] {json.dumps(results[-1])}", file=sys.stderr, flush=True)
        args.out.write_text(json.dumps(results))
    args.out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
