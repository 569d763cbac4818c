"""OpenEnv: agents that own their loop, recorded in sessions of the router, with the exact tokens of every turn.

    def agent(run):                                     # any agent, with any SDK; it may be a program of its own
        own = {"OPENAI_BASE_URL": run.base_url, "OPENAI_API_KEY": run.key}
        return subprocess.run(["my-agent"], env={**os.environ, **own}).returncode

    factory = partial(RecordedSessionFactory, "http://10.0.0.9:30000", agent, environments)
    worker = HarnessRolloutWorker(harness_session_factory=factory, ...)         # TRL's asynchronous GRPO

`RecordedSession` is a `ResourceSession` and a `TrainableSession` of OpenEnv 0.10 (`openenv/core/harness/rollout.py`). OpenEnv
itself checks the trace when it is made (`openenv/core/harness/training.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from threading import Thread
from typing import Any

from middleware_hub.client.errors import RouterClientError, not_usable
from middleware_hub.client.sync import Client, Session
from middleware_hub.client.trajectory import Cover, Trajectory
from middleware_hub.integrations.rollout import PATIENT
from middleware_hub.integrations.versions import require

require(
    "openenv",
    [
        "openenv.core.harness:ResourceSession",
        "openenv.core.harness:ResourceSessionFactory",
        "openenv.core.harness:TrainableSession.fetch_training_trace",
        "openenv.core.harness:TrainingTrace.turns",
        "openenv.core.harness.training:TrainingTurn.per_token_logps",
    ],
)

from openenv.core.harness import (  # noqa: E402 - after the check of its version
    ResourceSession,
    ResourceSessionFactory,
    TrainingTrace,
)
from openenv.core.harness.training import TrainingTurn  # noqa: E402

logger = logging.getLogger(__name__)

Agent = Callable[["RecordedSession"], int | None]
"""Runs an agent until it is done, and returns its exit code; None is 0."""


class RecordedSession(ResourceSession):
    """One run of an agent in an environment.

    Attributes:
        base_url: for OpenAI's SDKs.
        anthropic_base_url: for Anthropic's.
        google_base_url: for Google's.
        key: names the session at the router's own `/v1`, and opens its turns alone.
        task, episode_id: what `create` was given.
        environment: OpenEnv's own session, which has the tools and the reward.
    """

    def __init__(
        self,
        session: Session,
        environment: ResourceSession,
        agent: Agent,
        *,
        task: Any = None,
        episode_id: str | None = None,
        roots: str = "head",
    ) -> None:
        self.base_url = session.base_url
        self.anthropic_base_url = session.anthropic_base_url
        self.google_base_url = session.google_base_url
        self.key = session.key or ""
        self.task = task
        self.episode_id = episode_id
        self.environment = environment
        self._session = session
        self._roots = roots
        self._done: Future[int] = Future()
        # A daemon, unlike the threads of an executor: an agent that never ends does not hold up the end of the process.
        Thread(target=self._run, args=(agent,), name="agent", daemon=True).start()

    def _run(self, agent: Agent) -> None:
        try:
            code = agent(self) or 0
        except SystemExit as error:  # the agent's program is at its end, and not the trainer's
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        except Exception:
            logger.warning("an agent failed", exc_info=True)
            code = 1
        self._done.set_result(code)

    def initial_messages(self) -> list[dict[str, Any]]:
        return list(self.environment.initial_messages())

    def list_tools(self) -> list[Any]:
        return list(self.environment.list_tools())

    def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        return self.environment.call_tool(name, arguments)

    def wait_for_completion(self, timeout_s: float | None = None) -> int:
        """Wait until the agent is done; return its exit code, 1 if it raised, that of its `sys.exit`. Raises TimeoutError."""
        return self._done.result(timeout_s)

    def fetch_training_trace(self) -> TrainingTrace:
        """End the session; return its turns as OpenEnv's trainers take them. May be called again.

        Raises NotUsableError if a reply is missing or came without logprobs, and OpenEnv's own ValueError.
        """
        return training_trace(self._session.finalize(roots=self._roots, export_all_checkpoints=True))

    def verify(self, transcript: list[dict[str, Any]], final_state: Any | None = None) -> Any:
        """Return what the environment says of the run. Its reward goes into the session, too, as far as there is one."""
        found = self.environment.verify(transcript, final_state)
        if found.env_reward is not None:
            try:
                self._session.reward({"reward": float(found.env_reward)})
            except (RouterClientError, ValueError) as error:  # it has expired or is closed, or the reward is not finite
                logger.warning("the session of a run does not get its reward %s: %s", found.env_reward, error)
        return found

    def close(self) -> None:
        """End the environment, and forget the session: calls that the agent still makes fail."""
        try:
            self._session.delete()
        except RouterClientError as error:  # it has expired, or the router is gone
            logger.warning("a session could not be deleted: %s", error)
        self.environment.close()


class RecordedSessionFactory(ResourceSessionFactory):
    """Makes a session of the router around each session of an environment, and starts the agent.

    Args:
        router: its address; several, separated by commas, if they share a store.
        agent: see `Agent`.
        environments: makes the sessions of the environment.
        sampling: `sampling_params` of all turns, which the agent cannot change. TRL gives those of its policy.
        roots: `head`: the agent's task alone; `all`: also what it asked beside it, such as titles.
        options: further fields of `Client.session`: `response_budget`, `lora_path`, ...
    """

    def __init__(
        self,
        router: str,
        agent: Agent,
        environments: ResourceSessionFactory,
        *,
        sampling: Mapping[str, Any] | None = None,
        roots: str = "head",
        **options: Any,
    ) -> None:
        self._client = Client(router.split(","), retries=PATIENT)
        self._agent = agent
        self._environments = environments
        self._sampling = {name: value for name, value in (sampling or {}).items() if (name, value) != ("top_k", 0)}
        self._roots = roots
        self._options = options

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> RecordedSession:
        """Begin a run. `seed` chooses the environment's task and is not the sampler's: a group would sample the same."""
        environment = self._environments.create(task, seed=seed, episode_id=episode_id)
        try:
            session = Session(
                self._client,
                sampling_params=self._sampling,
                pin=list(self._sampling),
                metadata={"episode_id": episode_id, "seed": seed},
                as_key=True,
                **self._options,
            )
        except BaseException:
            environment.close()
            raise
        return RecordedSession(session, environment, self._agent, task=task, episode_id=episode_id, roots=self._roots)

    def close(self) -> None:
        """Close the connections. Otherwise they end with the process: TRL closes no factory."""
        self._client.close()


def training_trace(found: Cover) -> TrainingTrace:
    """Return a trace with each sample of a session once, in the order of commits.

    Args:
        found: of `finalize` with `export_all_checkpoints`: each sample ends a trajectory, and has all of its tokens there.

    A turn that is not exact is context (mask 0), and `metadata["reasons"]` says why.

    Raises NotUsableError if a reply is missing or has no logprobs; ValueError if OpenEnv does not take the numbers.
    """
    if found.missing:
        raise not_usable(
            f"{len(found.missing)} replies are missing ({', '.join(found.missing[:5])})", ["unknown_reply"]
        )
    return TrainingTrace(turns=[_turn(one) for one in found.trajectories if one.turns])


def _turn(one: Trajectory) -> TrainingTurn:
    last, messages = one.turns[-1], one.details["messages"]
    if one.logprobs is None:
        raise not_usable(f"the reply {last.request_id} has no logprobs", one.reasons)
    sampled = last.end - last.start
    return TrainingTurn(
        node_id=last.request_id,
        prompt_token_ids=one.tokens[: last.start],
        completion_token_ids=one.tokens[last.start : last.end],
        per_token_logps=one.logprobs[last.start : last.end],
        loss_mask=[0] * last.start + [int(one.exact)] * sampled,
        request={"messages": messages[:-1]},
        response={"choices": [{"message": messages[-1], "finish_reason": one.finish}]},
        metadata={"weight_version": last.version, "exact": one.exact, "reasons": list(one.reasons)},
    )
