"""AReaL: a workflow whose episodes are agents in sessions of the router.

    workflow = SessionWorkflow("http://10.0.0.9:30000", agent, sampling={"temperature": 1.0, "max_new_tokens": 1024})
    trainer.train(workflow=workflow)                            # AReaL's PPOTrainer

`SessionWorkflow` is a `RolloutWorkflow` of AReaL 1.0 (`areal/api/workflow_api.py`). AReaL's `WorkflowExecutor` checks what it
returns with `check_trajectory_format` (`areal/infra/workflow_executor.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from middleware_hub.client.asynchronous import AsyncSession
from middleware_hub.client.errors import UnknownReplyError
from middleware_hub.client.trajectory import Trajectory
from middleware_hub.integrations.response import response_of
from middleware_hub.integrations.rollout import as_number, check_session_options, client_for, result_of
from middleware_hub.integrations.samples import Agent
from middleware_hub.integrations.versions import require

require(
    "areal",
    [
        "areal.api:RolloutWorkflow.arun_episode",
        "areal.infra.workflow_context:WorkflowContext.is_eval",
        "areal.infra.workflow_context:get",
        "areal.utils.data:concat_padded_tensors",
    ],
)

import torch  # noqa: E402 - after the check of AReaL's version, which needs it
from areal.api import RolloutWorkflow  # noqa: E402
from areal.infra import workflow_context  # noqa: E402
from areal.utils.data import concat_padded_tensors  # noqa: E402

logger = logging.getLogger(__name__)

_OF_THE_LOSS = ("temperature", "top_p", "top_k", "min_p")
"""What no request of an agent may change: AReaL's loss is that of these parameters."""


class SessionWorkflow(RolloutWorkflow):
    """Runs an agent for each episode, in a session of its own.

    Args:
        router: its address; several, separated by commas, if they share a store.
        agent: `async agent(base_url, prompt, request_kwargs, metadata)`, which returns a dictionary with a `reward`. `prompt`
            has the `messages` of the row, `metadata` all of its columns and `session_id`.
        sampling: `sampling_params` of all turns.
        roots: `head`: the agent's task alone; `all`: also what it asked beside it, such as titles.
        options: further fields of a session: `response_budget`, `lora_path`, `chat_template_kwargs`, ...

    Raises TypeError for an unknown option, or one that is each rollout's own, such as `sampling_params`.
    """

    def __init__(
        self,
        router: str,
        agent: Agent,
        *,
        sampling: Mapping[str, Any] | None = None,
        roots: str = "head",
        **options: Any,
    ) -> None:
        check_session_options(options)
        self.router = router
        self.agent = agent
        self.sampling = dict(sampling or {})
        self.roots = roots
        self.options = options

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any] | None:
        """Return the sequences of an episode, one a row; None, which AReaL counts as rejected, if none may be trained on.

        Shapes: `input_ids`, `loss_mask`, `logprobs`, `versions` (-1 for context), `attention_mask` (rows, longest); `rewards`
        (rows). Sequences that are not exact, or have images, are left out; so is an episode whose agent failed or named no
        reward. `engine` is AReaL's own and is not asked. Evaluations have a separate namespace at the router.

        Raises ValueError if a weight version is no number; RouterClientError if the router cannot be asked.
        """
        client = client_for(self.router, evaluation=workflow_context.get().is_eval)
        pinned = [name for name in _OF_THE_LOSS if name in self.sampling]
        given = {"sampling_params": self.sampling, "pin": pinned, **self.options}
        async with await AsyncSession.create(client, **given) as session:
            try:
                work = self.agent(
                    base_url=session.anthropic_base_url,  # an SDK that adds no /v1 also works
                    prompt=data["messages"],
                    request_kwargs={},  # the session has the parameters
                    metadata={**data, "session_id": session.id},
                )
                said = await result_of(work)
            except Exception:
                logger.warning("an episode is rejected, its agent failed", exc_info=True)
                return None
            try:
                found = (await session.finalize(roots=self.roots)).trajectories
            except UnknownReplyError as error:
                logger.warning("an episode is rejected, its session is lost: %s", error)
                return None
        rows = []
        for one in found:
            score = (one.details.get("reward_info") or {}).get("score")
            reward = as_number(score if score is not None else said.get("reward"))
            reasons = _reasons(one, reward)
            if reasons:
                logger.warning("a sequence of session %s is left out: %s", session.id, ", ".join(reasons))
            else:
                rows.append(tensors(one, reward or 0.0))
        return concat_padded_tensors(rows) if rows else None


def _reasons(found: Trajectory, reward: float | None) -> list[str]:
    """Return why a sequence must not be trained on."""
    made = response_of(found)
    reasons = [] if made.usable else list(made.reasons) or ["inexact"]
    reasons += ["multimodal"] if found.multi_modal_data.images else []
    return reasons + (["no_reward"] if reward is None else [])


def tensors(found: Trajectory, reward: float) -> dict[str, torch.Tensor]:
    """Return a sequence as AReaL's own workflows do, in a batch of one. Raises ValueError if a weight version is no number."""
    versions = found.token_versions()
    if wrong := sorted({version for version in versions if version is not None and not version.isdecimal()}):
        raise ValueError(
            f"the engines say the weight versions {', '.join(map(repr, wrong))}, which are no numbers: set AReaL's after each "
            "update, POST /update_weight_version {'new_version': '7', 'abort_all_requests': false}"
        )
    made = {
        "input_ids": torch.tensor(found.tokens, dtype=torch.int32),
        "loss_mask": torch.tensor(found.loss_mask, dtype=torch.int32),
        "logprobs": torch.tensor(found.logprobs, dtype=torch.float32),
        "versions": torch.tensor([-1 if one is None else int(one) for one in versions], dtype=torch.int32),
        "attention_mask": torch.ones(len(found.tokens), dtype=torch.bool),
        "rewards": torch.tensor(reward, dtype=torch.float32),
    }
    return {name: value.unsqueeze(0) for name, value in made.items()}
