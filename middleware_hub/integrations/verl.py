"""verl: agent loops whose rollouts are text, or agents in sessions. docs/trainers.md shows how they are set up.

- name: text_agent
  _target_: middleware_hub.integrations.verl.TextAgentLoop
  router: http://10.0.0.9:30000
  act: my_env.act
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from middleware_hub.client import operations
from middleware_hub.client.asynchronous import AsyncClient, AsyncConversation, AsyncSession
from middleware_hub.client.conversation import Transcript
from middleware_hub.client.errors import RouterClientError, UnknownReplyError, not_usable
from middleware_hub.client.images import all_sent
from middleware_hub.client.trajectory import Trajectory
from middleware_hub.client.wire import ClientCall
from middleware_hub.integrations.images import Seen, seen_of
from middleware_hub.integrations.response import LOST, Replayed, Response, response_of
from middleware_hub.integrations.rollout import (
    KV_SALT,
    RolloutGroup,
    RolloutProgress,
    Rules,
    as_number,
    client_for,
    result_of,
    talk,
)
from middleware_hub.integrations.versions import require

require(
    "verl",
    [
        f"verl.experimental.agent_loop.agent_loop:{name}"
        for name in (
            "AgentLoopBase.run",
            "AgentLoopMetrics.generate_sequences",
            *(
                f"AgentLoopOutput.{field}"
                for field in "prompt_ids response_ids response_mask response_logprobs routed_experts reward_score num_turns "
                "metrics extra_fields multi_modal_data".split()
            ),
        )
    ],
)

from verl.experimental.agent_loop.agent_loop import (  # noqa: E402 - after the check of its version
    AgentLoopBase,
    AgentLoopMetrics,
    AgentLoopOutput,
)

logger = logging.getLogger(__name__)


class RouterLoop(AgentLoopBase):
    """The base of both loops.

    Args:
        router: its address; several, separated by commas, if they share a store.
        inexact: `mask` gives mask 0 to a sequence that must not be trained on; `raise` fails its rollout.
        moe: layers, and experts of each token, of a model whose routing is replayed.
        ray_workers: whether the SGLang servers that verl started are registered at the router, by verl's names for them.
        groups: the run's name, if trainers elsewhere claim the samples from the router: they are called NAME/UID. Without it
            the router is told of no groups, because an unclaimed group stays in its memory.
    """

    def __init__(
        self,
        *args: Any,
        router: str,
        inexact: str = "mask",
        moe: Sequence[int] | None = None,
        ray_workers: bool = True,
        groups: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if inexact not in ("mask", "raise"):
            raise ValueError(f"`inexact` is mask or raise, not {inexact!r}")
        self.router = router
        self.inexact = inexact
        self.moe = moe
        self.ray_workers = ray_workers
        self.groups = groups

    async def _client(self) -> AsyncClient:
        client = client_for(self.router, evaluation=False)  # verl does not tell its loops which of them validate
        if self.ray_workers:
            await add_workers(client)
        return client

    def _group(self, fields: Mapping[str, Any]) -> RolloutGroup:
        return RolloutGroup.of(self.groups, fields.get("uid"), self.rollout_config.get("n", 1))

    def _sampling(self, sampling_params: Mapping[str, Any]) -> dict[str, Any]:
        params = {name: value for name, value in sampling_params.items() if name not in ("logprobs", "max_tokens")}
        limit = sampling_params.get("max_tokens") or self.rollout_config.response_length
        return {**params, "max_new_tokens": params.get("max_new_tokens") or limit}

    def _replayed(self) -> Replayed:
        if not self.rollout_config.get("enable_rollout_routing_replay", False):
            return Replayed()
        if self.moe is None:
            raise ValueError(
                "enable_rollout_routing_replay is on: write `moe: [LAYERS, EXPERTS_PER_TOKEN]` after `router`, as the model's "
                "config.json has them in num_hidden_layers and num_experts_per_tok"
            )
        layers, chosen = self.moe
        return Replayed(experts=(int(layers), int(chosen)))

    async def _seen(self, found: Sequence[Trajectory]) -> list[Seen]:
        """Return sequences with their images, which verl's own processor has counted."""
        if not any(one.multi_modal_data.images for one in found):
            return [Seen(one) for one in found]
        return await seen_of(found, self.processor, self.mm_processor_kwargs)

    def _output(self, given: Seen, turns: int, seconds: float, fields: Mapping[str, Any]) -> AgentLoopOutput:
        """Return a sequence as verl takes it: cut at the configured lengths, with the versions that it was sampled under.

        verl runs its processor over the images that are left. So a response is cut before an image that does not fit in.

        Raises:
            NotUsableError: it must not be trained on, and `inexact` is `raise`.
            ValueError: the prompt is too long, and has images: verl cuts none of these either.
        """
        found = given.trajectory
        made = response_of(found, self._replayed())
        if not made.usable and self.inexact == "raise":
            what = "; ".join(given.faults) or "the sequence must not be trained on"
            raise not_usable(what, made.reasons)
        prompt, limit = self.rollout_config.prompt_length, self.rollout_config.response_length
        start = max(0, made.start - prompt)  # verl also cuts long prompts at their beginning
        spans = [one.span for one in found.multi_modal_data.images]
        if spans and spans[0][0] < start:
            raise ValueError(
                f"a prompt with images has {made.start} tokens, more than rollout.prompt_length={prompt}: without an image's "
                "tokens its features would stand elsewhere. Raise prompt_length, or send smaller images"
            )
        limit = min([limit, *(low - made.start for low, high in spans if low < made.start + limit < high)])
        images = [image for image, span in zip(given.images, spans, strict=True) if span[1] <= made.start + limit]
        experts = made.experts
        oldest, newest = self._steps(made, fields)
        return AgentLoopOutput(
            prompt_ids=made.tokens[start : made.start],
            response_ids=made.tokens[made.start :][:limit],
            response_mask=(made.mask if made.usable else [0] * made.length)[:limit],
            response_logprobs=made.logprobs[:limit],
            routed_experts=None if experts is None else experts[start : made.start + limit],
            num_turns=2 * turns,
            metrics=AgentLoopMetrics(generate_sequences=seconds),
            **({"multi_modal_data": {"images": images}} if images else {}),
            extra_fields={
                "turn_scores": [],
                "tool_rewards": [],
                "min_global_steps": oldest,
                "max_global_steps": newest,
                "token_kv_versions": made.kv_versions,
                "token_weight_versions": [
                    [run.version, run.start - made.start, run.end - made.start] for run in found.versions
                ],
                "exact": found.exact,
                "reasons": list(made.reasons),
                **({"faults": list(given.faults)} if given.faults else {}),
            },
        )

    def _steps(self, made: Response, fields: Mapping[str, Any]) -> tuple[int, int]:
        """Return the global steps of the oldest and the newest weights of a sequence's sampled tokens.

        Replies have them if the engines know them (`POST /update_weight_version` after each update). Otherwise the step of the
        batch gives them, if the trainer waits for its rollouts. Raises RuntimeError if they are unknown.
        """
        said = [int(version) for version in made.version_runs if version.isdecimal()]
        if said and len(said) == len(made.version_runs):
            return min(said), max(said)
        trainer = self.config.get("trainer") or {}
        mode = (trainer.get("v1") or {}).get("trainer_mode", "sync") if trainer.get("use_v1", True) else "sync"
        mode = "fully async" if self.config.get("async_training") is not None else mode
        step = fields.get("global_steps")
        if mode != "sync" and made.version_runs:
            raise RuntimeError(
                f"verl's trainer is {mode}, and the engines say the weight versions {sorted(set(made.version_runs))}, which "
                "are no steps: set the version after each update, POST /update_weight_version {'new_version': STEP, "
                "'abort_all_requests': false}"
            )
        # Before its first update an engine has the weights of step 0, and step N is trained on those of N - 1.
        at = max(0, int(step) - 1) if step is not None else 0
        return at, at


class TextAgentLoop(RouterLoop):
    """Turns of text, until the environment returns None.

    Args:
        act: your environment, or its dotted path: `act(turn, fields)`, where `fields` are those of the dataset's row. It
            returns a text, or a text and its images.
        max_turns: turns of the model.
        tidy: returns what your history keeps of a turn; or its dotted path. The rollout then has several outputs.
    """

    def __init__(self, *args: Any, act: Any, max_turns: int = 8, tidy: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.act = _loaded(act)
        self.max_turns = max_turns
        self.tidy = None if tidy is None else _loaded(tidy)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        """Return the output of one rollout; a list with `tidy`, the sequence of the last reply at its end."""
        client = await self._client()
        messages = list(kwargs["raw_prompt"])
        images = await self._images(messages)
        text = (self.processor if images else self.tokenizer).apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **dict(self.apply_chat_template_kwargs)
        )
        replayed = self._replayed().experts is not None
        at, group = RolloutProgress(Transcript(text, images=images)), self._group(kwargs)
        conversation = AsyncConversation(
            client,
            at.transcript,
            self._sampling(sampling_params),
            abort_policy="return",
            kv_salt=KV_SALT,
            return_routed_experts=replayed,
            routing_key=str(kwargs["uid"]) if "uid" in kwargs else None,
            group_id=group.id,
            group_size=group.size,
            rollout_id=None if group.id is None or self.tidy is None else at.rollout,
        )
        rules = Rules(self.act, self.max_turns, self.tidy, resume=True, count=self._count)
        began = time.monotonic()
        await talk(conversation, rules, at, kwargs, lambda _reply: None)
        seconds = time.monotonic() - began
        await group.end_text(client, at.transcript.names, None)  # verl computes rewards later
        if self.tidy is None:
            found = await conversation.retrieve(return_routed_experts=replayed, media="inline")
            (only,) = await self._seen([found])
            return self._output(only, at.turns, seconds, kwargs)
        whole = await conversation.cover(return_routed_experts=replayed, media="inline")
        seen = await self._seen(whole.trajectories)
        main, *others = [self._output(one, at.turns, seconds, kwargs) for one in seen]
        return _several(self, [*others, main])  # verl takes the reward of the last output for all

    async def _images(self, messages: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return the images of a prompt, as verl reads them. Raises ValueError for videos and audio."""
        parts = [part for one in messages if not isinstance(one["content"], str) for part in one["content"]]
        if all(part.get("type") == "text" for part in parts):
            return []
        found = await self.process_multi_modal_info(list(messages))
        if others := sorted(name for name, value in found.items() if name != "images" and value):
            raise ValueError(f"a prompt has {', '.join(others)}: of media only images are supported here")
        return all_sent(found.get("images") or ())

    def _count(self, text: str) -> int:
        return len(self.tokenizer.encode(text, add_special_tokens=False))


class SessionAgentLoop(RouterLoop):
    """An agent that speaks OpenAI's or Anthropic's API, in a session. Its branches are the outputs of one rollout.

    Args:
        agent: `async agent(base_url, prompt, request_kwargs, metadata)`, or its dotted path. It may return a dictionary with
            a `reward`.
        roots: `head` leaves out the requests that the agent makes beside its task (a title, a summary).
    """

    def __init__(self, *args: Any, agent: Any, roots: str = "all", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent = _loaded(agent)
        self.roots = roots

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        """Return the outputs of one rollout, in the order of their commits."""
        client = await self._client()
        params = self._sampling(sampling_params)
        budget, group = self.rollout_config.response_length, self._group(kwargs)
        session = await AsyncSession.create(
            client, sampling_params=params, response_budget=budget, group_id=group.id, group_size=group.size
        )
        said: Mapping[str, Any] = {}
        kept = False
        began = time.monotonic()
        try:
            metadata = {name: value for name, value in kwargs.items() if name != "raw_prompt"}
            work = self.agent(
                base_url=session.anthropic_base_url,
                prompt=list(kwargs["raw_prompt"]),
                request_kwargs={},  # the session has the parameters
                metadata={**metadata, "session_id": session.id},
            )
            said = await result_of(work)
            if group.id is not None and (reward := as_number(said.get("reward"))) is not None:
                await session.reward({"reward": reward})
            found = (await session.finalize(roots=self.roots, media="inline")).trajectories
            kept = group.id is not None  # for the trainer that claims it
        except Exception as error:
            if not await _is_lost(session):
                raise
            logger.warning("the session of an agent is lost: %s", error)
            found = (LOST,)
        finally:
            if not kept:
                await session.delete()
        seconds = time.monotonic() - began
        outputs = []
        for one, given in zip(found, await self._seen(found), strict=True):
            output = self._output(given, len(one.turns), seconds, kwargs)
            score = (one.details.get("reward_info") or {}).get("score", said.get("reward"))
            output.reward_score = None if score is None else float(score)
            output.extra_fields["reward_extra_info"] = {}
            outputs.append(output)
        if not outputs:
            raise not_usable("the agent asked for no reply", ["nothing_sampled"])
        return _several(self, outputs)


async def _is_lost(session: AsyncSession) -> bool:
    """Return whether the router does not have a session any more: then its agent may have failed for that reason."""
    try:
        await session.client.run(operations.in_session("GET", session.id, ""))
    except UnknownReplyError:
        return True
    except RouterClientError:
        pass
    return False


def _several(loop: RouterLoop, outputs: list[AgentLoopOutput]) -> Any:
    """Return all outputs, if this trainer takes a list: the trainer of `trainer.use_v1` does."""
    trainer = loop.config.get("trainer") or {}
    if trainer.get("use_v1", True):
        return outputs
    if len(outputs) > 1:
        logger.warning(
            "%d of %d sequences are not trained on: with trainer.use_v1 off verl takes one of a rollout",
            len(outputs) - 1,
            len(outputs),
        )
    return outputs[-1]


_registered: dict[int, float] = {}
_AGAIN = 30.0
"""Seconds after which the servers are looked for again: verl may have started more."""


async def add_workers(client: AsyncClient) -> None:
    """Register verl's SGLang servers; registering one again is no error."""
    import ray

    now = time.monotonic()
    if now - _registered.get(id(client), -_AGAIN) < _AGAIN:
        return
    for replica in range(10_000):
        try:
            server = ray.get_actor(f"sglang_server_{replica}_0")
        except ValueError:
            break
        host, port = await server.get_server_address.remote()
        where = f"[{host}]" if ":" in str(host) else host
        await client.run(
            operations.plain(ClientCall("POST", "/add_worker", {"url": f"http://{where}:{port}"}, again=True))
        )
    _registered[id(client)] = now


def _loaded(given: Any) -> Callable[..., Any]:
    """Return a function, or the function that a dotted path names."""
    if not isinstance(given, str):
        return given  # type: ignore[no-any-return] # whatever can be called
    module, _, name = given.replace(":", ".").rpartition(".")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


__all__: Sequence[str] = ("RouterLoop", "SessionAgentLoop", "TextAgentLoop", "add_workers")
