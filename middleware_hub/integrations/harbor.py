"""Harbor: a job plugin that records each trial in a session, and gives Harbor the exact tokens of every turn.

    harbor run --plugin middleware_hub.integrations.harbor:SessionPlugin --plugin-kwarg router=http://10.0.0.9:30000 ...

    before a trial     its agent's base URL becomes the address of a session (`TrialConfig.agent.base_url`)
    START              the session is made, in the group of its task
    AGENT_END          the tokens of the turns so far are fetched ...
    VERIFICATION_START ... and put into the agent's result, behind Harbor's own reading of the agent's logs
    END                the verifier's rewards go into the session, and it is finalized; what came late is added

The wire format of `AgentContext.rollout_details` is `harbor/models/agent/rollout_detail.py` of Harbor 0.26.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from middleware_hub.client import operations
from middleware_hub.client.asynchronous import AsyncClient, AsyncSession
from middleware_hub.client.errors import RouterClientError
from middleware_hub.client.trajectory import Trajectory, Turn
from middleware_hub.integrations.rollout import PATIENT, RolloutGroup, named_session
from middleware_hub.integrations.versions import require

require(
    "harbor",
    [
        "harbor.job:Job.on_trial_started",
        "harbor.job:Job.on_agent_ended",
        "harbor.job:Job.on_verification_started",
        "harbor.job:Job.on_trial_ended",
        "harbor.models.agent.context:AgentContext.rollout_details",
        "harbor.models.trial.config:AgentConfig.base_url",
        "harbor.models.trial.config:TrialConfig.trials_dir",
        "harbor.models.job.plugin:BaseJobPlugin",
        "harbor.models.trial.result:TrialResult.recorded_exceptions",
    ],
)

from harbor.agents.factory import AgentFactory  # noqa: E402 - after the check of its version
from harbor.models.agent.rollout_detail import RolloutDetail  # noqa: E402
from harbor.models.job.plugin import BaseJobPlugin  # noqa: E402

if TYPE_CHECKING:
    from harbor.job import Job
    from harbor.models.agent.context import AgentContext
    from harbor.models.job.result import JobResult
    from harbor.models.trial.config import TrialConfig
    from harbor.models.trial.result import TrialResult
    from harbor.trial.hooks import TrialHookEvent

logger = logging.getLogger(__name__)

ADDRESS = "{session_url}"
"""Stands for the session's address in the values of an agent's `env` and `kwargs`."""
METADATA = "tito"
"""The key in `AgentContext.metadata` of what the router said."""


@dataclass
class _Trial:
    """A trial and its session.

    Attributes:
        name: of the session.
        given: the trial's configuration without the session, as it is kept on disk.
        number: of its agent, if the job has several for the task.
        size: of its group.
        session: made when an attempt starts.
        attempts: how often Harbor has started it.
        placed: the replies that were taken from the router.
        waiting: what is to be put into which agent's result.
        left_out: reasons, by branch.
    """

    name: str
    given: TrialConfig
    number: int | None
    size: int
    session: AsyncSession | None = None
    attempts: int = 0
    placed: set[str] = field(default_factory=set)
    waiting: list[tuple[AgentContext, list[RolloutDetail]]] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)


class SessionPlugin(BaseJobPlugin):
    """A plugin for `harbor run`.

    Args:
        router: the router's address; several, separated by commas, are routers with one store. Default: the variable
            `TITO_ROUTER`.
        agent_router: the router's address as agents reach it, from inside of their environments. Default: the first address.
        groups: the name of the run: the trials of a task are the group `NAME/TASK`, which a trainer can claim. Default: the
            job's name. `off`: no groups, and a session is deleted when its trial has ended.
        api_key: the router's, if it has one. Default: the variable `TITO_API_KEY`. Agents send their own.
        sampling_params: for turns that do not set them, as of `POST /sessions`.
    """

    def __init__(
        self,
        router: str | None = None,
        agent_router: str | None = None,
        groups: str | None = None,
        api_key: str | None = None,
        sampling_params: dict[str, Any] | None = None,
    ) -> None:
        found = router or os.environ.get("TITO_ROUTER")
        if not found:
            raise ValueError("name the router: --plugin-kwarg router=http://HOST:PORT, or the variable TITO_ROUTER")
        self._client = AsyncClient(found.split(","), api_key=api_key, retries=PATIENT)
        self._agents = (agent_router or self._client.urls[0]).rstrip("/")
        self._groups = groups
        self._sampling = sampling_params
        self._retry: Any = None
        self._trials: dict[str, _Trial] = {}

    async def on_job_start(self, job: Job) -> None:
        """Point the agents of all trials that are still to run at sessions."""
        self._retry = job.config.retry
        self._groups = job.config.job_name if self._groups is None else self._groups
        groups = _Groups(job._trial_configs)
        # Harbor makes an agent before the first event of its trial, so the address has to be in the configuration. The job's
        # own list stays as it is: a job that is resumed compares it with what is on disk.
        job._remaining_trial_configs = [self._pointed(one, job.id, groups) for one in job._remaining_trial_configs]
        job.on_trial_started(self._start)
        job.on_agent_ended(self._agent_ended)
        job.on_verification_started(self._verification_started)
        job.on_trial_ended(self._end)

    async def on_job_end(self, job_result: JobResult) -> None:
        """Close the connections."""
        await self._client.close()

    def _pointed(self, config: TrialConfig, job_id: Any, groups: _Groups) -> TrialConfig:
        """Return a trial's configuration with the address of its session; without one where its agent asks no model."""
        if config.is_regrade:
            return config  # no agent runs
        name = quote(f"{config.trial_name}.{job_id.hex}", safe="").replace("%", "~")[-128:]
        url = f"{self._agents}/sessions/{name}"
        agent = config.agent
        kwargs, in_kwargs = _addressed(agent.kwargs, url)
        env, in_env = _addressed(agent.env, url)
        changed: dict[str, Any] = {"kwargs": kwargs, "env": env}
        if not in_kwargs and not in_env:
            if not AgentFactory.get_agent_class_from_config(agent).capabilities.base_url:
                logger.warning(
                    "the agent %s takes no base URL, so trial %s is not recorded: if it calls a model, put %s where it finds "
                    "the address, in a value of --agent-env or --agent-kwarg",
                    agent.name or agent.import_path,
                    config.trial_name,
                    ADDRESS,
                )
                return config
            changed["base_url"] = url
        self._trials[config.trial_name] = _Trial(name, config, *groups.of(config))
        return config.model_copy(update={"agent": agent.model_copy(update=changed)})

    async def _start(self, event: TrialHookEvent) -> None:
        trial = self._trials.get(event.trial_name)
        if trial is None:
            return
        # Harbor has just written the configuration with the session's address: without it, a resumed job finds its trial again.
        path = event.config.trials_dir / event.trial_name / "config.json"
        path.write_text(trial.given.model_dump_json(indent=4))
        trial.attempts += 1
        trial.placed.clear()
        trial.waiting.clear()
        trial.left_out.clear()
        if trial.attempts > 1:  # Harbor has dropped the attempt before
            await self._client.run(operations.delete_session(trial.name))
        group = self._group(event.task_name, trial)
        trial.session = await named_session(
            self._client,
            {
                "session_id": trial.name,
                "group_id": group.id,
                "group_size": group.size,
                "sampling_params": self._sampling,
                "metadata": {"task": event.task_name, "trial": event.trial_name},
            },
        )

    def _group(self, task: str, trial: _Trial) -> RolloutGroup:
        if self._groups == "off":
            return RolloutGroup()
        number = "" if trial.number is None else f"/{trial.number}"
        return RolloutGroup(f"{self._groups}/{quote(task, safe='/')}{number}", trial.size)

    async def _agent_ended(self, event: TrialHookEvent) -> None:
        trial, session = self._of(event)
        if trial is None or session is None:
            return
        try:
            self._take(trial, await session.trajectories(), event.result)
        except RouterClientError as error:  # once more at the end of the trial
            logger.warning("the tokens of trial %s are not there yet: %s", event.trial_name, error)

    async def _verification_started(self, event: TrialHookEvent) -> None:
        trial, session = self._of(event)
        if trial is not None and session is not None:
            self._put(trial, session, event.result)

    async def _end(self, event: TrialHookEvent) -> None:
        trial, session = self._of(event)
        if trial is None or session is None:
            return
        trial.session = None
        errors = event.result.recorded_exceptions()
        if errors and self._goes_again(trial, errors):
            return  # Harbor drops this attempt, and the start of the next one drops the session
        try:
            await self._finish(trial, session, event.result, errors)
            if self._groups == "off":
                await session.delete()
        except RouterClientError as error:  # the job goes on, and the trial's result says what is missing
            logger.warning("the session of trial %s is lost, or not finished: %s", event.trial_name, error)
            trial.left_out["session"] = [str(error)]
            self._take(trial, (), event.result)
        if self._put(trial, session, event.result):
            path = event.config.trials_dir / event.trial_name / "result.json"
            path.write_text(event.result.model_dump_json(indent=4))  # Harbor takes secrets out of it after this event

    async def _finish(self, trial: _Trial, session: AsyncSession, result: TrialResult, errors: Sequence[Any]) -> None:
        """Give the session its reward, before a trainer can claim it; then end it, and take what came late."""
        verified = result.verifier_result
        info = _reward_info(verified.rewards if verified is not None else None)
        if errors:
            info["exception"] = errors[0].exception_type
        if info:
            await session.reward(info)
        self._take(trial, (await session.finalize()).trajectories, result)

    def _of(self, event: TrialHookEvent) -> tuple[_Trial | None, AsyncSession | None]:
        trial = self._trials.get(event.trial_name)
        return trial, None if trial is None else trial.session

    def _goes_again(self, trial: _Trial, errors: Sequence[Any]) -> bool:
        """Return whether Harbor will start a failed trial again, by its own rule (`TrialQueue`)."""
        return trial.attempts <= self._retry.max_retries and all(
            self._retry.is_retryable(one.exception_type) for one in errors
        )

    def _take(self, trial: _Trial, found: Sequence[Trajectory], result: TrialResult) -> None:
        """Keep the turns that were not taken before: they are those of the newest step."""
        contexts = [one.agent_result for one in result.step_results or ()] or [result.agent_result]
        context = next((one for one in reversed(contexts) if one is not None), None)
        if context is None:
            return  # no agent ran
        for one in found:
            if not one.exact:
                trial.left_out[str(one.details.get("branch"))] = list(one.reasons)
        trial.waiting.append((context, details_of(found, trial.placed)))

    def _put(self, trial: _Trial, session: AsyncSession, result: TrialResult) -> bool:
        """Put what waits into the agents' results; return whether that changed one."""
        changed = False
        for context, details in trial.waiting:
            before = context.metadata or {}
            said = {"session_id": session.id, "left_out": dict(trial.left_out)}
            if details or before.get(METADATA) != said:
                # What an agent collected itself may be encoded again: the router's replaces it.
                kept = (context.rollout_details or []) if METADATA in before else []
                context.rollout_details = kept + details
                context.metadata = {**before, METADATA: said}
                changed = True
        trial.waiting = []
        return changed


class _Groups:
    """The groups of a job: the attempts at a task by one agent."""

    def __init__(self, configs: Iterable[TrialConfig]) -> None:
        self._sizes: dict[str, dict[str, int]] = {}
        for one in configs:
            of_task = self._sizes.setdefault(_task(one), {})
            of_task[_alike(one)] = of_task.get(_alike(one), 0) + 1

    def of(self, config: TrialConfig) -> tuple[int | None, int]:
        """Return the number of the trial's agent, from 1, if the task has several, and how many attempts there are."""
        of_task = self._sizes[_task(config)]
        key = _alike(config)
        return (list(of_task).index(key) + 1 if len(of_task) > 1 else None), of_task[key]


def _task(config: TrialConfig) -> str:
    return str(config.task.get_task_id())


def _alike(config: TrialConfig) -> str:
    found: str = config.model_dump_json(exclude={"trial_name", "job_id"})
    return found


def _addressed(given: dict[str, Any], url: str) -> tuple[dict[str, Any], bool]:
    """Return values with the address in place of its name, and whether one had it. Values inside of lists are included."""
    text = json.dumps(given)
    return (json.loads(text.replace(ADDRESS, url)), True) if ADDRESS in text else (given, False)


def _reward_info(rewards: dict[str, float | int] | None) -> dict[str, Any]:
    """Return the verifier's rewards as a session keeps them: `reward` is the number that groups know.

    JSON has no number that is not finite: it becomes a text, such as `nan`, which is no reward.
    """
    found: dict[str, Any] = {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in (rewards or {}).items()
    }
    if "reward" not in found and len(found) == 1:
        found["reward"] = next(iter(found.values()))
    return found


def details_of(found: Iterable[Trajectory], placed: set[str]) -> list[RolloutDetail]:
    """Return the turns of exact trajectories in Harbor's form, each turn once, and add their names to `placed`.

    The task's trajectories come first. A turn is in the first trajectory that has most of its tokens. Prompts are whole, as the
    worker read them. `extra` has for each turn `request_ids`, `finish_reasons`, and `weight_versions`: runs
    `[version, start, end]` in offsets of the turn.
    """
    exact = sorted((one for one in found if one.exact), key=lambda one: bool(one.details.get("side_request")))
    longest: dict[str, int] = {}
    for one in exact:
        for turn in one.turns:
            longest[turn.request_id] = max(longest.get(turn.request_id, 0), turn.end - turn.start)
    made = []
    for one in exact:
        turns = [
            turn
            for turn in one.turns
            if turn.request_id not in placed and turn.end - turn.start == longest[turn.request_id]
        ]
        placed.update(turn.request_id for turn in turns)
        if turns:
            made.append(_detail(one, turns))
    return made


def _detail(of: Trajectory, turns: Sequence[Turn]) -> RolloutDetail:
    made = RolloutDetail(
        prompt_token_ids=[of.tokens[: turn.start] for turn in turns],
        completion_token_ids=[of.tokens[turn.start : turn.end] for turn in turns],
        extra={
            "request_ids": [turn.request_id for turn in turns],
            "finish_reasons": [turn.finish for turn in turns],
            "weight_versions": [list(_runs(of, turn)) for turn in turns],
        },
    )
    if of.logprobs is not None:
        made["logprobs"] = [of.logprobs[turn.start : turn.end] for turn in turns]
    return made


def _runs(of: Trajectory, turn: Turn) -> Iterator[tuple[str, int, int]]:
    for run in of.versions:
        low, high = max(run.start, turn.start), min(run.end, turn.end)
        if low < high:
            yield run.version, low - turn.start, high - turn.start
