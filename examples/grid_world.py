"""An agent that sees, trained: it gets a picture of a small world every turn, and answers a move.

    python -m examples.grid_world --router http://127.0.0.1:30000 --model MODEL --weights FOLDER

Each rollout is a conversation in which every turn has a new picture. A step samples a group for each world, takes the exact
tokens and the files of the pictures from the router, lets the model's own processor count each picture, compares the engine's
logprobs with its own forward pass, takes one step of the optimizer, and gives the engines the new weights through the router.
docs/training-loop.md explains it.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from transformers import AutoModelForImageTextToText, AutoProcessor

from examples.training_loop import arguments, grpo, update
from middleware_hub.client import AsyncClient, AsyncConversation
from middleware_hub.integrations.images import Seen, seen_of

SIDE, CELL = 4, 28
"""Cells of a side of the world, and pixels of a cell's side."""
TURNS, TOKENS = 4, 3
"""Moves of a rollout at most, and tokens of an answer."""
GROUP, WORLDS = 4, 2
"""Rollouts of one world, whose rewards are compared; worlds in a step."""
MOVES = ((0, -1), (0, 1), (-1, 0), (1, 0))
SEES = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Which way?<|im_end|>\n<|im_start|>assistant\n"


@dataclass
class World:
    """A square of cells with an agent and its goal."""

    agent: tuple[int, int]
    goal: tuple[int, int]

    def picture(self) -> Image.Image:
        """Draw it: the agent is a blue disc, the goal a green square."""
        made = Image.new("RGB", (SIDE * CELL, SIDE * CELL), "white")
        draw = ImageDraw.Draw(made)
        for at in range(0, SIDE * CELL, CELL):
            draw.line([(at, 0), (at, SIDE * CELL)], "silver")
            draw.line([(0, at), (SIDE * CELL, at)], "silver")
        draw.rectangle(_box(self.goal), "green")
        draw.ellipse(_box(self.agent), "blue")
        return made

    def move(self, said: str) -> None:
        """Move the agent. A random model says no words, so every text is a move, by the sum of its characters."""
        x, y = MOVES[sum(map(ord, said)) % len(MOVES)]
        self.agent = (min(max(self.agent[0] + x, 0), SIDE - 1), min(max(self.agent[1] + y, 0), SIDE - 1))

    @property
    def distance(self) -> int:
        return abs(self.agent[0] - self.goal[0]) + abs(self.agent[1] - self.goal[1])


def _box(cell: tuple[int, int]) -> tuple[int, int, int, int]:
    left, top = cell[0] * CELL, cell[1] * CELL
    return left + 4, top + 4, left + CELL - 4, top + CELL - 4


@dataclass
class Walk:
    """One rollout; its reward says how much nearer the agent has come."""

    talk: AsyncConversation
    world: World
    reward: float = field(default=0.0)

    async def play(self) -> Walk:
        """Let the agent walk until it is there, or has no turns left."""
        before = self.world.distance
        for _ in range(TURNS):
            reply = await self.talk.say({"max_new_tokens": TOKENS})
            self.world.move(reply.text)
            if not self.world.distance:
                break
            self.talk.append(f"<|im_end|>\n{SEES}", [self.world.picture()])
        self.reward = float(before - self.world.distance)
        return self


class Seer:
    """The model that is trained, and the processor of its pictures."""

    def __init__(self, folder: str, learning_rate: float) -> None:
        self.processor = AutoProcessor.from_pretrained(folder)
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate, weight_decay=0.0)

    async def seen(self, walk: Walk) -> Seen | None:
        """Return the tokens of a rollout with its pictures; None if it must not be trained on.

        Raises ValueError if the processor makes another number of tokens of a picture than the engine did.
        """
        (given,) = await seen_of([await walk.talk.retrieve(media="inline")], self.processor)
        if given.faults:
            raise ValueError("; ".join(given.faults))
        return given if given.trajectory.exact else None

    def logprobs(self, given: Seen) -> torch.Tensor:
        """Return the logprob of each token but the first, with the features of the pictures at their spans."""
        found = given.trajectory
        kinds = torch.zeros(1, len(found.tokens), dtype=torch.long)
        for one in found.multi_modal_data.images:
            kinds[0, slice(*one.span)] = 1
        ids = torch.tensor([found.tokens])
        logits = self.model(input_ids=ids, mm_token_type_ids=kinds, **(given.inputs or {})).logits[0, :-1]
        return torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]

    def learn(self, groups: Sequence[Sequence[tuple[Walk, Seen]]]) -> float:
        """Take one step of the optimizer. Return the largest difference between the engine's logprobs and the own ones."""
        self.optimizer.zero_grad()
        largest, count = 0.0, sum(given.trajectory.sampled for group in groups for _, given in group)
        for group in groups:
            if len(group) < 2:
                continue  # there is nothing to compare it with
            rewards = torch.tensor([walk.reward for walk, _ in group])
            better = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
            for (_, given), advantage in zip(group, better.tolist(), strict=True):
                sampled = torch.tensor(given.trajectory.loss_mask[1:], dtype=torch.bool)
                old = torch.tensor(given.trajectory.logprobs)[1:][sampled]
                new = self.logprobs(given)[sampled]
                largest = max(largest, float((new.detach() - old).abs().max()))
                (grpo(new, old, advantage) / count).backward()
        self.optimizer.step()
        return largest

    async def publish(self, client: AsyncClient, folder: Path, version: str) -> None:
        """Give the engines the current weights, through the router. Nothing is being sampled now."""
        await asyncio.to_thread(self.model.save_pretrained, folder / version)
        await update(client, {"model_path": str((folder / version).absolute()), "weight_version": version})


async def walks(client: AsyncClient, chance: random.Random) -> list[list[Walk]]:
    """Sample a group for each world."""
    cells = [(x, y) for x in range(SIDE) for y in range(SIDE)]
    groups = [chance.sample(cells, 2) for _ in range(WORLDS)]
    begun = [
        [Walk(AsyncConversation(client, SEES, images=[World(*pair).picture()]), World(*pair)) for _ in range(GROUP)]
        for pair in groups
    ]
    return [await asyncio.gather(*[walk.play() for walk in group]) for group in begun]


async def main() -> None:
    """Train for some steps, and print the figures of each."""
    args = arguments()
    torch.manual_seed(0)
    chance, folder = random.Random(0), Path(args.weights)
    seer = Seer(args.model, args.learning_rate)
    async with AsyncClient(args.router.split(",")) as client:
        await seer.publish(client, folder, "0")
        for step in range(1, args.steps + 1):
            groups = []
            for group in await walks(client, chance):
                found = [(walk, await seer.seen(walk)) for walk in group]
                groups.append([(walk, given) for walk, given in found if given is not None])
            all_of_them = [(walk, given.trajectory) for group in groups for walk, given in group]
            difference = await asyncio.to_thread(seer.learn, groups)
            await seer.publish(client, folder, str(step))
            told = {
                "step": step,
                "dropped": WORLDS * GROUP - len(all_of_them),
                "reward": sum(walk.reward for walk, _ in all_of_them) / len(all_of_them),
                "sampled": sum(found.sampled for _, found in all_of_them),
                "pictures": sum(len(found.multi_modal_data.images) for _, found in all_of_them),
                "picture_tokens": sum(one.tokens for _, found in all_of_them for one in found.multi_modal_data.images),
                "versions": sorted({run.version for _, found in all_of_them for run in found.versions}),
                "difference": difference,
            }
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
