"""The common parts of slime and miles: `Sample`, which has the same origin in both, and rollouts that fill it."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from middleware_hub.client.asynchronous import AsyncClient, AsyncConversation, AsyncSession
from middleware_hub.client.conversation import Transcript
from middleware_hub.client.errors import UnknownReplyError
from middleware_hub.client.images import all_sent
from middleware_hub.client.operations import GenerateOptions, RetrieveOptions
from middleware_hub.client.trajectory import Trajectory
from middleware_hub.client.wire import Reply
from middleware_hub.integrations.images import Seen, seen_of
from middleware_hub.integrations.response import LOST, NOTHING, Replayed, Response, response_of
from middleware_hub.integrations.rollout import (
    KV_SALT,
    RolloutGroup,
    RolloutProgress,
    Rules,
    as_number,
    result_of,
    talk,
)

logger = logging.getLogger(__name__)

STATE = "tito"
"""The key in `Sample.metadata` of a rollout that was aborted and can go on."""
POLL = 0.5
"""Seconds between two checks whether the trainer has enough."""

Agent = Callable[..., "Awaitable[Mapping[str, Any] | None]"]
"""`async agent(base_url, prompt, request_kwargs, metadata)`, as miles calls it: runs the task with its own libraries."""

USED_OF_SAMPLE = tuple(
    "index rollout_id prompt tokens response response_length reward loss_mask weight_versions rollout_log_probs "
    "rollout_routed_experts remove_sample status metadata prefix_cache_info Status PrefixCacheInfo multimodal_inputs "
    "multimodal_train_inputs".split()
)


@dataclass(frozen=True)
class SampleJob:
    """One sample to be generated, in terms that both trainers share.

    Attributes:
        sample: the trainer's.
        sampling: its `sampling_params`.
        client: of the router.
        replayed: the decisions of the engine that the trainer replays.
        routing_key: of the sample, for the router's policy.
        one: whether the trainer takes only one sample: with partial rollouts both trainers read `.response` of the result.
        mask_earlier: whether tokens that earlier steps sampled get mask 0.
        stopped: returns whether the trainer has enough.
        template: makes a text of a list of messages.
        processor: returns the trainer's processor of images; asked only for sequences that have some.
        put_extras: sets the fields that only one of the trainers has.
        group: of the sample.
    """

    sample: Any
    sampling: Mapping[str, Any]
    client: AsyncClient
    replayed: Replayed = field(default_factory=Replayed)
    routing_key: str | None = None
    one: bool = False
    mask_earlier: bool = False
    stopped: Callable[[], bool] = lambda: False
    template: Callable[[Any], str] = str
    processor: Callable[[], Any] = lambda: None
    put_extras: Callable[[Any, Response], None] = lambda _sample, _response: None
    group: RolloutGroup = field(default_factory=RolloutGroup)

    @property
    def options(self) -> GenerateOptions:
        """Return the options of each generation."""
        return {
            "routing_key": self.routing_key,
            "abort_policy": "return",
            "kv_salt": KV_SALT,
            "return_routed_experts": self.replayed.experts is not None,
            "return_indexer_topk": self.replayed.indexer,
            "group_id": self.group.id,
            "group_size": self.group.size,
        }

    @property
    def retrieval(self) -> RetrieveOptions:
        """Return the options of the retrieval."""
        return {
            "media": "inline",
            "return_top_p": self.replayed.top_p,
            "return_routed_experts": self.replayed.experts is not None,
            "return_indexer_topk": self.replayed.indexer,
        }


def experts(args: Any, *, evaluation: bool) -> tuple[int, int] | None:
    """Return the layers, and the experts of each token in one, if the trainer replays their choice."""
    if evaluation or not getattr(args, "use_rollout_routing_replay", False):
        return None
    return int(args.num_layers), int(args.moe_router_topk)


def masks_earlier(args: Any) -> bool:
    """Return whether the trainer trains only on tokens of its own step, with partial rollouts."""
    return bool(getattr(args, "partial_rollout", False) and getattr(args, "mask_offpolicy_in_partial_rollout", False))


def chat_text(tokenizer: Any, messages: Any) -> str:
    """Return messages as the chat template writes them."""
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text


def count(tokenizer: Any, text: str) -> int:
    """Return the tokens of a text."""
    return len(tokenizer.encode(text, add_special_tokens=False))


async def text_rollout(job: SampleJob, rules: Rules) -> Any:
    """Generate a sample as text. Return it, or with `tidy` a list: all sequences that hold what it sampled."""
    sample = job.sample
    state = sample.metadata.pop(STATE, None)
    prompt = sample.prompt if isinstance(sample.prompt, str) else job.template(sample.prompt)
    at = RolloutProgress(Transcript(prompt, images=_images(sample))) if state is None else RolloutProgress.of(state)
    earlier = frozenset(at.transcript.names) if job.mask_earlier else frozenset[str]()
    known = len(at.transcript.names)
    options = job.options
    if job.group.id is not None and rules.tidy is not None:
        options["rollout_id"] = at.rollout
    conversation = AsyncConversation(job.client, at.transcript, job.sampling, **options)

    def heard(reply: Reply) -> None:
        sample.prefix_cache_info.add(reply.meta_info)
        if reply.meta_info.get("spec_verify_ct"):
            sample.spec_info.add(reply.meta_info)

    await talk(conversation, rules, at, sample, heard)
    text = at.transcript
    # Without `tidy`, the recorded text is the whole text, except for an observation that the budget left unanswered.
    sample.response = text.response if rules.tidy is not None else text.recorded[text.prompt_chars :]
    sample.status = _status(sample, at.finish)
    aborted = at.finish == "abort"
    if aborted:
        sample.metadata[STATE] = at.state()
        if len(at.transcript.names) == known:
            return sample  # aborted in the queue: there is nothing new to fetch
    else:
        await job.group.end_text(job.client, at.transcript.names, sample.reward)
    if rules.tidy is None:
        (only,) = await _seen(job, [await conversation.retrieve(**job.retrieval)])
        _fill(job, sample, only, earlier)
        return sample
    whole = await conversation.cover(**job.retrieval)
    if not job.one and not aborted:
        return _siblings(job, await _seen(job, whole.trajectories), earlier)
    found = whole.trajectories[0]  # the sequence of the last reply; the others do not make it inexact
    (only,) = await _seen(job, [found])
    _fill(job, sample, only, earlier)
    if not aborted:
        _tell_left_out(sample, len(at.transcript.names) - len(found.turns))
    return sample


def _images(sample: Any) -> list[str]:
    """Return the images of a prompt, as the trainer read them. Raises ValueError for other media."""
    given = sample.multimodal_inputs or {}
    if others := sorted(name for name, value in given.items() if name != "images" and value):
        raise ValueError(f"a prompt has {', '.join(others)}: of media only images are supported here")
    return all_sent(given.get("images") or ())


async def _seen(job: SampleJob, found: Sequence[Trajectory]) -> list[Seen]:
    sees = any(one.multi_modal_data.images for one in found)
    return await seen_of(found, job.processor() if sees else None)


def _tell_left_out(sample: Any, replies: int) -> None:
    if replies > 0:
        sample.metadata["replies_left_out"] = replies
        logger.warning(
            "%d replies of sample %s are not trained on: with partial rollouts the trainer takes one sequence of a sample, and "
            "`tidy` spreads the replies over several",
            replies,
            sample.index,
        )


async def agent_rollout(job: SampleJob, agent: Agent, *, one_reward: bool, roots: str) -> Any:
    """Run an agent in a session; return a list: a sample for each of its branches. If stopped: its aborted sample.

    Args:
        one_reward: whether all of them must have the same reward.
        roots: `all`, or `head` for the branches of the task alone (see `finalize`).

    Raises:
        ValueError: the trainer takes one sample only. It would fail on the list later, when it aborts pending samples.
    """
    sample = job.sample
    if job.one:
        raise ValueError(
            "an agent's branches are a list of samples, and with --partial-rollout the trainer reads `.response` of each entry "
            "of a group: leave --partial-rollout off"
        )
    sampling, group = _session_sampling(job.sampling), job.group
    session = await AsyncSession.create(job.client, sampling_params=sampling, group_id=group.id, group_size=group.size)
    kept = False
    try:
        result, stopped = await _run_agent(job, agent, session)
        if stopped:
            sample.status = sample.Status.ABORTED
            return sample
        if group.id is not None and (reward := as_number(result.get("reward"))) is not None:
            await session.reward({"reward": reward})
        found = await session.finalize(roots=roots, media="inline")
        kept = group.id is not None  # for the trainer that claims it
    except UnknownReplyError as error:
        logger.warning("the session of sample %s is lost: %s", sample.index, error)
        return [_nothing(job, result, LOST)]
    finally:
        if not kept:
            await session.delete()
    if not found.trajectories:
        return [_nothing(job, result, NOTHING)]
    made = _siblings(job, await _seen(job, found.trajectories), frozenset())
    for one, trajectory in zip(made, found.trajectories, strict=True):
        one.metadata.update(result)
        one.status = _status(one, trajectory.finish)
        rewards = trajectory.details.get("reward_info") or {}
        own = None if one_reward else rewards.get("score")
        reward = result.get("reward", rewards.get("score")) if own is None else own
        one.reward = sample.reward if reward is None else reward
        one.metadata["reward_info"] = rewards
        one.metadata["messages"] = trajectory.details.get("messages")
        one.response = _last_words(trajectory)
    return made


async def _run_agent(job: SampleJob, agent: Agent, session: AsyncSession) -> tuple[dict[str, Any], bool]:
    """Return the agent's result, and whether the trainer stopped it."""
    more: dict[str, Any] = {"return_routed_experts": True} if job.replayed.experts is not None else {}
    metadata = {**job.sample.metadata, "session_id": session.id}
    work = agent(
        base_url=session.anthropic_base_url,  # an SDK that adds no /v1 also works
        prompt=job.sample.prompt,
        request_kwargs={**_openai_names(job.sampling), **more},
        metadata=metadata,
    )
    task = asyncio.ensure_future(result_of(work))
    try:
        while not task.done():
            await asyncio.wait([task], timeout=POLL)
            if job.stopped() and not task.done():
                return {}, True
        try:
            return dict(task.result()), False
        except (Exception, asyncio.CancelledError) as error:  # the agent's own, because its task is done
            logger.warning("the agent of sample %s failed", job.sample.index, exc_info=True)
            return {"agent_error": repr(error)}, False
    finally:
        task.cancel()


def _fill(job: SampleJob, sample: Any, given: Seen, earlier: frozenset[str]) -> None:
    """Put one sequence into a sample, with the images that the trainer's model sees there."""
    found = given.trajectory
    made = response_of(found, job.replayed, earlier)
    sample.multimodal_train_inputs = None if given.inputs is None else dict(given.inputs)
    if given.images and found.finish != "abort":  # an aborted sample may begin again, at its prompt
        sample.multimodal_inputs = {**(sample.multimodal_inputs or {}), "images": list(given.images)}
    sample.tokens = made.tokens
    sample.response_length = made.length
    sample.loss_mask = made.mask
    sample.rollout_log_probs = made.logprobs
    sample.weight_versions = made.version_runs
    sample.rollout_routed_experts = made.experts
    # Not cleared: a sample that was removed before stays removed.
    sample.remove_sample = sample.remove_sample or not made.usable
    sample.metadata |= {
        "exact": found.exact,
        "reasons": list(made.reasons),
        "token_kv_versions": made.kv_versions,
        "token_weight_versions": [
            [run.version, run.start - made.start, run.end - made.start] for run in found.versions
        ],
        **({"faults": list(given.faults)} if given.faults else {}),
    }
    job.put_extras(sample, made)


def _siblings(job: SampleJob, found: Sequence[Seen], earlier: frozenset[str]) -> list[Any]:
    """Return a sample for each sequence of one rollout, with the rollout's id, so that losses count it once."""
    rollout = job.sample.rollout_id if job.sample.rollout_id is not None else job.sample.index
    made = []
    for given in found:
        one = copy.deepcopy(job.sample)
        one.rollout_id = rollout
        _fill(job, one, given, earlier)
        made.append(one)
    return made


def _nothing(job: SampleJob, result: Mapping[str, Any], instead: Trajectory) -> Any:
    """Return a sample of a rollout without tokens to train on: a trainer counts it."""
    sample = job.sample
    _fill(job, sample, Seen(instead), frozenset())
    sample.status = sample.Status.FAILED
    sample.metadata.update(result)
    sample.reward = result.get("reward", sample.reward)
    return sample


def _status(sample: Any, finish: str) -> Any:
    if finish == "abort":
        return sample.Status.ABORTED
    return sample.Status.TRUNCATED if finish == "length" else sample.Status.COMPLETED


def _last_words(found: Trajectory) -> str:
    said = [one for one in found.details.get("messages") or () if one.get("role") == "assistant"]
    content = said[-1].get("content") if said else ""
    return content if isinstance(content, str) else ""


_OPENAI = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
_OPENAI_TAKES = frozenset("max_tokens min_tokens seed temperature top_p top_k min_p stop stop_token_ids n".split())


def _openai_names(sampling: Mapping[str, Any]) -> dict[str, Any]:
    renamed = {_OPENAI.get(name, name): value for name, value in sampling.items() if value is not None}
    return {name: value for name, value in renamed.items() if name in _OPENAI_TAKES}


def _session_sampling(sampling: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sampling.items() if value is not None and name != "n"}
