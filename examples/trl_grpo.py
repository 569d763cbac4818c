"""TRL's GRPOTrainer on rollouts that are text: two steps with a tiny model, on the CPU.

    python -m examples.trl_grpo --router http://127.0.0.1:30000 --model MODEL --weights FOLDER

It prints a line of JSON for each sample that reaches the loss: its ids, its mask, the engine's logprobs, and how far from
them those of an own forward pass are.
"""

from __future__ import annotations

import argparse
import copy
import json
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from middleware_hub.integrations.trl import text_rollout


def act(_turn: str, fields: dict[str, Any]) -> str | None:
    """Ask once more, then end. What is put into `fields` reaches the reward function."""
    fields["asked"] = fields.get("asked", 0) + 1
    return "\nAre you sure?\n" if fields["asked"] == 1 else None


def reward(completions: list[Any], usable: list[bool], **_more: Any) -> list[float | None]:
    """Return the share of letters. None keeps a sample out of its group's mean."""
    said = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
    shares = [sum(map(str.isalpha, text)) / max(len(text), 1) for text in said]
    return [share if fit else None for share, fit in zip(shares, usable, strict=True)]


class Watched(GRPOTrainer):
    """The trainer, and a look at what reaches its loss. `engine` is the engines' model, if they are given no new weights."""

    engine: Any = None

    def compute_loss(self, model: Any, inputs: dict[str, torch.Tensor], *rest: Any, **options: Any) -> Any:
        """Print each sample, and go on as usual."""
        for number in range(len(inputs["prompt_ids"])):
            prompt = inputs["prompt_ids"][number][inputs["prompt_mask"][number].bool()]
            there = inputs["completion_mask"][number].bool()
            completion, mask = inputs["completion_ids"][number][there], inputs["tool_mask"][number][there]
            logprobs = inputs["sampling_per_token_logps"][number][there]
            with torch.no_grad():
                logits = (self.engine or model)(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
            own = torch.log_softmax(logits.float(), -1).gather(1, completion[:, None])[:, 0]
            line = {
                "step": self.state.global_step,
                "prompt_ids": prompt.tolist(),
                "completion_ids": completion.tolist(),
                "mask": mask.tolist(),
                "logprobs": logprobs.tolist(),
                "difference": ((own - logprobs).abs() * mask).max().item(),
            }
            print(json.dumps(line), flush=True)
        return super().compute_loss(model, inputs, *rest, **options)


def main() -> None:
    """Train for some steps."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--router", required=True)
    parser.add_argument("--model", required=True, help="the folder that the engines were started with")
    parser.add_argument(
        "--weights", help="a folder that the engines see under the same name; without it they keep theirs"
    )
    parser.add_argument("--output", default="/tmp/trl", help="the trainer's own folder")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--stop", help="a string that ends a turn: a random model hardly ever ends one by itself")
    parser.add_argument("--chat", action="store_true", help="prompts are messages")
    parser.add_argument(
        "--random", action="store_true", help="the folder has a tokenizer only: make a random model for it"
    )
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    if args.random:
        tiny = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        shape = Qwen3Config(vocab_size=len(tokenizer), num_key_value_heads=2, head_dim=16, **tiny)
        model = Qwen3ForCausalLM(shape)
    else:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    untrained = copy.deepcopy(model)  # now: the trainer wraps the model's methods
    texts = [f"Question {number}: how long is it?\n" for number in range(4)]
    prompts = [[{"role": "user", "content": text}] for text in texts] if args.chat else texts
    trainer = Watched(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(
            args.output,
            per_device_train_batch_size=4,
            num_generations=2,
            max_completion_length=96,
            max_steps=args.steps,
            learning_rate=1e-3,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=tokenizer,
        rollout_func=text_rollout(args.router, act, weights=args.weights, sampling={"stop": args.stop}),
    )
    trainer.engine = untrained if args.weights is None else None
    trainer.train()


if __name__ == "__main__":
    main()
