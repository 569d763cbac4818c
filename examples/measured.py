"""Measures what a step trains on: exact tokens against the engine's logprobs, and beside it what a loop on text would do.

    python -m examples.measured --router http://127.0.0.1:30000 --model MODEL --weights FOLDER

A loop that keeps only text encodes it again at the end. The result spells the same, but is not what was sampled. All is
measured after the last step, so that it does not slow the loop: updates come as often as without it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any

import torch

from examples.training_loop import Group, Policy, advantages, arguments, grpo, reward, train
from middleware_hub.client import Trajectory, Transcript


def step(policy: Policy, groups: Sequence[Group], newest: str) -> dict[str, Any]:
    """Return what a step was trained on. Differences are of logprobs: own pass against the engine's.

    Args:
        policy: its weights become those that the step began with.
        newest: the version of these.

    Returns:
        reward: the mean.
        sampled: tokens that are trained on; `by_version` says how many were sampled under which weights.
        cut: rollouts that an update cut in the middle of a reply.
        difference, mean_difference: of all tokens, each under the weights that it was sampled under.
        newest_only: the largest difference if all tokens are taken for the newest weights' own.
        wrong_tokens: the share of sampled tokens that encoding the text again does not give back.
        drifted, mean_drifted: the difference for the tokens that it does give back, in the context that it makes.
        cosine: between the gradient on exact tokens, and that on tokens that were encoded again.
    """
    rollouts = [rollout for group in groups for rollout, _ in group]
    trajectories = [found for group in groups for _, found in group]
    with torch.no_grad():
        for name, one in policy.model.named_parameters():
            one.copy_(policy.published[newest][name])
        exact = torch.cat([differences(policy, found) for found in trajectories])
        stale = torch.cat([differences(policy, found, version=newest) for found in trajectories])
        again = [encoded_again(policy.tokenizer, rollout.talk.transcript) for rollout in rollouts]
        kept = [_kept(found, tokens) for found, (tokens, _) in zip(trajectories, again, strict=True)]
        drifted = torch.cat(
            [
                _differences_of(policy, found, tokens, places)
                for found, (tokens, _), places in zip(trajectories, again, kept, strict=True)
            ]
        )
    by_version: dict[str, int] = {}
    for found in trajectories:
        for run in found.versions:
            by_version[run.version] = by_version.get(run.version, 0) + run.end - run.start
    sampled = sum(found.sampled for found in trajectories)
    return {
        "reward": reward(groups),
        "sampled": sampled,
        "by_version": by_version,
        "cut": sum(rollout.cuts > 0 for rollout in rollouts),
        "difference": exact.max().item(),
        "mean_difference": exact.mean().item(),
        "newest_only": stale.max().item(),
        "wrong_tokens": 1 - sum(map(len, kept)) / sampled,
        "drifted": drifted.max().item(),
        "mean_drifted": drifted.mean().item(),
        "cosine": torch.cosine_similarity(
            _gradient(policy, policy.loss(groups)), _gradient(policy, _drifted_loss(policy, groups)), dim=0
        ).item(),
    }


def differences(policy: Policy, found: Trajectory, version: str | None = None) -> torch.Tensor:
    """Return how far own logprobs are from the engine's: each sampled token under its own weights, or all under a version's."""
    engine = torch.tensor(found.logprobs)[1:]
    own = {run.version: policy.logprobs(found.tokens, version or run.version) for run in found.versions}
    return torch.cat([(own[run.version] - engine)[run.start - 1 : run.end - 1].abs() for run in found.versions])


def encoded_again(tokenizer: Any, transcript: Transcript) -> tuple[list[int], list[int]]:
    """Return the tokens of a conversation's text, and a mask of those in replies: every prompt and turn by itself."""
    text, at = transcript.recorded, 0
    tokens: list[int] = []
    mask: list[int] = []
    for begin, end in _turns(transcript):
        for piece, value in ((text[at:begin], 0), (text[begin:end], 1)):
            ids = tokenizer.encode(piece, add_special_tokens=not tokens) if piece else []
            tokens += ids
            mask += [value] * len(ids)
        at = end
    return tokens, mask


def _turns(transcript: Transcript) -> list[tuple[int, int]]:
    """Return where the model's turns begin and end. A turn that was cut is in several replies."""
    found: list[tuple[int, int]] = []
    for _, begin, end in transcript.path:
        if found and found[-1][1] == begin:
            begin = found.pop()[0]
        found.append((begin, end))
    return found


def _kept(found: Trajectory, tokens: Sequence[int]) -> list[tuple[int, int]]:
    """Return the sampled tokens that the other encoding has too, as pairs of places."""
    blocks = SequenceMatcher(None, found.tokens, tokens, autojunk=False).get_matching_blocks()
    pairs = [(block.a + number, block.b + number) for block in blocks for number in range(block.size)]
    return [(here, there) for here, there in pairs if found.loss_mask[here] and there > 0]


def _differences_of(
    policy: Policy, found: Trajectory, tokens: Sequence[int], places: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """Return the differences of the tokens that are in both, each under its own version."""
    versions = found.token_versions()
    own = {run.version: policy.logprobs(tokens, run.version) for run in found.versions}
    engine = found.logprobs or []
    return torch.tensor([abs(own[str(versions[here])][there - 1].item() - engine[here]) for here, there in places])


def _drifted_loss(policy: Policy, groups: Sequence[Group]) -> torch.Tensor:
    """Return the loss of a loop on text. The engine's logprobs are of other tokens, so its own pass stands for them."""
    total, count = torch.zeros(()), 0
    for group in groups:
        for (rollout, _), advantage in zip(group, advantages(group), strict=True):
            tokens, mask = encoded_again(policy.tokenizer, rollout.talk.transcript)
            new = policy.logprobs(tokens)[torch.tensor(mask[1:], dtype=torch.bool)]
            total = total + grpo(new, new.detach(), advantage)
            count += sum(mask)
    return total / count


def _gradient(policy: Policy, loss: torch.Tensor) -> torch.Tensor:
    return torch.cat([one.flatten() for one in torch.autograd.grad(loss, list(policy.model.parameters()))])


def main() -> None:
    """Train, then print a line of JSON for each step."""
    policy, steps = asyncio.run(train(arguments()))
    for number, groups in enumerate(steps, 1):
        print(json.dumps({"step": number, **step(policy, groups, newest=str(number - 1))}), flush=True)


if __name__ == "__main__":
    main()
