"""SkyRL: a generator whose trajectories are agents in sessions of the router.

    class Experiment(BasePPOExp):
        def get_generator(self, cfg, tokenizer, inference_engine_client):
            step_wise = cfg.generator.step_wise_trajectories
            return AgentGenerator("http://10.0.0.9:30000", agent, step_wise=step_wise)

`AgentGenerator` is a `GeneratorInterface` of SkyRL 0.4 (`skyrl/train/generators/base.py`). SkyRL's trainer checks what it
returns with `validate_generator_output` (`skyrl/train/utils/trainer_utils.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from middleware_hub.client.asynchronous import AsyncClient, AsyncSession
from middleware_hub.client.errors import UnknownReplyError
from middleware_hub.client.trajectory import Trajectory
from middleware_hub.integrations.response import LOST, NOTHING, Response, response_of
from middleware_hub.integrations.rollout import as_number, check_session_options, client_for, result_of
from middleware_hub.integrations.samples import Agent
from middleware_hub.integrations.versions import require

require(
    "skyrl",
    [
        "skyrl.train.generators.base:GeneratorInterface.generate",
        "skyrl.train.generators.base:GeneratorInput",
        "skyrl.train.generators.base:GeneratorOutput",
        "skyrl.train.generators.base:TrajectoryID.instance_id",
        "skyrl.train.generators.utils:get_rollout_metrics",
    ],
)

from skyrl.train.generators.base import (  # noqa: E402 - after the check of its version
    GeneratorInput,
    GeneratorInterface,
    GeneratorOutput,
)
from skyrl.train.generators.utils import get_rollout_metrics  # noqa: E402

logger = logging.getLogger(__name__)

_RENAMED = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
_OF_TEXT = frozenset({"logprobs", "include_stop_str_in_output"})
"""What SkyRL asks of vLLM beside sampling: the router asks for logprobs itself, and keeps every sampled id."""
_OF_THE_LOSS = ("temperature", "top_p", "top_k", "min_p")
"""What no request of an agent may change: SkyRL's loss is that of these parameters."""


@dataclass(frozen=True)
class Row:
    """One sequence of a trajectory, as a row of SkyRL's batch.

    Attributes:
        made: its arrays.
        usable: whether it may be trained on.
        metrics: what goes into `env_metrics`.
    """

    made: Response
    usable: bool
    metrics: dict[str, Any]

    @classmethod
    def of(cls, found: Trajectory, reward: float | None, error: str | None) -> Row:
        """Cut a sequence. A sequence with images is not trained on: SkyRL wants features of its own processor."""
        made = response_of(found)
        lacks = ["multimodal"] if found.multi_modal_data.images else []
        lacks += ["no_reward"] if reward is None else []
        versions = [[run.version, run.start - made.start, run.end - made.start] for run in found.versions]
        reasons = list(dict.fromkeys((*made.reasons, *lacks)))
        metrics = {"reasons": reasons, "turns": len(found.turns), "token_weight_versions": versions}
        if error is not None:
            metrics["agent_error"] = error
        return cls(made, made.usable and not lacks, metrics)

    @property
    def mask(self) -> list[int]:
        return self.made.mask if self.usable else [0] * self.made.length


@dataclass(frozen=True)
class Episode:
    """One trajectory of SkyRL: its rows in the order of commits, its reward, the seconds it took.

    `left_out` counts the sequences that are not in a row.
    """

    rows: list[Row]
    reward: float
    seconds: float
    left_out: int


class AgentGenerator(GeneratorInterface):
    """Runs an agent for each prompt of a batch, in a session of its own.

    Args:
        router: its address; several, separated by commas, if they share a store.
        agent: `async agent(base_url, prompt, request_kwargs, metadata)`, which returns a dictionary with a `reward`. `prompt`
            has the messages; `metadata` has the columns of the row, `env_class`, `trajectory_id` and `session_id`.
        step_wise: `generator.step_wise_trajectories` of SkyRL's configuration. All sequences of an agent are then rows of its
            trajectory, each sampled token once. Otherwise a trajectory is one row: the sequence of the last reply.
        roots: `head`: the agent's task alone; `all`: also what it asked beside it, such as titles.
        options: further fields of a session: `response_budget`, `lora_path`, `chat_template_kwargs`, ...

    Raises TypeError for an unknown option, or one that is each rollout's own, such as `sampling_params`.
    """

    def __init__(
        self, router: str, agent: Agent, *, step_wise: bool = False, roots: str = "head", **options: Any
    ) -> None:
        check_session_options(options)
        self.router = router
        self.agent = agent
        self.step_wise = step_wise
        self.roots = roots
        self.options = options

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """Return the trajectories of a batch, in its order.

        A row that must not be trained on has mask 0, and `env_metrics` says why: its sequence is not exact or has images, its
        session is lost, its agent failed or named no reward. Evaluations have a separate namespace at the router.

        Raises ValueError without `trajectory_ids` if they are needed; RouterClientError if the router cannot be asked.
        """
        prompts, names = input_batch["prompts"], input_batch.get("trajectory_ids")
        if self.step_wise and names is None:
            raise ValueError("step-wise training needs `trajectory_ids`")
        batch = input_batch.get("batch_metadata")
        client = client_for(self.router, evaluation=batch is not None and batch.training_phase == "eval")
        sampling = sampling_params(input_batch.get("sampling_params") or {})
        extras = input_batch.get("env_extras") or [{}] * len(prompts)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._episode(client, sampling, prompt, env_class, extra, name))
                for prompt, env_class, extra, name in zip(
                    prompts, input_batch["env_classes"], extras, names or [None] * len(prompts), strict=True
                )
            ]
        return self._output([task.result() for task in tasks], names)

    async def _episode(
        self,
        client: AsyncClient,
        sampling: Mapping[str, Any],
        prompt: Any,
        env_class: str,
        extras: Mapping[str, Any],
        name: Any,
    ) -> Episode:
        began = time.monotonic()
        told = {"env_class": env_class, "trajectory_id": None if name is None else name.to_string()}
        pinned = [one for one in _OF_THE_LOSS if one in sampling]
        given = {"sampling_params": sampling, "pin": pinned, "metadata": told, **self.options}
        said: Mapping[str, Any] = {}
        failed: str | None = None
        async with await AsyncSession.create(client, **given) as session:
            try:
                work = self.agent(
                    base_url=session.anthropic_base_url,  # an SDK that adds no /v1 also works
                    prompt=prompt,
                    request_kwargs={},  # the session has the parameters
                    metadata={**extras, **told, "session_id": session.id},
                )
                said = await result_of(work)
            except Exception as error:
                logger.warning("the agent of trajectory %s failed", told["trajectory_id"], exc_info=True)
                failed = repr(error)
            try:
                found = list((await session.finalize(roots=self.roots)).trajectories)
            except UnknownReplyError as error:
                logger.warning("the session of trajectory %s is lost: %s", told["trajectory_id"], error)
                found = [LOST]
        task = [one for one in found if not one.details.get("side_request")]
        kept = (found if self.step_wise else task[-1:]) or [NOTHING]
        score = (kept[-1].details.get("reward_info") or {}).get("score")
        reward = as_number(score if score is not None else said.get("reward"))
        rows = [Row.of(one, reward, failed) for one in kept]
        return Episode(rows, reward or 0.0, time.monotonic() - began, max(len(found) - len(kept), 0))

    def _output(self, episodes: Sequence[Episode], names: Sequence[Any] | None) -> GeneratorOutput:
        rows = [(one, row) for one in episodes for row in one.rows]
        made = [row.made for _, row in rows]
        responses = [one.tokens[one.start :] for one in made]
        masks, rewards = [row.mask for _, row in rows], [one.reward for one, _ in rows]
        metrics = get_rollout_metrics(
            responses, rewards, loss_masks=masks, trajectory_completion_times=[one.seconds for one in episodes]
        )
        metrics["generate/rows_not_trained_on"] = sum(not row.usable for _, row in rows)
        metrics["generate/sequences_left_out"] = sum(one.left_out for one in episodes)
        if left_out := metrics["generate/sequences_left_out"]:
            logger.warning(
                "%d sequences are not trained on: without step_wise_trajectories SkyRL takes one of a trajectory",
                left_out,
            )
        of_rows = None
        if self.step_wise and names is not None:
            of_rows = [name for name, one in zip(names, episodes, strict=True) for _ in one.rows]
        return {
            "prompt_token_ids": [one.tokens[: one.start] for one in made],
            "response_ids": responses,
            "rewards": rewards,
            "loss_masks": masks,
            "stop_reasons": [one.finish or "abort" for one in made],
            "rollout_metrics": metrics,
            "rollout_logprobs": [one.logprobs for one in made],
            "trajectory_ids": of_rows,
            "trajectory_generation_times": [one.seconds for one, _ in rows],
            "trajectory_time_splits": None,
            "rollout_expert_indices": None,
            "rollout_sample_support": None,
            "is_last_step": [row is one.rows[-1] for one, row in rows] if self.step_wise else None,
            "env_metrics": [row.metrics for _, row in rows],
            "pixel_values": None,
            "image_grid_thw": None,
        }


def sampling_params(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return SkyRL's parameters, which have vLLM's names, as `sampling_params` of a session; None is left out."""
    return {
        _RENAMED.get(name, name): value for name, value in given.items() if value is not None and name not in _OF_TEXT
    }
