"""TRL: functions for `GRPOTrainer(rollout_func=...)`, whose rollouts are text, or agents in sessions.

from middleware_hub.integrations.trl import text_rollout

rollout_func = text_rollout("http://10.0.0.9:30000", act, weights="/shared/weights")
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from middleware_hub.client.asynchronous import AsyncClient, AsyncConversation, AsyncSession
from middleware_hub.client.conversation import Transcript
from middleware_hub.client.errors import UnknownReplyError, not_usable
from middleware_hub.client.images import all_sent
from middleware_hub.client.trajectory import Trajectory
from middleware_hub.integrations.images import Seen, seen
from middleware_hub.integrations.response import LOST, NOTHING, Response, response_of
from middleware_hub.integrations.rollout import (
    EVALUATION,
    KV_SALT,
    PATIENT,
    Act,
    RolloutProgress,
    Rules,
    result_of,
    talk,
)
from middleware_hub.integrations.samples import Agent
from middleware_hub.integrations.versions import require

require("trl", ["trl.trainer.grpo_trainer:RolloutFunc", "trl.trainer.grpo_trainer:GRPOTrainer"], strict=True)

logger = logging.getLogger(__name__)

RolloutFunc = Callable[[list[Any], Any], dict[str, Any]]
"""The function that TRL calls: it takes prompts and the trainer, and returns lists with an entry for each prompt."""


def text_rollout(
    router: str,
    act: Act | None = None,
    *,
    weights: str | Path | None,
    max_turns: int = 8,
    sampling: Mapping[str, Any] | None = None,
) -> RolloutFunc:
    """Return a rollout function whose conversations are text.

    Args:
        router: its address; several, separated by commas, if they share a store.
        act: your environment, `act(turn, fields)`. `fields["prompt"]` is the prompt; what it adds there reaches the reward
            functions under its name. Without `act` a rollout is one turn.
        weights: a folder that the engines see under the same name; see `Weights`.
        max_turns: turns of the model.
        sampling: further `sampling_params`, as SGLang knows them.
    """
    rules = Rules(act or _nothing, max_turns if act is not None else 1, resume=True)

    async def one(client: AsyncClient, trainer: Any, fields: dict[str, Any]) -> Trajectory:
        text, images = _text(fields["prompt"], trainer)
        at = RolloutProgress(Transcript(text, images=images))
        params = _sampling(trainer, sampling)
        conversation = AsyncConversation(client, at.transcript, params, abort_policy="return", kv_salt=KV_SALT)
        counted = Rules(**{**vars(rules), "count": lambda text: _count(trainer, text)})
        await talk(conversation, counted, at, fields, lambda _reply: None)
        return await conversation.retrieve(media="inline")

    return _function(router, one, Weights(weights))


def agent_rollout(
    router: str, agent: Agent, *, weights: str | Path | None, sampling: Mapping[str, Any] | None = None
) -> RolloutFunc:
    """Return a rollout function that runs an agent in a session, with the agent's own library.

    Args:
        router: its address; several, separated by commas, if they share a store.
        agent: `async agent(base_url, prompt, request_kwargs, metadata)`. What it returns reaches the reward functions, each
            entry under its name. If it raises, the tokens so far are trained on, with the field `agent_error`.
        weights: a folder that the engines see under the same name; see `Weights`.
        sampling: further `sampling_params`, as SGLang knows them.

    TRL takes one sequence of a rollout: the task's branch of the last reply; `branches_left_out` counts the others.
    """

    async def one(client: AsyncClient, trainer: Any, fields: dict[str, Any]) -> Trajectory:
        params = _sampling(trainer, sampling)
        budget = params["max_new_tokens"]
        async with await AsyncSession.create(client, sampling_params=params, response_budget=budget) as session:
            work = agent(
                base_url=session.anthropic_base_url,
                prompt=fields["prompt"],
                request_kwargs={},  # the session has the parameters
                metadata={"session_id": session.id},
            )
            try:
                fields.update(await result_of(work))
            except Exception as error:
                logger.warning("an agent failed", exc_info=True)
                fields["agent_error"] = repr(error)
            try:
                found = await session.finalize(media="inline")
            except UnknownReplyError as error:
                logger.warning("the session of an agent is lost: %s", error)
                fields["branches_left_out"] = 0
                return LOST
        fields["branches_left_out"] = max(len(found.trajectories) - 1, 0)
        task = [one for one in found.trajectories if not one.details.get("side_request")]
        return task[-1] if task else NOTHING

    return _function(router, one, Weights(weights))


class Weights:
    """Gives the engines the trainer's weights, before the first rollouts of each step, as version `global_step`.

    With a folder, the weights are saved there, every worker loads them through the router, and the files of the previous step
    are removed. Without a folder another program loads the weights (TRL with `use_vllm`), and only the version is set.
    """

    def __init__(self, folder: str | Path | None) -> None:
        self.folder = None if folder is None else Path(folder).absolute()
        self.step: int | None = None

    def publish(self, trainer: Any, run: Callable[..., Any]) -> None:
        """Update the weights if the trainer has taken a step. `run(path, body)` calls all workers."""
        step = trainer.state.global_step
        if step == self.step:
            return
        accelerator = trainer.accelerator
        if self.folder is not None:
            model = accelerator.unwrap_model(trainer.model_wrapped)
            if hasattr(model, "peft_config"):
                raise ValueError(
                    "an adapter's weights are no model for the engines: pass weights=None, and load it there"
                )
            made = self.folder / str(step)
            state = accelerator.get_state_dict(trainer.model_wrapped)  # all processes take part
            if accelerator.is_main_process:
                model.save_pretrained(made, state_dict=state)
                run("/update_weights_from_disk", {"model_path": str(made), "weight_version": str(step)})
                if self.step is not None:
                    shutil.rmtree(self.folder / str(self.step), ignore_errors=True)
        elif trainer.use_vllm and accelerator.is_main_process:
            run("/update_weight_version", {"new_version": str(step), "abort_all_requests": False})
        accelerator.wait_for_everyone()
        self.step = step


SEES = "takes_images_of_rollouts"
"""The attribute of a trainer that does: see `seeing`."""


def seeing(trainer_class: Any) -> Any:
    """Return a subclass of TRL's `GRPOTrainer` that takes the images of rollouts, those of observations too.

    TRL itself takes only the images of the data set where there is a rollout function: others would have no features.
    It has a path for images that its own tools return. The subclass leads the images of the rollouts there: TRL's processor
    makes their features, and their tokens are told from the ids of prompt and completion.
    """

    class SeeingTrainer(trainer_class):
        def _generate(self, prompts: list[Any]) -> Any:
            *found, extra, _, _ = super()._generate(prompts)
            images = extra.pop("images", None)
            if images is not None:
                self.tools = [_looked]  # it looks whether there are any before it takes images of tools
            return (*found, extra, images, images or [])

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            if self.tools:
                raise ValueError("tools of TRL's and a rollout function of tito-router exclude each other")
            try:
                return super()._generate_and_score_completions(inputs)
            finally:
                self.tools = []

    setattr(SeeingTrainer, SEES, True)
    return SeeingTrainer


def _looked() -> None:
    """Stand for what has returned the images."""


One = Callable[[AsyncClient, Any, dict[str, Any]], Awaitable[Trajectory]]


def _function(router: str, one: One, weights: Weights) -> RolloutFunc:
    def rollout_func(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        # TRL calls it without an event loop, but a notebook has a running one. So it gets a thread.
        with ThreadPoolExecutor(1, "tito-rollout") as thread:

            def run(path: str, body: Mapping[str, Any]) -> None:
                thread.submit(asyncio.run, _call_workers(router, path, body)).result()

            weights.publish(trainer, run)
            rollouts = thread.submit(asyncio.run, _rollouts(router, one, prompts, trainer)).result()
            sequences = [_seen(found, trainer) for found, _ in rollouts]
            return _batch(trainer, sequences, [fields for _, fields in rollouts])

    return rollout_func


def _seen(found: Trajectory, trainer: Any) -> Seen:
    """Return a sequence with its images. Raises ValueError if this trainer would leave their features out."""
    if found.multi_modal_data.images and not getattr(trainer, SEES, False):
        raise ValueError("the rollouts have images: make the trainer of `seeing(GRPOTrainer)`, of this module")
    return seen(found, trainer.processing_class)


async def _call_workers(router: str, path: str, body: Mapping[str, Any]) -> None:
    async with AsyncClient(router.split(",")) as client:
        await client.to_workers(path, body)


async def _rollouts(
    router: str, one: One, prompts: Sequence[Any], trainer: Any
) -> list[tuple[Trajectory, dict[str, Any]]]:
    """Run a rollout for each prompt, all at once. TRL repeats a prompt that needs several rollouts."""
    namespace = None if trainer.model.training else EVALUATION
    async with AsyncClient(router.split(","), namespace=namespace, retries=PATIENT) as client:

        async def rollout(prompt: Any) -> tuple[Trajectory, dict[str, Any]]:
            fields = {"prompt": prompt}
            return await one(client, trainer, fields), fields

        return await asyncio.gather(*[rollout(prompt) for prompt in prompts])


def _batch(trainer: Any, sequences: Sequence[Seen], told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the lists that TRL wants. Raises NotUsableError if nothing may be trained on: TRL would divide by zero."""
    made = [response_of(one.trajectory) for one in sequences]
    usable = [one.usable for one in made]
    faults = "; ".join(fault for one in sequences for fault in one.faults)
    if (trainer.model.training or faults) and not any(_everywhere(trainer, usable)):
        raise not_usable(
            f"no sequence of the batch may be trained on{faults and f' ({faults})'}",
            sorted({name for one in made for name in one.reasons}),
        )
    batch: dict[str, Any] = {
        "prompt_ids": [one.tokens[: one.start] for one in made],
        "completion_ids": [one.tokens[one.start :] for one in made],
        "logprobs": [one.logprobs for one in made],
        "env_mask": [_mask(one) for one in made],
        "usable": usable,
        "reasons": [list(one.reasons) for one in made],
        "finish": [one.finish for one in made],
        "token_kv_versions": [one.kv_versions for one in made],
        "token_weight_versions": [
            [[run.version, run.start - one.start, run.end - one.start] for run in given.trajectory.versions]
            for one, given in zip(made, sequences, strict=True)
        ],
    }
    if any(one.images for one in sequences):
        batch["images"] = [list(one.images) for one in sequences]
    names = {name for fields in told for name in fields} - {"prompt"} - batch.keys()
    return {**batch, **{name: [fields.get(name) for fields in told] for name in sorted(names)}}


def _mask(made: Response) -> list[int]:
    return made.mask if made.usable else [0] * made.length


def _everywhere(trainer: Any, values: list[bool]) -> list[bool]:
    """Return the values of all processes."""
    if trainer.accelerator.num_processes == 1:
        return values
    from accelerate.utils import gather_object

    found: list[bool] = gather_object(values)
    return found


def _sampling(trainer: Any, more: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the trainer's settings in SGLang's terms, with the further parameters."""
    args = trainer.args
    params = {
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k if args.top_k and args.top_k > 0 else -1,
        "min_p": args.min_p or 0.0,
        "repetition_penalty": args.repetition_penalty,
        "max_new_tokens": args.max_completion_length,
    }
    return {**params, **(args.generation_kwargs or {}), **(more or {})}


def _text(prompt: Any, trainer: Any) -> tuple[str, list[str]]:
    """Return a prompt as text, and its images; the chat template is applied to messages. Raises ValueError for other media."""
    if isinstance(prompt, str):
        return prompt, []
    blocks = [block for one in prompt if isinstance(one["content"], list) for block in one["content"]]
    if any(block.get("type") != "text" and block.get("image") is None for block in blocks):
        raise ValueError("a prompt has something that is no text and no picture: rollouts here are of these")
    text: str = trainer.processing_class.apply_chat_template(
        prompt,
        tokenize=False,
        add_generation_prompt=True,
        chat_template=trainer.chat_template,
        **trainer.chat_template_kwargs,
    )
    return text, all_sent([block["image"] for block in blocks if block["type"] != "text"])


def _count(trainer: Any, text: str) -> int:
    tokenizer = getattr(trainer.processing_class, "tokenizer", None) or trainer.processing_class
    return len(tokenizer.encode(text, add_special_tokens=False))


def _nothing(_turn: str, _fields: Any) -> None:
    return None


__all__: Sequence[str] = ("RolloutFunc", "Weights", "agent_rollout", "seeing", "text_rollout")
