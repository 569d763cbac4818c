"""TRL on rollouts with images, against a router: one step. Prints how far TRL's own logprobs are from the engine's.

python -m tests.support.seeing_trl URL MODEL OUTPUT
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForImageTextToText, AutoProcessor
from trl import GRPOConfig, GRPOTrainer

from examples.grid_world import SEES, World
from middleware_hub.integrations.trl import seeing, text_rollout


def act(_turn: str, fields: dict[str, Any]) -> Any:
    """Show another picture after the first turn."""
    fields["asked"] = fields.get("asked", 0) + 1
    return (f"<|im_end|>\n{SEES}", [World((1, 2), (3, 3)).picture()]) if fields["asked"] == 1 else None


def reward(completions: list[Any], usable: list[bool], **_more: Any) -> list[float | None]:
    """Return something that differs within a group. None keeps a sample out of its group's mean."""
    return [float(len(str(one)) % 7) if fit else None for one, fit in zip(completions, usable, strict=True)]


class Watched(seeing(GRPOTrainer)):
    """The trainer, and a look at what reaches its loss."""

    def compute_loss(self, model: Any, inputs: dict[str, Any], *rest: Any, **options: Any) -> Any:
        """Print the figures of a batch, and go on as usual."""
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        there = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        count = inputs["completion_ids"].size(1)
        images = {name: inputs[name] for name in ("pixel_values", "image_grid_thw", "num_images", "mm_token_type_ids")}
        with torch.no_grad():
            own, *_ = self._get_per_token_logps_and_entropies(model, ids, there, count, **images)
        mask = inputs["tool_mask"] * inputs["completion_mask"]
        told = {
            "difference": ((own - inputs["sampling_per_token_logps"]).abs() * mask).max().item(),
            "sampled": int(mask.sum()),
            "images": inputs["num_images"],
            "in_completions": int((inputs["mm_token_type_ids"][:, -count:] == 1).sum()),
        }
        print(json.dumps(told), flush=True)
        return super().compute_loss(model, inputs, *rest, **options)


def main(url: str, folder: str, output: str) -> None:
    """Train for one step."""
    worlds = [World((0, 0), (2, 3)), World((3, 1), (0, 2))]
    rows = [{"prompt": [{"role": "user", "content": "Which way?"}], "images": [world.picture()]} for world in worlds]
    trainer = Watched(
        model=AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=reward,
        args=GRPOConfig(
            output,
            per_device_train_batch_size=4,
            num_generations=2,
            max_completion_length=64,
            max_steps=1,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoProcessor.from_pretrained(folder),
        rollout_func=text_rollout(url, act, weights=None, sampling={"stop": "e"}),
    )
    trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
