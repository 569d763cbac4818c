"""A loop of your own: GRPO on rollouts that are text, with exact tokens, and weights that go through the router.

    python -m examples.training_loop --router http://127.0.0.1:30000 --model MODEL --weights FOLDER

Rollouts of several turns are sampled one step ahead. A step waits for its groups, fetches their tokens, takes one step of the
optimizer, saves the weights, and lets the router give them to the engines. That cuts the replies that are being sampled: they
come back as far as they are, and go on from the same tokens under the new weights. docs/training-loop.md explains it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from middleware_hub.client import AsyncClient, AsyncConversation, RefusedError, Trajectory

GROUP = 4
"""Rollouts of one prompt: their rewards are compared with each other."""
GROUPS = 2
"""Groups in a step."""
AHEAD = 1
"""Steps whose groups are sampled while one is trained on, so that engines and trainer work at the same time. No token is more
than so many versions old."""
CLIP = 0.2


@dataclass
class Rollout:
    """A conversation; `cuts` says how often an update cut it in the middle of a reply."""

    talk: AsyncConversation
    cuts: int = 0

    async def play(self, turns: int, chance: random.Random) -> Rollout:
        """Go through all turns. The environment of this example answers everything with the same question."""
        for turn in range(turns):
            left = chance.randint(16, 96)  # a random model hardly ever ends a reply by itself
            while left > 0:
                reply = await self.talk.say({"max_new_tokens": left})
                if reply.finish != "abort":
                    break
                self.cuts += bool(reply.output_ids)
                left -= len(reply.output_ids)  # said again, it goes on where it was cut
            if turn + 1 < turns:
                self.talk.append("\nAre you sure?\n")
        return self

    async def tokens(self) -> Trajectory:
        """Return the exact tokens. Raises NotUsableError if a reply is lost."""
        return (await self.talk.retrieve()).require_exact()

    @property
    def reward(self) -> float:
        """Return the share of letters in the response: something that a random model can get better at."""
        said = self.talk.transcript.response
        return sum(one.isascii() and one.isalpha() for one in said) / max(len(said), 1)


Group = Sequence[tuple[Rollout, Trajectory]]


class Policy:
    """The model that is trained.

    Attributes:
        published: the weights of each version that the engines have had. Only `examples.measured` needs the older ones.
    """

    def __init__(self, folder: str, learning_rate: float) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate, weight_decay=0.0)
        self.published: dict[str, dict[str, torch.Tensor]] = {}

    def logprobs(self, tokens: Sequence[int], version: str | None = None) -> torch.Tensor:
        """Return the logprob of each token but the first, under the current weights or those of a version."""
        ids = torch.tensor([tokens])
        weights = {} if version is None else self.published[version]
        logits = torch.func.functional_call(self.model, weights, (ids,)).logits[0, :-1]
        return torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]

    def loss(self, groups: Sequence[Group]) -> torch.Tensor:
        """Return GRPO's loss, a mean over the sampled tokens."""
        total, count = torch.zeros(()), 0
        for group in groups:
            for (_, found), advantage in zip(group, advantages(group), strict=True):
                sampled = torch.tensor(found.loss_mask[1:], dtype=torch.bool)
                old = torch.tensor(found.logprobs)[1:]  # the engine's own
                total = total + grpo(self.logprobs(found.tokens)[sampled], old[sampled], advantage)
                count += found.sampled
        return total / count

    def learn(self, groups: Sequence[Group]) -> None:
        """Take one step of the optimizer."""
        self.optimizer.zero_grad()
        self.loss(groups).backward()
        self.optimizer.step()

    async def publish(self, client: AsyncClient, folder: Path, version: str) -> None:
        """Give the engines the current weights, through the router. Replies that are being sampled are cut."""
        self.published[version] = {name: one.detach().clone() for name, one in self.model.named_parameters()}
        await asyncio.to_thread(self.model.save_pretrained, folder / version)
        await client.to_workers("/pause_generation", {"mode": "abort"})  # replies come back as far as they are
        await update(client, {"model_path": str((folder / version).absolute()), "weight_version": version})
        await client.to_workers("/continue_generation", {})  # what was sent in the meantime begins now


async def update(client: AsyncClient, body: dict[str, Any], attempts: int = 5) -> None:
    """Let every worker load weights from a folder. Raises RefusedError with what a worker said if one of them cannot."""
    for left in reversed(range(attempts)):
        try:
            await client.to_workers("/update_weights_from_disk", body)
            return
        except RefusedError:  # SGLang also refuses while its scheduler has not yet dropped what was aborted
            if not left:
                raise
            await asyncio.sleep(0.2)


def grpo(new: torch.Tensor, old: torch.Tensor, advantage: float) -> torch.Tensor:
    """Return the clipped loss of one rollout, summed over its sampled tokens."""
    ratio = (new - old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).sum()


def advantages(group: Group) -> list[float]:
    """Return how much better than its group each rollout was."""
    rewards = torch.tensor([rollout.reward for rollout, _ in group])
    return ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).tolist()


async def batches(client: AsyncClient) -> AsyncGenerator[list[Group], None]:
    """Yield the groups of one step after another. Those of the next are sampled in the meantime, also across an update."""
    chance = random.Random(0)
    running: deque[asyncio.Task[list[Rollout]]] = deque()

    async def sampled(prompt: str, turns: int) -> list[Rollout]:
        talks = [AsyncConversation(client, prompt, abort_policy="return") for _ in range(GROUP)]
        return await asyncio.gather(*[Rollout(talk).play(turns, chance) for talk in talks])

    try:
        for number in itertools.count():
            prompt = f"Question {number}: how long is it?\n"
            running.append(asyncio.create_task(sampled(prompt, chance.randint(1, 4))))
            if len(running) == GROUPS * (1 + AHEAD):
                batch = [await running.popleft() for _ in range(GROUPS)]
                yield [[(rollout, await rollout.tokens()) for rollout in group] for group in batch]
    finally:
        for task in running:
            task.cancel()  # no step will train on these: the router tells the workers to stop
        await asyncio.gather(*running, return_exceptions=True)


def reward(groups: Sequence[Group]) -> float:
    """Return the mean reward of a step."""
    found = [rollout.reward for group in groups for rollout, _ in group]
    return sum(found) / len(found)


async def train(args: argparse.Namespace) -> tuple[Policy, list[list[Group]]]:
    """Train for some steps, and print the reward of each. Return the policy, and what each step was trained on."""
    torch.manual_seed(0)
    steps: list[list[Group]] = []
    policy, folder = Policy(args.model, args.learning_rate), Path(args.weights)
    async with AsyncClient(args.router.split(",")) as client, aclosing(batches(client)) as sampled:
        await policy.publish(client, folder, "0")
        for step in range(1, args.steps + 1):
            steps.append(groups := await anext(sampled))
            print(json.dumps({"step": step, "reward": reward(groups)}), flush=True)
            await asyncio.to_thread(policy.learn, groups)
            await policy.publish(client, folder, str(step))
    return policy, steps


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--router", required=True, help="its address; several, separated by commas, if they share a store"
    )
    parser.add_argument("--model", required=True, help="the folder that the engines were started with")
    parser.add_argument("--weights", required=True, help="a folder that the engines see under the same name")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(train(arguments()))
